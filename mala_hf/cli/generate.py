# SPDX-License-Identifier: Apache-2.0
"""``mala-hf generate``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .checks import check_numbers, check_place
from .options import add_command, add_model_options, dtype_of, label


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = add_command(commands, "generate", run, "greedy tokens of full attention and of MALA")
    add_model_options(parser)
    parser.add_argument("--dtype", metavar="NAME", help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text, plain or .gz (default: the novel Persuasion)")
    parser.add_argument("--prompts", type=int, default=10, metavar="N", help="parts of the text (default: 10)")
    parser.add_argument("--length", type=int, default=1024, metavar="N", help="tokens of a prompt (default: 1024)")
    parser.add_argument("--new-tokens", type=int, default=256, metavar="N", help="greedy tokens (default: 256)")
    parser.add_argument(
        "--taus",
        type=float,
        nargs="+",
        default=[0.0, 1.0],
        metavar="TAU",
        help="0 shows what rounding alone does (default: 0 1)",
    )
    parser.add_argument("--cache", metavar="NAME", help="cache_implementation, such as static (default: the model's)")


def run(options: argparse.Namespace) -> None:
    """Generate with both, and print where they part."""
    from tqdm.auto import tqdm

    from ..agreement import check_cache, compare_generation, summaries
    from ..checkpoint import OFFLINE_MODEL, load_model
    from ..demo import TEXT_START, text_window
    from ..implementations import implementations_of
    from ..info import device_name, versions
    from ..perplexity import check_positions
    from ..text import read_text

    check_numbers(options, prompts=1, length=2, new_tokens=1)
    check_cache(options.cache)
    check_place(options)
    implementations, dtype = implementations_of(["sdpa", "mala"], options.taus), dtype_of(options.dtype)
    text, text_name = read_text(options.text)
    model, tokenizer = load_model(options.model, device=options.device, dtype=dtype)
    check_positions(model, options.length + options.new_tokens)
    skip = TEXT_START if options.text is None else 0
    window = text_window(tokenizer, text, options.prompts * options.length, skip)
    found = compare_generation(
        model,
        window.split(options.length, 1),
        options.new_tokens,
        implementations,
        cache=options.cache,
        progress=lambda prompts: tqdm(prompts, unit="prompt", leave=False, disable=options.quiet),
    )
    rows = summaries(found, options.new_tokens)
    result = {
        "model": options.model or OFFLINE_MODEL,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "text": text_name,
        "length": options.length,
        "new_tokens": options.new_tokens,
        "cache": options.cache,
        "versions": versions(),
        "rows": rows,
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['model']}, {result['dtype']}, {options.length} tokens and {options.new_tokens} new, beside sdpa")
    for row in rows:
        print(
            f"{label(row):<16} the same on {row['prompts_same']} of {row['prompts']} prompts; median of equal tokens "
            f"{row['same_tokens_median']:g}; sdpa's best token is typically {row['typical_gap']:.3g} above its second"
        )
        for one in row["disagreements"]:
            print(
                f"{'':<16} prompt {one['prompt']}: {one['same_tokens']} tokens, then sdpa puts its own {one['gap']:.3g} above, "
                f"mala its own {one['own_gap']:.3g}"
            )

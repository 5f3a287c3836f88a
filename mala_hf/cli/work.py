# SPDX-License-Identifier: Apache-2.0
"""``mala-hf work``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .checks import check_numbers, check_place
from .options import add_command, add_model_options, dtype_of


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = add_command(commands, "work", run, "work and errors of every layer and head on your text")
    add_model_options(parser)
    parser.add_argument("--dtype", metavar="NAME", help="default: bfloat16 on a GPU, else float32")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="FILE", help="UTF-8 text, plain or .gz (default: the novel Persuasion)")
    source.add_argument("--prompt", metavar="TEXT", help="the text itself")
    parser.add_argument("--length", type=int, metavar="N", help="tokens (default: all, at most 2048; on a GPU 8192)")
    parser.add_argument("--taus", type=float, nargs="+", default=[1.0], metavar="TAU", help="default: 1")
    parser.add_argument("--audit", action="store_true", help="measure the omitted mass exactly, not only its bound")
    parser.add_argument("--gradients", action="store_true", help="errors of dQ, dK, dV for the language-model loss")
    parser.add_argument("--layer", type=int, metavar="N", help="whose tiles to draw (default: where work is least)")
    parser.add_argument("--head", type=int, metavar="N", help="of that layer (default: its head with the least work)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("work_results"),
        metavar="DIR",
        help="JSON, HTML, SVG (default: work_results)",
    )


def run(options: argparse.Namespace) -> None:
    """Measure the model, save the report, and print tables or JSON."""
    from tqdm.auto import tqdm

    from ..checkpoint import OFFLINE_MODEL, load_config, load_model
    from ..demo import CPU_LENGTH, GPU_LENGTH, layer_progress
    from ..extras import require_packages
    from ..info import device_name, versions
    from ..perplexity import check_positions
    from ..prompt import prompt_ids
    from ..text import read_text
    from ..work_page import save_report
    from ..work_study import check_head, check_taus, study_work

    check_taus(options.taus)
    check_numbers(options, length=2, layer=0, head=0)
    check_head(options.layer, options.head)
    check_place(options, folder=options.output)
    dtype = dtype_of(options.dtype)
    require_packages("demo", ("rich",))
    text, name = (options.prompt, "the prompt") if options.prompt is not None else read_text(options.text)
    if options.layer is not None:  # known before the weights are
        check_head(options.layer, options.head, load_config(options.model).get_text_config())
    model, tokenizer = load_model(options.model, device=options.device, dtype=dtype)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most = GPU_LENGTH if model.device.type == "cuda" else CPU_LENGTH
    input_ids = prompt_ids(tokenizer, text, options.length, at_most=min(most, positions or most))
    check_positions(model, input_ids.shape[1])
    with layer_progress(model, f"{input_ids.shape[1]} tokens", disable=options.quiet):
        study = study_work(
            model,
            input_ids,
            options.taus,
            audit=options.audit,
            gradients=options.gradients,
            layer=options.layer,
            head=options.head,
            progress=lambda layers: tqdm(layers, desc="gradients", unit="layer", disable=options.quiet),
        )
    first = study.runs[0][0]
    result = {
        "model": options.model or OFFLINE_MODEL,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "text": name,
        "length": input_ids.shape[1],
        "audit": options.audit,
        "tile": list(first.tile),
        "impl": first.impl,
        "versions": versions(),
        **study.to_dict(),
    }
    files = save_report(result, options.output)
    if options.json:
        print(json.dumps(result))
        return
    print_report(result)
    print("Written: " + ", ".join(map(str, files)))


def print_report(result: dict[str, Any]) -> None:
    """Print the layers of the first tau, all taus, and what the numbers mean."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ..work_tables import break_even_words, layer_rows, plain_words, summary_rows

    console = Console(highlight=False)
    for title, (headings, rows) in (
        (f"By layer, tau {result['runs'][1]['tau']:g}, means over heads, in %", layer_rows(result)),
        (f"{result['model']}, {result['length']:,} tokens of {result['text']}; in %", summary_rows(result)),
    ):
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="right" if number else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for words in (*plain_words(result), break_even_words(result)):
        console.print(words + "\n", markup=False)

# SPDX-License-Identifier: Apache-2.0
"""``mala-hf ppl``."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from .checks import check_numbers, check_place
from .options import add_command, add_evaluation_options, add_model_options, dtype_of, label

DEFAULT_LENGTHS = [512, 1024, 2048]


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = add_command(commands, "ppl", run, "perplexity of a text by window length, implementation and tau")
    add_model_options(parser)
    add_evaluation_options(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="PATH", help="file or folder (default: the novel Persuasion)")
    source.add_argument("--dataset", metavar="NAME", help="of the hub: NAME[:CONFIG[:SPLIT]]")
    parser.add_argument("--documents", type=int, metavar="N", help="the first N (default: all; 50 of a data set)")
    parser.add_argument("--join", action="store_true", help="make one document of all, blank lines between")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=DEFAULT_LENGTHS,
        metavar="N",
        help="tokens in a window (default: 512 1024 2048)",
    )
    parser.add_argument("--stride", type=int, metavar="N", help="tokens between windows (default: the length)")
    parser.add_argument("--windows", type=int, default=4, metavar="N", help="windows of a document (default: 4)")


def run(options: argparse.Namespace) -> None:
    """Score the documents with each implementation at each length; print a row as soon as it is known."""
    from tqdm.auto import tqdm

    from ..checkpoint import OFFLINE_MODEL, load_model
    from ..documents import read_dataset, read_documents
    from ..implementations import implementations_of
    from ..info import device_name, versions
    from ..model_place import check_model, check_tokenizer
    from ..perplexity import compare_implementations
    from ..rope_scaling import read_rope_scaling
    from ..windows import beginning_token, tokenize

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("mala-hf ppl runs in one process; start it without accelerate launch")
    check_numbers(options, lengths=2, windows=1, documents=1)
    if options.stride is not None and not 1 <= options.stride <= min(options.lengths):
        raise ValueError(
            f"--stride must be from 1 to the {min(options.lengths)} tokens of a window, got {options.stride}"
        )
    check_place(options)
    implementations = implementations_of(options.implementations, options.taus)
    scaling, dtype = read_rope_scaling(options.rope_scaling), dtype_of(options.dtype)
    for name, check in ((options.model, check_model), (options.tokenizer, check_tokenizer)):
        if name is not None:
            check(name)
    if options.dataset is not None:
        documents, text_name = read_dataset(options.dataset, options.documents)
    else:
        documents, text_name = read_documents(options.text, options.documents)
    if options.join:
        documents = ["\n\n".join(documents)]
    model, tokenizer = load_model(
        options.model, device=options.device, dtype=dtype, tokenizer=options.tokenizer, rope_scaling=scaling
    )
    rows = compare_implementations(
        model,
        [tokenize(tokenizer, document) for document in documents],
        options.lengths,
        implementations=implementations,
        stride=options.stride,
        max_windows=options.windows,
        bos=beginning_token(tokenizer),
        progress=lambda windows: tqdm(windows, unit="window", leave=False, disable=options.quiet),
    )
    result = {
        "model": options.model or OFFLINE_MODEL,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "rope_scaling": scaling,
        "text": text_name,
        "joined": options.join,
        "stride": options.stride,
        "versions": versions(),
    }
    if options.json:
        print(json.dumps(result | {"rows": list(rows)}))
        return
    print(f"{result['model']}, {result['dtype']}, on {text_name}")
    print(
        f"{'length':>7} {'attention':<16} {'tokens':>7} {'nats/token':>10} {'perplexity':>10} {'work':>6} "
        f"{'KL':>7} {'top-1':>7}  difference in nats [95 %]"
    )
    printed = []
    for row in rows:
        print(row_line(row), flush=True)
        printed.append(row)
    print_buckets([row for row in printed if row["length"] == max(options.lengths)])


def row_line(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    work = "" if row["work_fraction"] is None else f"{100 * row['work_fraction']:.1f}%"
    line = f"{row['length']:>7} {label(row):<16} {row['tokens']:>7} {row['nll']:>10.6f} {row['ppl']:>10.4f} {work:>6} "
    if "difference" not in row:
        return line.rstrip()
    found = row["difference"]
    interval = "" if found["low"] is None else f" [{found['low']:+.1e}, {found['high']:+.1e}]"
    units = f"{found['units']} {found['by']}{'s' if found['units'] > 1 else ''}"
    agreement = f"{row['kl_mean']:>7.1e} {100 * row['top1_agreement']:>6.2f}%"
    return f"{line}{agreement}  {found['mean']:+.1e}{interval}, {units}"


def print_buckets(rows: list[dict[str, Any]]) -> None:
    """Print nats per token by tokens of context, one column for each implementation."""
    print(
        f"\n{'context at ' + str(rows[0]['length']):>17} {'tokens':>8}" + "".join(f" {label(row):>16}" for row in rows)
    )
    for buckets in zip(*(row["buckets"] for row in rows), strict=True):
        low, high = buckets[0]["context"]
        context = f"{low} to {high}" if high > low else str(low)
        print(f"{context:>17} {buckets[0]['tokens']:>8}" + "".join(f" {one['nll']:>16.6f}" for one in buckets))

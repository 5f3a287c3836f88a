# SPDX-License-Identifier: Apache-2.0
"""Multi-query associative recall: full attention, MALA, MoBA, DSA and NSA in the same small model; resumable, JSON.

    python scripts/study_recall.py --jobs 5 --budget-seconds 150 --output results/study_recall_h200.json
    python scripts/study_recall.py --device cpu --lengths 512 --widths 32 --pairs 16 --vocab-size 256 --ceiling 320 \\
        --short-tokens 1024 --batch 4 --output recall.json

The same command goes on where it was, from the output and from the rows that gather beside it while it runs. Methods with a budget
attend to at most ``--ceiling`` keys of a query. A run that fails is named at the end, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stored_results import as_text, write_whole

from mala_hf.bench.runner import bench_device, new_result
from mala_hf.studies.recall_model import CEILING, METHODS
from mala_hf.studies.recall_sweep import LENGTHS, WIDTHS, cells_of, sweep
from mala_hf.studies.recall_train import Cell, Recipe
from mala_hf.studies.row_store import RowStore

NOT_RUN, FAILED = "not_run", "failed"  # the runs that were asked for and are not there, and why some of them are not


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="M", help=", ".join(METHODS))
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N", help="tokens of a sequence")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, metavar="N", help="d_model")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each (default: 3)")
    parser.add_argument("--pairs", type=int, default=256, metavar="N", help="key-value pairs (256)")
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N")
    parser.add_argument("--ceiling", type=int, default=CEILING, metavar="N", help=f"key slots per query ({CEILING})")
    parser.add_argument(
        "--short-steps", type=int, default=Recipe.short_steps, metavar="N", help="on shorter tasks, first"
    )
    parser.add_argument("--short-tokens", type=int, default=Recipe.short_tokens, metavar="N", help="of such a step")
    parser.add_argument("--steps", type=int, default=Recipe.steps, metavar="N", help=f"default: {Recipe.steps}")
    parser.add_argument("--batch", type=int, default=Recipe.batch, metavar="N", help=f"default: {Recipe.batch}")
    parser.add_argument("--test-sequences", type=int, default=Recipe.test_sequences, metavar="N", help="default: 64")
    parser.add_argument("--rate", type=float, default=Recipe.rate, metavar="X", help="of a width of 64 (0.01)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time on the device")
    parser.add_argument("--budget-seconds", type=float, metavar="X", help="finish no run after that time")
    parser.add_argument(
        "--run-seconds",
        type=float,
        default=240.0,
        metavar="X",
        help="stop a run that takes longer (240)",
    )
    parser.add_argument("--device", metavar="NAME", help="default: a GPU")
    parser.add_argument("--commit", metavar="SHA", help="to record (default: the checkout's)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON")
    return parser


def store_of(output: Path, settings: dict[str, Any]) -> RowStore:
    """The rows that gathered beside the output, or those in it. Raises ``ValueError`` where they are of other settings."""
    store = RowStore(output.with_suffix(".rows.jsonl"), settings)
    if not store.rows and output.exists():
        found = json.loads(output.read_text("utf-8"))
        rows = found.pop("rows")
        for name in (NOT_RUN, FAILED):
            found.pop(name, None)
        if found != settings:
            raise ValueError(f"{output} was measured with other settings: remove it, or choose another output")
        store.append(rows)
    return store


def named(cell: Cell) -> str:
    """A run in a few words."""
    return f"{cell.method}, length {cell.seqlen}, width {cell.d_model}, seed {cell.seed}"


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['method']:>5}  length {row['seqlen']:>5}  width {row['d_model']:>4}  seed {row['seed']}  accuracy {row['accuracy']:.4f}"
        f"  {row['key_slots_per_query']:,.0f} slots  {row['seconds']:.1f} s",
        flush=True,
    )


def main() -> None:
    """Run what is missing."""
    options = build_parser().parse_args()
    device = bench_device(options.device)
    recipe = Recipe(
        short_steps=options.short_steps, short_tokens=options.short_tokens, steps=options.steps, batch=options.batch, rate=options.rate,
        pairs=options.pairs, vocab_size=options.vocab_size, ceiling=options.ceiling,
        test_sequences=options.test_sequences,
    )  # fmt: skip
    facts = new_result(device, options.commit)
    commit = facts.pop("commit")
    store = store_of(options.output, facts | {"recipe": asdict(recipe)})
    cells = cells_of(options.methods, options.lengths, options.widths, range(options.seeds))

    left, failed = sweep(
        cells, recipe, store, device,
        jobs=options.jobs, budget_seconds=options.budget_seconds, run_seconds=options.run_seconds, commit=commit, on_row=show,
    )  # fmt: skip
    missing: dict[str, Any] = {
        NOT_RUN: [named(cell) for cell in cells if not store.has(**asdict(cell))],
        FAILED: {named(cell): why for cell, why in failed.items()},
    }
    write_whole(options.output, as_text(store.settings | missing | {"rows": store.rows}))
    store.path.unlink(missing_ok=True)
    print(f"{len(store.rows)} runs stored, {len(left)} left")
    for name, why in missing[FAILED].items():
        print(f"failed: {name}: {why}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

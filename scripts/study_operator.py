# SPDX-License-Identifier: Apache-2.0
"""Full attention, MALA, MoBA, DSA and NSA at about 1,024 key slots per query: forward, backward, decode, peak memory; JSON.

    python scripts/study_operator.py --output results/study_operator_h200.json
    python scripts/study_operator.py --device cpu --seqlen 1024 --heads 2 1 --head-dim 32 --slots 512 --output operator.json

A method's row is stored when it is measured. Until each has one the same command goes on with the others, and with those that failed.

The heads are those of one GPU: 16 query heads on one KV head are a rank of eight of a model with 128 and 8. With the heads of one layer
spread over GPUs that run together, ``bench_tensor_parallel.py`` measures full attention and MALA.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mala_hf.bench.runner import bench_device, new_result, save
from mala_hf.studies.operator_bench import METHODS, OperatorBench, OperatorShape
from mala_hf.studies.row_store import Row, RowStore


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="M", help=", ".join(METHODS))
    parser.add_argument("--seqlen", type=int, default=131072, metavar="N", help="default: 131072")
    parser.add_argument("--heads", type=int, nargs=2, default=[16, 1], metavar=("Q", "KV"), help="default: 16 1")
    parser.add_argument("--head-dim", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--slots", type=int, default=1024, metavar="N", help="per query; default: 1024")
    parser.add_argument("--budget-ms", type=float, default=400.0, metavar="X", help="of each timing; default: 400")
    parser.add_argument(
        "--budget-seconds", type=float, default=float("inf"), metavar="X", help="begin no further method after so long"
    )
    parser.add_argument("--device", metavar="NAME", help="default: a GPU")
    parser.add_argument("--commit", metavar="SHA", help="to record (default: the checkout's)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON")
    return parser


def show(name: str, found: Row) -> None:
    """A method in a line."""
    if "failed" in found:
        print(f"{name:>12}  {found['failed']}", flush=True)
    if "decode" in found:
        times = "  ".join(f"{part} {found[part]['median_ms']:,.3f} ms" for part in ("forward", "backward", "decode"))
        memory = "" if found["step_peak_bytes"] is None else f"  {found['step_peak_bytes'] / 2**20:,.0f} MiB"
        print(f"{name:>12}  {times}{memory}  {found['implementation']}", flush=True)


def main() -> None:
    """Measure what is missing, and write after each method."""
    began = time.monotonic()
    options = build_parser().parse_args()
    device = bench_device(options.device)
    shape = OperatorShape(options.seqlen, *options.heads, options.head_dim, options.slots)
    facts = new_result(device, options.commit)
    settings = {key: value for key, value in facts.items() if key != "commit"} | asdict(shape)
    store = RowStore(options.output.with_suffix(".rows.jsonl"), settings | {"budget_ms": options.budget_ms})
    bench = OperatorBench(shape, device, options.budget_ms)
    print(f"inputs: {bench.row['mala_key_slots_per_query']:,.0f} slots, {time.monotonic() - began:.0f} s", flush=True)
    for name in options.methods:
        is_done = any(row["method"] == name and "failed" not in row for row in store.rows)
        if not is_done and time.monotonic() - began < options.budget_seconds:
            found = bench.measure(name)
            store.append([{"method": name, **found}])
            show(name, found)
        rows = {row["method"]: {key: x for key, x in row.items() if key != "method"} for row in store.rows}
        not_run = [one for one in options.methods if one not in rows]
        save(facts | asdict(shape) | bench.row | {"not_run": not_run} | rows, options.output)
    if not_run:
        print(f"out of time; the same command goes on with {', '.join(not_run)}")
    else:
        store.path.unlink()


if __name__ == "__main__":
    main()

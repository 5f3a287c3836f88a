# SPDX-License-Identifier: Apache-2.0
"""Fuzz the public functions against the rule, and add what was tried to a file of results.

python scripts/fuzz.py --cases 10000 --output results/fuzz_cpu.json      # what make fuzz runs
python scripts/fuzz.py --cases 500 --seed 7 --target decode --minutes 4  # a part, for a while

Cases of one seed are always the same. A case that fails is printed, made as small as it gets, and ends the run with code 1; the file
keeps the number of faults. Runs with another seed add up; --fresh starts a file anew.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from fuzz_targets import TARGETS
from quick_interpreter import speed_up
from stored_results import as_text

PIECE = 10  # cases between two looks at the clock


def run(name: str, cases: int, first_seed: int, until: float) -> tuple[int, int]:
    """Cases tried and faults found, in pieces of their own seeds."""
    tried, piece = 0, 0
    while tried < cases and time.monotonic() < until:
        try:
            tried += TARGETS[name].run(min(PIECE, cases - tried), 1_000_003 * first_seed + piece)
        except Exception:
            traceback.print_exc()
            return tried, 1
        piece += 1
    return tried, 0


def added(stored: dict[str, Any], name: str, seed: int, tried: int, faults: int, seconds: float) -> dict[str, Any]:
    """``stored`` with another run of one target."""
    rows = {row["target"]: row for row in stored.get("rows", [])}
    row = rows.setdefault(name, {"target": name, "cases": 0, "faults": 0, "seconds": 0.0, "seeds": []})
    if seed in row["seeds"]:
        raise ValueError(f"{name} was run with seed {seed} already: its cases would count twice")
    row["cases"] += tried
    row["faults"] += faults
    row["seconds"] = round(row["seconds"] + seconds, 1)
    row["seeds"].append(seed)
    return {
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "cases": sum(each["cases"] for each in rows.values()),
        "faults": sum(each["faults"] for each in rows.values()),
        "rows": [rows[key] for key in TARGETS if key in rows],
    }


def main() -> int:
    """Run the targets; 0 where no case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="over all targets, in their shares")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append", choices=TARGETS, help="these alone, --cases of them together")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop, between two pieces, after as long")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--fresh", action="store_true", help="forget what the file holds")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") != "1":  # triton reads it when it is imported, which it is by now
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"})
    speed_up()
    torch.set_num_threads(1)  # the tensors are small
    names = options.target or list(TARGETS)
    shares = {name: TARGETS[name].share for name in names}
    until = time.monotonic() + 60 * options.minutes
    stored: dict[str, Any] = {}
    if options.output and options.output.exists() and not options.fresh:
        stored = json.loads(options.output.read_text("utf-8"))
    failed = False
    for name in names:
        start = time.monotonic()
        cases = -(-options.cases * shares[name] // sum(shares.values()))
        tried, faults = run(name, cases, options.seed, until)
        failed |= bool(faults)
        print(f"{name}: {tried} cases, {faults} faults, {time.monotonic() - start:.0f} s", flush=True)
        if tried or faults:
            stored = added(stored, name, options.seed, tried, faults, time.monotonic() - start)
        if options.output and stored:
            options.output.write_text(as_text(stored), "utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Triton's concurrency sanitizer over Hopper's kernels: whether accesses to shared memory wait for the copies and products before them.

python scripts/consan.py results/consan_h200.json --logs LOGS
python scripts/consan.py consan.json --logs LOGS --only "INT8 discovery"

It is compiled into the kernels, knows mbarriers, copies of the tensor-memory accelerator and asynchronous products, and stops a kernel
at the first access that is out of order, whatever the bits are. Needs a Hopper GPU and triton 3.6 or newer. Two small kernels come
first: one in order, and one that reads too early. Only if the second is stopped and the first is not is there a verdict.
Instrumented kernels take minutes to compile: one process for each call.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from run_every_kernel import CALLS
from sanitizer_log import FAMILIES, HOPPERS, launches
from stored_results import ROOT, as_text

DRIVER, CONTROL = ROOT / "scripts" / "run_every_kernel.py", ROOT / "scripts" / "consan_control.py"
DEFAULT = (
    "forward",
    "forward without a vote",
    "forward, tiles too large for three per program on Hopper",
    "INT8 discovery",
)
KERNELS = {kernel for family in HOPPERS for kernel in FAMILIES[family]}
ASSERTION = re.compile(r"Assertion `([^`\n]+)` failed")
ENVIRONMENT = {
    "TRITON_INSTRUMENTATION_MODE": "consan",
    "CUDA_LAUNCH_BLOCKING": "1",
}


def run(command: list[str], log: Path, limit: float) -> tuple[int, str]:
    """Exit code, -1 where there was no end, and what was printed, which ``log`` keeps."""
    with log.open("w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                command, env={**os.environ, **ENVIRONMENT}, stdout=file, stderr=subprocess.STDOUT, timeout=limit
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -1
    return code, log.read_text("utf-8", errors="replace")


def assertions(log: str) -> list[str]:
    """Those that failed, each once. Instrumented kernels check whole numbers for overflow too, which is another matter."""
    return sorted({text for text in ASSERTION.findall(log) if "overflow" not in text})


def watches(folder: Path, limit: float) -> bool:
    """Whether the kernel in order runs and the other is stopped for what it does."""
    code, _ = run([sys.executable, str(CONTROL), "waits"], folder / "consan-control-waits.txt", limit)
    stopped, log = run([sys.executable, str(CONTROL), "races"], folder / "consan-control-races.txt", limit)
    return code == 0 and stopped > 0 and bool(assertions(log))


def row_of(call: str, code: int, log: str) -> dict[str, Any]:
    """``ok`` where one of Hopper's kernels was launched and nothing stopped it; None where there was no end or another error."""
    found = assertions(log)
    number = sum(count for kernel, count in launches(log).items() if kernel in KERNELS)
    ok = False if found else True if code == 0 and number else None
    return {"call": call, "launches": number, "ok": ok, "messages": found}


def main() -> int:
    """Run all, write rows; 0 where all are in order, 1 where one is not, 2 where there is no verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--logs", type=Path, required=True, help="folder for what is printed")
    parser.add_argument("--only", action="append", choices=CALLS)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for a process")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    if not watches(options.logs, options.limit):
        print("the sanitizer does not tell a kernel in order from one that is not: see the logs", file=sys.stderr)
        return 2

    def watched(call: str) -> dict[str, Any]:
        start = time.perf_counter()
        log = options.logs / f"consan-{re.sub(r'[^a-z0-9]+', '-', call.lower())}.txt"
        row = row_of(call, *run([sys.executable, str(DRIVER), "--only", call], log, options.limit))
        print(row, flush=True)
        return row | {"seconds": round(time.perf_counter() - start, 1)}

    calls = options.only or list(DEFAULT)
    with ThreadPoolExecutor(len(calls)) as pool:
        rows = list(pool.map(watched, calls))
    options.output.write_text(as_text({"control": "stopped", "rows": rows}), "utf-8")
    if any(row["ok"] is False for row in rows):
        return 1
    return 0 if all(row["ok"] for row in rows) else 2


if __name__ == "__main__":
    sys.exit(main())

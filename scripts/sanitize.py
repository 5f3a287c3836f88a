# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's compute-sanitizer over every kernel: memcheck, racecheck and initcheck; a summary as JSON.

python scripts/sanitize.py results/sanitizer_h200.json --logs LOGS
python scripts/sanitize.py sanitizer.json --logs LOGS --tool memcheck --only "decode, split"   # a part
python scripts/sanitize.py sanitizer.json --logs LOGS --each   # a process for each call: says which call, takes longer

Needs a GPU and the CUDA toolkit's compute-sanitizer: on the PATH, under CUDA_HOME or /usr/local/cuda, or named by COMPUTE_SANITIZER.
The calls of scripts/run_every_kernel.py run once without the tool first, so that compilation is not what is watched. Memory comes
straight from CUDA, not from torch's cache, so that a step beyond a tensor is one beyond an allocation.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from run_every_kernel import CALLS
from stored_results import ROOT, as_text

TOOLS = ("memcheck", "racecheck", "initcheck")
EXIT_CODE = 86  # what the sanitizer is told to end with where it found something
DRIVER = ROOT / "scripts" / "run_every_kernel.py"
SUMMARIES = re.compile(r"^=+ (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", re.MULTILINE)
# a frame of one of ours; PyTorch's own kernels are no part of this
OURS = re.compile(r"^=+ +at .*?\b(\w+_kernel)\b", re.MULTILINE)
NOT_WATCHED = (
    "not supported",
    "Unable to find",
    "failed to initialize",
    "InitializationError",
    "No attachable process",
)


def sanitizer() -> str | None:
    """Where compute-sanitizer is, None where it is not."""
    if named := os.environ.get("COMPUTE_SANITIZER"):
        return named
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [Path(home) / "bin" for home in homes if home]
    return shutil.which("compute-sanitizer") or next(
        (str(place / "compute-sanitizer") for place in places if (place / "compute-sanitizer").exists()), None
    )


def verdict(code: int, log: str) -> dict[str, Any]:
    """What a log says: ``errors`` found by the tool, and the ``kernels`` of ours that they lie in; ``ok`` where there are none.

    A log without a summary, or a driver that failed by itself, is no verdict and not ok.
    """
    counts = [int(first or second) for first, second in SUMMARIES.findall(log)]
    watched = bool(counts) and not any(text in log for text in NOT_WATCHED)
    errors = sum(counts) if watched else None
    return {"ok": watched and errors == 0 and code == 0, "errors": errors, "kernels": sorted(set(OURS.findall(log)))}


def driver_of(calls: list[str]) -> list[str]:
    """The command that runs these calls."""
    return [sys.executable, str(DRIVER), *(word for call in calls for word in ("--only", call))]


def watch(tool: str, calls: list[str], program: str, folder: Path, limit: float) -> dict[str, Any]:
    """Run some calls under one tool."""
    name = calls[0] if len(calls) == 1 else f"{len(calls)} calls"
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--tool", tool, "--error-exitcode", str(EXIT_CODE), "--print-limit", "50"]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [program, *options, *driver_of(calls)], env=environment, capture_output=True, text=True, timeout=limit
        )
        code, log = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, log = -1, f"no end after {limit} seconds\n{error.stdout!r}"
    (folder / f"{tool}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.txt").write_text(log, "utf-8")
    return {"tool": tool, "calls": name, **verdict(code, log), "seconds": round(time.perf_counter() - start, 1)}


def main() -> int:
    """Run all, write the summary; 0 where nothing was found, 1 where something was, 2 where nothing could be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the summary")
    parser.add_argument("--logs", type=Path, required=True, help="folder for what the tools print")
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--only", action="append", choices=CALLS)
    parser.add_argument("--each", action="store_true", help="a process for each call")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for a process")
    options = parser.parse_args()
    program = sanitizer()
    if program is None:
        print(
            "there is no compute-sanitizer here: install the CUDA toolkit (package cuda-sanitizer) or name it by COMPUTE_SANITIZER",
            file=sys.stderr,
        )
        return 2
    options.logs.mkdir(parents=True, exist_ok=True)
    calls = options.only or list(CALLS)
    if subprocess.run(driver_of(calls)).returncode:
        print("the kernels fail without a sanitizer already", file=sys.stderr)
        return 2
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.strip().split("\n")[-1]
    rows = []
    for tool in options.tool or TOOLS:
        for group in [[call] for call in calls] if options.each else [calls]:
            rows.append(watch(tool, group, program, options.logs, options.limit))
            print(rows[-1], flush=True)
            found = {"sanitizer": version, "calls": len(calls), "rows": rows}
            options.output.write_text(as_text(found), "utf-8")  # what was found so far outlives a run that is cut short
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

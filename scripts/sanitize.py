# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's compute-sanitizer over every kernel: memcheck, racecheck, initcheck and synccheck; a summary by family of kernels as JSON.

python scripts/sanitize.py results/sanitizer_h200.json --logs LOGS
python scripts/sanitize.py sanitizer.json --logs LOGS --tool memcheck --only "decode, split"   # a part
python scripts/sanitize.py sanitizer.json --logs LOGS --each   # a process for each call: says which call, takes longer

Needs a GPU and compute-sanitizer: on the PATH, under CUDA_HOME or /usr/local/cuda, or named by COMPUTE_SANITIZER. The CUDA toolkit has
it, and the Python package nvidia-cuda-sanitizer-api a newer one. racecheck runs twice: over the portable kernels with tensors read
through pointers, where each access to shared memory is one of a thread, and over the kernels that are shipped.

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

from process_ends import end_session, exit_on_sigterm
from run_every_kernel import CALLS
from sanitizer_log import EXIT_CODE, verdicts
from stored_results import ROOT, as_text, write_whole

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SHIPPED, PORTABLE = "as shipped", "portable, pointers"
DRIVER = ROOT / "scripts" / "run_every_kernel.py"


def sanitizer() -> str | None:
    """Where compute-sanitizer is, None where it is not."""
    if named := os.environ.get("COMPUTE_SANITIZER"):
        return named
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [Path(home) / "bin" for home in homes if home]
    return shutil.which("compute-sanitizer") or next(
        (str(place / "compute-sanitizer") for place in places if (place / "compute-sanitizer").exists()), None
    )


def version_of(program: str) -> tuple[str, tuple[int, ...]]:
    """As it prints it, and its year and number."""
    text = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.strip().split("\n")[-1]
    numbers = re.search(r"(\d{4})\.(\d+)", text)
    return text, (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def driver_of(calls: list[str], way: str = SHIPPED) -> list[str]:
    """The command that runs these calls."""
    only = [word for call in calls for word in ("--only", call)]
    return [sys.executable, str(DRIVER), *only, *(["--portable"] if way == PORTABLE else [])]


def watch(tool: str, way: str, calls: list[str], program: str, folder: Path, limit: float) -> tuple[int, str]:
    """Run some calls under one tool: its exit code and log, which is kept whole in ``folder``."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--tool", tool, "--error-exitcode", str(EXIT_CODE), "--print-limit", "1000"]
    name = calls[0] if len(calls) == 1 else f"{len(calls)} calls"
    path = folder / f"{tool}-{re.sub(r'[^a-z0-9]+', '-', f'{way} {name}'.lower())}.txt"
    with path.open("w", encoding="utf-8") as log:
        command = [program, *options, *driver_of(calls, way)]
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            end_session(process)  # the driver too, which the tool has started
    return code, path.read_text("utf-8", errors="replace")


def runs(tools: list[str], calls: list[str], each: bool) -> list[tuple[str, str, list[str]]]:
    """Tool, way and calls of each process."""
    groups = [[call] for call in calls] if each else [calls]
    ways = {"racecheck": (PORTABLE, SHIPPED)}
    return [(tool, way, group) for tool in tools for way in ways.get(tool, (SHIPPED,)) for group in groups]


def main() -> int:
    """Run all, write the summary; 0 where nothing was found, 1 where something was, 2 where nothing could be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the summary")
    parser.add_argument("--logs", type=Path, required=True, help="folder for what the tools print")
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--only", action="append", choices=CALLS)
    parser.add_argument("--each", action="store_true", help="a process for each call")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a process")
    options = parser.parse_args()
    exit_on_sigterm()
    program = sanitizer()
    if program is None:
        print(
            "there is no compute-sanitizer here: install the CUDA toolkit (package cuda-sanitizer) or the Python package "
            "nvidia-cuda-sanitizer-api, or name it by COMPUTE_SANITIZER",
            file=sys.stderr,
        )
        return 2
    options.logs.mkdir(parents=True, exist_ok=True)
    calls, tools = options.only or list(CALLS), options.tool or list(TOOLS)
    for way in dict.fromkeys(way for _, way, _ in runs(tools, calls, False)):
        if subprocess.run(driver_of(calls, way)).returncode:
            print(f"the kernels fail without a sanitizer already ({way})", file=sys.stderr)
            return 2
    text, version = version_of(program)
    rows: list[dict[str, Any]] = []
    for tool, way, group in runs(tools, calls, options.each):
        start = time.perf_counter()
        code, log = watch(tool, way, group, program, options.logs, options.limit)
        named = {"tool": tool, "kernels of": way} | ({"call": group[0]} if options.each else {})
        found = [named | row for row in verdicts(tool, code, log, version)]
        found[0]["seconds"] = round(time.perf_counter() - start, 1)
        rows += found
        for row in found:
            print({key: row[key] for key in (*named, "family", "launches", "ok", "errors")}, flush=True)
        summary = {"sanitizer": text, "calls": len(calls), "rows": rows}
        write_whole(options.output, as_text(summary))  # what was found so far outlives a run that is cut short
    return 1 if any(row["ok"] is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

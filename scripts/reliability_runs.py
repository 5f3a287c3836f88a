# SPDX-License-Identifier: Apache-2.0
"""Run the tests of reliability and keep what each tried: cases, runs that had to repeat, faults that were injected; as JSON.

python scripts/reliability_runs.py results/reliability_cpu.json
python scripts/reliability_runs.py results/reliability_h200.json --seconds 280    # on a GPU, or two
python scripts/reliability_runs.py reliability.json --only tests/test_reliability_gpu.py --jobs 1

Several processes share the tests, and a GPU: nothing here measures times. The file is written again as tests end, so a run that is cut
short leaves what it found. After ``--seconds`` it is ended, and what did not run is listed, and counted as not run.
Exit code: 0 where all passed, 1 where something failed, 3 where nothing did and something was not run, pytest's where it had an error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from process_ends import end_session, exit_on_sigterm
from stored_results import ROOT, as_text, write_whole

FILES = (
    "tests/test_two_gpus.py",
    "tests/test_reliability_gpu.py",
    "tests/test_stress_gpu.py",
    "tests/test_out_of_memory.py",
    "tests/test_non_finite.py",
    "tests/test_extreme_numbers.py",
    "tests/test_workers.py",
    "tests/test_every_kernel.py",
    "tests/test_sanitizer_log.py",
    "tests/test_fuzz.py",
)
COUNTED = ("runs", "faults")
STEP = 1.0  # seconds between two looks at the log
MOST_JOBS = 8


def rows_of(log: Path) -> list[dict[str, Any]]:
    """One for each test function: its cases by outcome, seconds, and the sums of the properties that it recorded."""
    text = log.read_text("utf-8") if log.exists() else ""
    lines = text.splitlines(keepends=True)
    entries = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half there
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    cases: dict[str, set[str]] = {}
    for entry in entries:
        for name in entry.get("collected", []):
            cases.setdefault(name.split("@")[0], set())  # a group is named behind it
        if "name" not in entry:
            continue
        outcomes = cases.setdefault(entry["name"].split("@")[0], set())
        outcomes.add("done" if entry["when"] == "teardown" else entry["outcome"])
        if entry["when"] == "teardown" and entry["outcome"] == "failed":
            outcomes.add("failed")
    empty = {"passed": 0, "failed": 0, "skipped": 0, "not_run": 0}
    for name, outcomes in cases.items():
        row = _row_of(rows, name, empty)
        # a test that crashed its process has failed and has no end
        ended = ("failed", "skipped", "passed") if "done" in outcomes else ("failed",)
        row[next((x for x in ended if x in outcomes), "not_run")] += 1
    for entry in entries:
        if "name" in entry:
            row = _row_of(rows, entry["name"].split("@")[0], empty)
            row["seconds"] = round(row.get("seconds", 0.0) + entry["seconds"], 1)
            for key in COUNTED:
                if key in entry["counted"]:
                    row[key] = row.get(key, 0) + entry["counted"][key]
    return [row for row in rows.values() if row["passed"] or row["failed"] or row["not_run"]]


def _row_of(rows: dict[tuple[str, str], dict[str, Any]], name: str, empty: dict[str, int]) -> dict[str, Any]:
    file, test = Path(name.split("::")[0]).stem, name.split("::")[-1].split("[")[0]
    return rows.setdefault((file, test), {"file": file, "test": test, **empty})


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is stored: versions, totals, rows."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {"torch": torch.__version__.split("+")[0]} | ({"gpu": gpus[0], "gpus": len(gpus)} if gpus else {})
    totals = {key: sum(row.get(key, 0) for row in rows) for key in ("passed", "failed", "not_run", *COUNTED)}
    return {**versions, **totals, "rows": rows}


def command_of(tests: list[str], jobs: int) -> list[str]:
    """pytest over these tests."""
    share = ["-n", str(jobs), "--dist", "loadgroup"] if jobs > 1 else []
    return [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "reliability_log", *share, *tests]


def run(tests: list[str], jobs: int, seconds: float | None, output: Path) -> tuple[int | None, list[dict[str, Any]]]:
    """pytest's exit code, None where its time was over, and the rows, which ``output`` has too."""
    end = None if seconds is None else time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.jsonl"
        environment = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)),
            **os.environ,
            "RELIABILITY_LOG": str(log),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "scripts"), os.environ.get("PYTHONPATH")])),
        }
        process = subprocess.Popen(command_of(tests, jobs), cwd=ROOT, env=environment, start_new_session=True)
        try:
            while process.poll() is None and (end is None or time.monotonic() < end):
                time.sleep(STEP)
                write_whole(output, as_text(summary(rows_of(log))))
            code = process.poll()
        finally:
            end_session(process)  # its workers too, and what they have started
        rows = rows_of(log)
    write_whole(output, as_text(summary(rows)))
    return code, rows


def main() -> int:
    """Run, write, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", action="append", help="these files or tests; may be given more than once")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, MOST_JOBS), help="processes")
    parser.add_argument("--seconds", type=float, help="end it after so long")
    options = parser.parse_args()
    exit_on_sigterm()
    code, rows = run(options.only or list(FILES), options.jobs, options.seconds, options.output)
    for row in rows:
        if row["not_run"]:
            print(f"not run: {row['not_run']} of {row['file']}::{row['test']}")
    if any(row["failed"] for row in rows):
        return 1
    if code not in (0, None):
        return code
    return 3 if code is None or any(row["not_run"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

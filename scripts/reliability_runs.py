# SPDX-License-Identifier: Apache-2.0
"""Run the tests of reliability and keep what each tried: cases, runs that had to repeat, faults that were injected; as JSON.

python scripts/reliability_runs.py results/reliability_cpu.json
python scripts/reliability_runs.py results/reliability_h200.json --only tests/test_reliability_gpu.py   # on a GPU
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch
from stored_results import ROOT, as_text

FILES = (
    "tests/test_reliability_gpu.py",
    "tests/test_out_of_memory.py",
    "tests/test_non_finite.py",
    "tests/test_extreme_numbers.py",
    "tests/test_workers.py",
    "tests/test_every_kernel.py",
    "tests/test_fuzz.py",
)
COUNTED = ("runs", "faults")


def rows_of(report: Path) -> list[dict[str, Any]]:
    """One for each test function: its cases by outcome, and the sums of the properties that it recorded."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"].split("[")[0]
        file = case.attrib["classname"].split(".")[-1]
        row = rows.setdefault((file, name), {"file": file, "test": name, "passed": 0, "failed": 0, "skipped": 0})
        outcomes = {child.tag for child in case}
        row["skipped" if "skipped" in outcomes else "failed" if outcomes & {"failure", "error"} else "passed"] += 1
        for each in case.iter("property"):
            if each.attrib["name"] in COUNTED:
                row[each.attrib["name"]] = row.get(each.attrib["name"], 0) + int(each.attrib["value"])
    return [row for row in rows.values() if row["passed"] or row["failed"]]


def main() -> int:
    """Run, write, and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", action="append", help="these files or tests; may be given more than once")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-W",
            "ignore",
            f"--junitxml={report}",
            "-o",
            "junit_family=xunit1",
        ]
        code = subprocess.run([*command, *(options.only or FILES)], cwd=ROOT).returncode
        rows = rows_of(report)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {"torch": torch.__version__.split("+")[0]} | ({"gpu": gpu} if gpu else {})
    totals = {key: sum(row.get(key, 0) for row in rows) for key in ("passed", "failed", *COUNTED)}
    options.output.write_text(as_text({**versions, **totals, "rows": rows}), "utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/reliability.md, from the files that the fuzz, the tests of reliability and the sanitizer wrote."""

from __future__ import annotations

from typing import Any

from stored_results import ROOT, results, table


def _stored(name: str, command: str) -> dict[str, Any] | str:
    """A file of results, or a sentence that says how to make it."""
    if (ROOT / "results" / f"{name}.json").exists():
        return results(name)
    return f"None stored yet; they come from `{command}`.\n"


def fuzz() -> str:
    """Cases by target."""
    found = _stored("fuzz_cpu", "make fuzz FUZZ_FLAGS='--output results/fuzz_cpu.json'")
    if isinstance(found, str):
        return found
    rows = [[row["target"], f"{row['cases']:,}", f"{row['faults']:,}"] for row in found["rows"]]
    return table(["target", "cases", "faults"], [*rows, ["all", f"{found['cases']:,}", f"{found['faults']:,}"]])


def _tests(name: str, command: str) -> str:
    found = _stored(name, command)
    if isinstance(found, str):
        return found
    rows = [
        [
            row["test"].removeprefix("test_").replace("_", " "),
            *(f"{row.get(key, 0):,}" for key in ("passed", "failed", "not_run")),
            *(f"{row[key]:,}" if key in row else "" for key in ("runs", "faults")),
        ]
        for row in found["rows"]
    ]
    totals = ["all", *(f"{found.get(key, 0):,}" for key in ("passed", "failed", "not_run", "runs", "faults"))]
    header = ["what is tested", "cases passed", "failed", "not run", "repeated runs", "injected faults"]
    return table(header, [*rows, totals])


def reliability_cpu() -> str:
    """Tests of reliability without a GPU."""
    return _tests("reliability_cpu", "python scripts/reliability_runs.py results/reliability_cpu.json")


def reliability_gpu() -> str:
    """The same on one."""
    return _tests("reliability_h200", "python scripts/reliability_runs.py results/reliability_h200.json")


def sanitizer() -> str:
    """What compute-sanitizer found, by tool and family of kernels."""
    found = _stored("sanitizer_h200", "python scripts/sanitize.py results/sanitizer_h200.json --logs LOGS")
    if isinstance(found, str):
        return found
    said = {True: "nothing found", False: "**reported**", None: "not judged"}
    rows = [
        [row["tool"], row["kernels of"], row["family"], str(row["launches"])]
        + (["", "**no verdict**"] if row["errors"] is None else [str(row["errors"]), said[row["ok"]]])
        for row in found["rows"]
    ]
    return f"{found['sanitizer']}\n\n" + table(["tool", "kernels", "family", "launches", "reports", "verdict"], rows)


def stress() -> str:
    """Processes that share a GPU."""
    found = _stored("stress_h200", "python scripts/stress.py results/stress_h200.json")
    if isinstance(found, str):
        return found
    rows = [
        [str(row["process"]), str(row["head_dim"]), f"{row['calls']:,}", f"{row['different']:,}"]
        for row in found["rows"]
    ]
    return table(["process", "head_dim", "calls", "with other bits"], rows)


def consan() -> str:
    """What Triton's concurrency sanitizer said of Hopper's kernels."""
    found = _stored("consan_h200", "python scripts/consan.py results/consan_h200.json --logs LOGS")
    if isinstance(found, str):
        return found
    said = {True: "in order", False: "**out of order**", None: "no verdict"}
    return table(
        ["call", "launches", "verdict"], [[row["call"], str(row["launches"]), said[row["ok"]]] for row in found["rows"]]
    )


RELIABILITY_TABLES = {
    "fuzz": fuzz,
    "reliability_cpu": reliability_cpu,
    "reliability_gpu": reliability_gpu,
    "stress": stress,
    "sanitizer": sanitizer,
    "consan": consan,
}

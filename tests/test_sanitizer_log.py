# SPDX-License-Identifier: Apache-2.0
"""A log of compute-sanitizer is good only for what the tool watched and found nothing in; what it found is kept."""

from __future__ import annotations

import json
import sys
import time

import pytest
from project import ROOT
from test_every_kernel import kernels

sys.path.append(str(ROOT / "scripts"))

import sanitize
from sanitizer_log import FAMILIES, HOPPERS, OTHER, verdicts

LAUNCHED = json.dumps({"calls": 2, "kernels": {"mala_forward_kernel": 3, "mala_forward_hopper_kernel": 2}}) + "\n"
CLEAN = "========= ERROR SUMMARY: 0 errors\n"
FINDING = """========= Invalid __global__ read of size 2 bytes
=========     at mala_forward_kernel+0x1f0 in /home/me/forward_kernel.py:71
=========     by thread (0,0,0) in block (3,0,0)
=========     Address 0x7f32 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch in /usr/lib/python3/launcher.c:12 [0x10]
=========
========= ERROR SUMMARY: 1 error
"""
RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at {kernel}+0x5ad20 in /opt/triton/language/standard.py:237
=========     and Write access at {kernel}+0x5ad20 in /opt/triton/language/standard.py:237 [6136 hazards]
=========
========= Error: Race reported between Write access at {kernel}+0x5ad20 in /opt/triton/language/standard.py:237
=========     and Write access at {kernel}+0x5ad20 in /opt/triton/language/standard.py:237 [6136 hazards]
=========
========= Warning: Race reported between Read access at {kernel}+0x20 in tile_steps.py:9
=========     and Write access at {kernel}+0x40 in tile_steps.py:12 [4 hazards]
=========
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
"""
ELSEWHERE = """========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::reduce_kernel<int>(T1)+0x10
=========
========= ERROR SUMMARY: 1 error
"""


def read(tool: str, code: int, log: str, version: tuple[int, ...] = (2026, 4)) -> dict[str, dict]:
    return {row["family"]: row for row in verdicts(tool, code, log, version)}


def test_each_kernel_belongs_to_one_family():
    names = [kernel for family in FAMILIES.values() for kernel in family]
    assert sorted(names) == sorted(kernels())
    assert {kernel for family in HOPPERS for kernel in FAMILIES[family]} == {x for x in kernels() if "hopper" in x}


@pytest.mark.parametrize(
    "summary",
    [CLEAN, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"],
    ids=["memcheck", "racecheck"],
)
def test_a_clean_log_is_good_for_what_was_launched(summary):
    found = read("racecheck", 0, LAUNCHED + summary)
    assert list(found) == ["forward", "Hopper forward"]
    assert found["forward"] == {
        "family": "forward", "launches": 3, "ok": True, "errors": 0, "kernels": [], "messages": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "log"),
    [
        (0, LAUNCHED),
        (0, CLEAN),
        (0, ""),
        (-1, LAUNCHED + CLEAN),
        (1, LAUNCHED + CLEAN + "RuntimeError: forward: a result is not finite"),
        (0, LAUNCHED + "========= Error: Device not supported\n" + CLEAN),
        (86, LAUNCHED + "========= ERROR SUMMARY: 7 errors\n"),
        (86, LAUNCHED + CLEAN),
        (86, LAUNCHED + ELSEWHERE),
        (0, LAUNCHED + "========= Warning: Detected overflow of tracked cuda::barrier structures.\n" + CLEAN),
    ],
    ids=[
        "no summary", "nothing launched", "nothing printed", "no end", "the driver failed", "the device is not covered",
        "more than was printed", "a code without a report", "a kernel of another", "a warning of the tool itself",
    ],
)  # fmt: skip
def test_a_log_that_is_no_verdict_is_not_good(code, log):
    assert any(row["ok"] is False for row in verdicts("memcheck", code, log))


def test_a_finding_names_its_kernel_and_leaves_the_other_family_good():
    found = read("memcheck", 86, LAUNCHED + FINDING)
    assert found["forward"]["ok"] is False
    assert found["forward"]["errors"] == 1
    assert found["forward"]["kernels"] == ["mala_forward_kernel"]
    assert found["forward"]["messages"] == [
        "1 x Invalid __global__ read of size 2 bytes; at mala_forward_kernel+0x1f0 in forward_kernel.py:71"
    ]
    assert found["Hopper forward"]["ok"] is True


@pytest.mark.parametrize("version", [(2025, 3), (2026, 4)])
def test_races_of_a_portable_kernel_are_never_good(version):
    found = read("racecheck", 86, LAUNCHED + RACES.format(kernel="mala_forward_kernel"), version)
    assert found["forward"]["ok"] is False
    assert found["forward"]["errors"] == 3
    assert found["forward"]["messages"] == [
        "2 x Error: Race reported between Write access at mala_forward_kernel+0x5ad20 in standard.py:237; "
        "and Write access at mala_forward_kernel+0x5ad20 in standard.py:237",
        "1 x Warning: Race reported between Read access at mala_forward_kernel+0x20 in tile_steps.py:9; "
        "and Write access at mala_forward_kernel+0x40 in tile_steps.py:12",
    ]
    assert OTHER not in found


def test_an_old_racecheck_does_not_judge_hoppers_kernels_and_a_newer_one_does():
    races = LAUNCHED + RACES.format(kernel="mala_forward_hopper_kernel")
    assert read("racecheck", 86, races, (2025, 3))["Hopper forward"]["ok"] is None
    assert read("racecheck", 86, races, (2026, 3))["Hopper forward"]["ok"] is False
    assert read("racecheck", 1, races, (2025, 3))["Hopper forward"]["ok"] is False  # the driver failed
    silence = LAUNCHED + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    found = read("racecheck", 0, silence, (2025, 3))
    assert (found["forward"]["ok"], found["Hopper forward"]["ok"]) == (True, None)
    assert read("memcheck", 86, races, (2025, 3))["Hopper forward"]["ok"] is False


def test_reports_beyond_the_limit_of_what_is_printed_are_counted_once():
    summary = "========= ERROR SUMMARY: 4 errors were not printed. Use --print-limit option\n========= ERROR SUMMARY: 5 errors\n"
    found = read("memcheck", 86, LAUNCHED + FINDING.replace("========= ERROR SUMMARY: 1 error\n", summary))
    assert (found["forward"]["errors"], found[OTHER]["errors"]) == (1, 4)


def test_a_run_beyond_its_limit_ends_with_all_that_it_started(tmp_path):
    program, outlived = tmp_path / "compute-sanitizer", tmp_path / "outlived"
    program.write_text(f"#!/bin/sh\n(sleep 2; touch {outlived}) &\nwait\n")
    program.chmod(0o755)
    code, _ = sanitize.watch("memcheck", sanitize.SHIPPED, ["forward"], str(program), tmp_path, 1.0)
    assert code == -1
    time.sleep(2.0)
    assert not outlived.exists()


def test_no_folder_of_a_machine_is_kept():
    rows = verdicts("memcheck", 86, LAUNCHED + FINDING + RACES.format(kernel="combine_kernel"))
    assert "/home" not in json.dumps(rows)
    assert "/opt" not in json.dumps(rows)
    assert "Host Frame" not in json.dumps(rows)


def test_racecheck_runs_over_the_portable_kernels_alone_too():
    runs = sanitize.runs(["memcheck", "racecheck"], ["forward", "mask"], False)
    assert [(tool, way) for tool, way, _ in runs] == [
        ("memcheck", sanitize.SHIPPED), ("racecheck", sanitize.PORTABLE), ("racecheck", sanitize.SHIPPED),
    ]  # fmt: skip
    assert len(sanitize.runs(["memcheck"], ["forward", "mask"], True)) == 2
    assert "--portable" in sanitize.driver_of(["forward"], sanitize.PORTABLE)
    assert "--portable" not in sanitize.driver_of(["forward"])


def test_a_whole_run_writes_rows_and_keeps_logs(tmp_path, monkeypatch):
    """With a program in place of the tool that runs the driver's launches as it is told."""
    program = tmp_path / "compute-sanitizer"
    log = tmp_path / "log.txt"
    log.write_text(LAUNCHED + RACES.format(kernel="mala_forward_kernel"), "utf-8")
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Version 2026.4.0" && exit 0\ncat {log}; exit 86\n')
    program.chmod(0o755)
    monkeypatch.setenv("COMPUTE_SANITIZER", str(program))
    monkeypatch.setattr(sanitize, "driver_of", lambda *args: [sys.executable, "-c", ""])
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["sanitize.py", str(out), "--logs", str(tmp_path / "logs"), "--tool", "racecheck"])
    assert sanitize.main() == 1
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [(row["kernels of"], row["family"], row["ok"]) for row in rows] == [
        (sanitize.PORTABLE, "forward", False), (sanitize.PORTABLE, "Hopper forward", True),
        (sanitize.SHIPPED, "forward", False), (sanitize.SHIPPED, "Hopper forward", True),
    ]  # fmt: skip
    assert len(list((tmp_path / "logs").glob("racecheck-*.txt"))) == 2
    assert str(tmp_path) not in out.read_text("utf-8")

# SPDX-License-Identifier: Apache-2.0
"""The runs of reliability keep each test's outcome as it ends, and list what their time did not suffice for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from project import ROOT

sys.path.append(str(ROOT / "scripts"))

import reliability_runs

SCRIPT = ROOT / "scripts" / "reliability_runs.py"
TESTS = """
import time

import pytest


@pytest.mark.parametrize("n", [1, 2, 3])
def test_counted(n, record_property):
    record_property("runs", n)


def test_failing():
    assert False


def test_skipped():
    pytest.skip("never")


@pytest.mark.xdist_group("one")
def test_grouped(record_property):
    record_property("faults", 5)


def test_failing_at_its_end(request):
    request.addfinalizer(lambda: 1 / 0)


def test_last():
    time.sleep(SECONDS)
"""


def run(tmp_path, seconds_of_test: float, *options: str) -> tuple[int, dict, str]:
    path = tmp_path / "test_some.py"
    path.write_text(TESTS.replace("SECONDS", str(seconds_of_test)), "utf-8")
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, out, "--only", path, *options], capture_output=True, text=True, timeout=300
    )
    return done.returncode, json.loads(out.read_text("utf-8")), done.stdout + done.stderr


def test_a_line_that_is_half_written_is_not_read_yet(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"collected": ["tests/test_some.py::test_one"]}\n{"name": "tests/test_so', "utf-8")
    assert [row["not_run"] for row in reliability_runs.rows_of(log)] == [1]


def test_a_test_that_ends_its_process_has_failed(tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text("import os\n\n\ndef test_crash():\n    os._exit(3)\n\n\ndef test_other():\n    pass\n", "utf-8")
    out = tmp_path / "found.json"
    done = subprocess.run([sys.executable, SCRIPT, out, "--only", path, "--jobs", "2"], timeout=300)
    rows = {row["test"]: row for row in json.loads(out.read_text("utf-8"))["rows"]}
    assert done.returncode == 1
    assert (rows["test_crash"]["failed"], rows["test_other"]["passed"]) == (1, 1)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_outcomes_and_properties_are_summed_by_test(jobs, tmp_path):
    code, found, log = run(tmp_path, 0, "--jobs", jobs)
    rows = {row["test"]: row for row in found["rows"]}
    assert code == 1, log
    assert (found["passed"], found["failed"], found["not_run"], found["runs"], found["faults"]) == (5, 2, 0, 6, 5)
    assert rows["test_counted"]["passed"] == 3
    assert rows["test_counted"]["runs"] == 6
    assert rows["test_grouped"]["faults"] == 5
    assert rows["test_failing"]["failed"] == rows["test_failing_at_its_end"]["failed"] == 1
    assert "test_skipped" not in rows
    assert str(tmp_path) not in json.dumps(found)


def test_what_did_not_run_in_time_is_listed_and_the_rest_is_kept(tmp_path):
    code, found, log = run(tmp_path, 1000, "--jobs", "1", "--seconds", "30")
    rows = {row["test"]: row for row in found["rows"]}
    assert code == 1
    assert found["passed"] == 4
    assert found["not_run"] == rows["test_last"]["not_run"] == 1
    assert "not run: 1 of test_some::test_last" in log


def test_time_that_is_over_is_no_success(tmp_path):
    path = tmp_path / "test_slow.py"
    path.write_text("import time\n\n\ndef test_slow():\n    time.sleep(1000)\n", "utf-8")
    out = tmp_path / "found.json"
    done = subprocess.run([sys.executable, SCRIPT, out, "--only", path, "--jobs", "1", "--seconds", "15"], timeout=300)
    assert done.returncode == 3
    assert not json.loads(out.read_text("utf-8"))["passed"]

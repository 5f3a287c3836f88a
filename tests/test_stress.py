# SPDX-License-Identifier: Apache-2.0
"""The stress test runs, counts a bit that changes, and is no success where a process fails."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from project import ROOT

sys.path.append(str(ROOT / "scripts"))

import stress

NAN = float("nan")
SMALL = ["--seqlen", "40", "--head-dims", "16", "--device", "cpu", "--seconds", "0.1"]


def test_two_processes_agree_and_repeat(tmp_path):
    out = tmp_path / "stress.json"
    if torch.cuda.is_available():
        pytest.skip("tensors on the CPU: the interpreter's test; a GPU's is in test_stress_gpu.py")
    assert stress.main([str(out), "--processes", "2", *SMALL]) == 0
    found = json.loads(out.read_text("utf-8"))
    assert [row["head_dim"] for row in found["rows"]] == [16, 16]
    assert found["agree"]
    assert found["laps"] >= 2
    assert found["calls"] == found["laps"] * len(found["rows"][0]["by_way"])
    assert found["different"] == 0


def test_processes_that_do_not_end_in_time_are_killed_and_no_success(tmp_path, monkeypatch):
    monkeypatch.setattr(stress, "START_SECONDS", 0.3)  # less than torch takes to import
    out = tmp_path / "stress.json"
    assert stress.main([str(out), "--processes", "2", *SMALL]) == 2
    assert not out.exists()


def test_no_repetition_is_no_success(tmp_path, capsys):
    with pytest.raises(SystemExit):
        stress.main([str(tmp_path / "stress.json"), *SMALL, "--seconds", "0"])
    assert "must be positive" in capsys.readouterr().err


def test_a_call_that_changes_one_bit_is_counted_and_a_nan_that_stays_is_not():
    tensors = iter(
        [torch.tensor([1.0, NAN])] * 3 + [torch.tensor([1.0 + 2**-23, NAN])] + [torch.tensor([1.0, NAN])] * 10**6
    )
    ways = {"fixed": lambda: [torch.tensor([0.0, NAN])], "changes once": lambda: [next(tensors)]}
    first = {name: run() for name, run in ways.items()}
    found = stress.repeat(ways, first, 0.2)
    assert found["by_way"] == {"fixed": 0, "changes once": 1}
    assert found["different"] == 1
    assert found["calls"] == 2 * found["laps"]


def test_the_sign_of_a_zero_is_a_bit():
    first = {"way": [torch.tensor([0.0], dtype=torch.float16)]}
    found = stress.repeat({"way": lambda: [torch.tensor([-0.0], dtype=torch.float16)]}, first, 0.01)
    assert found["different"] == found["laps"] > 0
    assert stress.digest(first) != stress.digest({"way": [torch.tensor([-0.0], dtype=torch.float16)]})


def test_processes_that_disagree_or_fail_are_no_success(tmp_path, monkeypatch):
    row = {"head_dim": 64, "laps": 1, "calls": 1, "different": 0}
    monkeypatch.setattr(stress, "together", lambda options: [{**row, "first": "a"}, {**row, "first": "b"}])
    out = [str(tmp_path / "stress.json"), "--device", "cpu"]
    assert stress.main(out) == 1
    monkeypatch.setattr(stress, "together", lambda options: [{**row, "first": "a"}, {**row, "first": "a"}])
    assert stress.main(out) == 0
    monkeypatch.undo()
    assert stress.main([*out, "--head-dims", "-5", "--processes", "1"]) == 2

# SPDX-License-Identifier: Apache-2.0
"""Triton's concurrency sanitizer gives a verdict only where it can tell a race, and only of Hopper's kernels that were launched."""

from __future__ import annotations

import json
import sys

import pytest
from project import ROOT

sys.path.append(str(ROOT / "scripts"))

import consan

LAUNCHED = json.dumps({"calls": 1, "kernels": {"mala_forward_hopper_kernel": 2, "mala_forward_kernel": 1}}) + "\n"
STOPPED = (
    "/home/me/forward_hopper.py:64: _attend_rows: block: [0,0,0], thread: [0,0,0] Assertion "
    "`Buffer being accessed has outstanding writes.` failed.\n"
    "RuntimeError: CUDA error: device-side assert triggered\n"
)


@pytest.mark.parametrize(
    ("code", "log", "ok"),
    [
        (0, LAUNCHED, True),
        (1, STOPPED, False),
        (0, LAUNCHED + STOPPED, False),
        (1, "RuntimeError: out of memory", None),
        (1, "Assertion `int32 overflow detected for operation add` failed.", None),
        (-1, LAUNCHED, None),
        (0, json.dumps({"kernels": {"mala_forward_kernel": 3}}), None),
        (0, "", None),
    ],
    ids=[
        "in order",
        "stopped",
        "said so",
        "another error",
        "an overflow",
        "no end",
        "no kernel of Hopper's",
        "nothing printed",
    ],
)
def test_a_call_is_in_order_only_if_its_kernel_ran_and_was_not_stopped(code, log, ok):
    row = consan.row_of("forward", code, log)
    assert row["ok"] is ok
    assert row["messages"] == (["Buffer being accessed has outstanding writes."] if ok is False else [])


@pytest.mark.parametrize(
    ("waits", "races", "expected"),
    [
        ((0, ""), (1, STOPPED), True),
        ((0, ""), (0, ""), False),
        ((1, STOPPED), (1, STOPPED), False),
        ((0, ""), (1, "RuntimeError"), False),
        ((0, ""), (-1, STOPPED), False),
    ],
)
def test_it_watches_only_if_it_stops_the_race_and_nothing_else(waits, races, expected, tmp_path, monkeypatch):
    answers = {"waits": waits, "races": races}
    monkeypatch.setattr(consan, "run", lambda command, log, limit: answers[command[-1]])
    assert consan.watches(tmp_path, 1.0) is expected


def test_without_a_gpu_there_is_no_verdict(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["consan.py", str(tmp_path / "found.json"), "--logs", str(tmp_path / "logs")])
    assert consan.main() == 2
    assert not (tmp_path / "found.json").exists()

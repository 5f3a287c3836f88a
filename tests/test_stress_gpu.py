# SPDX-License-Identifier: Apache-2.0
"""Several processes on one GPU: each call gives the same bits for as long as they last."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from project import ROOT

pytestmark = pytest.mark.gpu

SECONDS, PROCESSES, LEAST_LAPS = 20, 4, 20


def test_processes_that_share_a_gpu_get_the_same_bits(tmp_path, record_property):
    out = tmp_path / "stress.json"
    command = [sys.executable, ROOT / "scripts" / "stress.py", out, "--seconds", str(SECONDS)]
    done = subprocess.run([*command, "--processes", str(PROCESSES)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text("utf-8"))
    assert found["laps"] >= LEAST_LAPS
    record_property("runs", found["calls"])

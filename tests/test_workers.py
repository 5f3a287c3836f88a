# SPDX-License-Identifier: Apache-2.0
"""Forked and spawned workers, before and after their parent has attended, give the bits that the parent gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from project import ROOT

LIMIT = 240  # seconds; a worker that hangs is the failure looked for


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_give_the_bits_of_their_parent(start, device):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, ROOT / "tests" / "worker_steps.py", start, device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["workers"]) == 2
    assert all(digest == found["own"] for digest in found["workers"])
    assert len(found["loaded"]) == 3
    assert all(digest == found["cpu"] for digest in found["loaded"])
    assert len(set(found["own"])) > 8

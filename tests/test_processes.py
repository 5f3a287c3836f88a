# SPDX-License-Identifier: Apache-2.0
"""Processes that take too long are ended, all of them."""

from __future__ import annotations

import os
import subprocess
import time

import processes
import pytest

SLEEPER = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(300)
"""


@pytest.mark.xdist_group("processes")
def test_none_is_left_when_the_time_is_over(tmp_path, monkeypatch):
    script, started = tmp_path / "sleeper.py", tmp_path / "started"
    script.write_text(SLEEPER, "utf-8")
    started.mkdir()

    def too_long(self, timeout):
        while sum(bool(file.read_text()) for file in started.iterdir()) < processes.PROCESSES and self.poll() is None:
            time.sleep(0.1)
        raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", too_long)
    with pytest.raises(subprocess.TimeoutExpired):
        processes.launch(script, started)
    numbers = [int(file.read_text("utf-8")) for file in started.iterdir()]
    assert len(numbers) == processes.PROCESSES
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)

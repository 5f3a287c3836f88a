# SPDX-License-Identifier: Apache-2.0
"""Processes that end with the script that started them, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


def exit_on_sigterm() -> None:
    """A script that is told to terminate exits as after an error: what it does in ``finally`` it does then too."""
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(128 + signal.SIGTERM))


def end_session(process: subprocess.Popen) -> None:
    """Kill a process that leads a session (``start_new_session=True``), and all that it has started there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

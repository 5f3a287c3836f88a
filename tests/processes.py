# SPDX-License-Identifier: Apache-2.0
"""Several processes, on CPUs or on a GPU each, that torchrun starts, and ends when one of them fails or the time is over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from project import ROOT

PROCESSES, TIME_LIMIT = 2, 240  # seconds, for machines that are busy: each takes about ten
GRACE = 20  # seconds in which torchrun ends its processes, each of which has a session of its own


def launch(script: Path, *arguments: object, fails: bool = False, gpus: bool = False) -> str:
    """What the processes printed. ``fails``: whether they are to end with an error. ``gpus``: whether they see any."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "127.0.0.1"]
    command += [str(script), *map(str, arguments)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert (process.returncode != 0) == fails, output
    return output

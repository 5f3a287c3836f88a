# SPDX-License-Identifier: Apache-2.0
"""Runs of a study as processes beside one another: many small models share one GPU better than they queue for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch


def on_gpu(device: str | None) -> bool:
    """Whether a study runs on a GPU; ``ValueError`` when several are visible, since one is used."""
    found = torch.cuda.is_available() if device is None else device == "cuda"
    if found and torch.cuda.device_count() > 1:
        raise ValueError("several GPUs are visible and one is used: set CUDA_VISIBLE_DEVICES")
    return found


def run_side_by_side(
    script: str, arguments: Sequence[str], labels: Sequence[str], jobs: int, budget_seconds: float
) -> list[str]:
    """Run ``script *arguments --only LABEL`` for each label, ``jobs`` at a time, each with the budget left; return who failed."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    began = time.monotonic()
    waiting, failed = list(labels), []
    running: dict[str, subprocess.Popen] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            label = waiting.pop(0)
            left = max(0.0, budget_seconds - (time.monotonic() - began))
            command = [sys.executable, script, *arguments, "--only", label, "--budget-seconds", str(left)]
            running[label] = subprocess.Popen(command, env={"OMP_NUM_THREADS": threads} | os.environ)
        for label, process in list(running.items()):
            if process.poll() is not None:
                del running[label]
                failed += [label] if process.returncode else []
        time.sleep(0.1)
    return failed


def head_commit() -> str:
    """The commit of this checkout, empty without one."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=sys.path[0], capture_output=True, text=True, check=False)
    return done.stdout.strip()

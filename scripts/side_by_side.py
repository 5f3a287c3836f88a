# SPDX-License-Identifier: Apache-2.0
"""Runs of a study as processes beside one another: many small models share one GPU better than they queue for it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch


def on_gpu(device: str | None) -> bool:
    """Whether a study runs on a GPU; ``ValueError`` when several are visible, since one is used."""
    found = torch.cuda.is_available() if device is None else device == "cuda"
    if found and torch.cuda.device_count() > 1:
        raise ValueError("several GPUs are visible and one is used: set CUDA_VISIBLE_DEVICES")
    return found


def run_study(
    options: argparse.Namespace,
    prepare: Callable[[argparse.Namespace], None],
    run_one: Callable[[argparse.Namespace, str], None],
    run_all: Callable[[argparse.Namespace], None],
) -> None:
    """What the options ask for: ``--prepare`` the data, ``--only`` one run, or all runs; ``SystemExit`` with one line if it fails."""
    try:
        if options.prepare:
            prepare(options)
        elif options.state is None or options.output is None:
            raise ValueError("--state and --output are needed")
        elif options.only is not None:
            run_one(options, options.only)
        else:
            run_all(options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from error


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

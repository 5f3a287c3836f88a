# SPDX-License-Identifier: Apache-2.0
"""Runs of a study as processes beside one another: many small models share one GPU better than they queue for it."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from process_ends import exit_on_sigterm

GRACE_SECONDS = 20.0  # after the budget, in which a run stores what it has
ABORT_SECONDS, LEAST_SECONDS = 5.0, 0.5  # for all runs that are stopped, and for each
FRAMES = 6  # of a traceback that are shown


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
    """What the options ask for: ``--prepare`` the data, ``--only`` one run, or all runs; ``SystemExit`` with the reason if it fails."""
    try:
        if options.prepare:
            prepare(options)
        elif options.state is None or options.output is None:
            raise ValueError("--state and --output are needed")
        elif options.only is not None:
            run_one(options, options.only)
        else:
            exit_on_sigterm()
            run_all(options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {explained(error)}") from error


def explained(error: BaseException) -> str:
    """What an error says, and of a ``RuntimeError`` where it came from and how the GPU is: it is not about the options."""
    if not isinstance(error, RuntimeError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    lines = [f"  {Path(one.filename).name}:{one.lineno} {one.name}: {one.line}" for one in frames]
    return "\n".join([str(error), *lines, *_of_the_gpu()])


def _of_the_gpu() -> list[str]:
    """Its free memory, or that an earlier kernel has failed: then every call after it does, whoever made it."""
    if not torch.cuda.is_initialized():
        return []
    try:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
    except RuntimeError as error:
        return [f"  the GPU does not answer any more, so another kernel failed before: {str(error).splitlines()[0]}"]
    mine = torch.cuda.memory_reserved()
    return [
        f"  GPU memory: {free / 2**30:.1f} of {total / 2**30:.0f} GiB free, {mine / 2**30:.1f} held by this process"
    ]


def run_side_by_side(
    script: str,
    arguments: Sequence[str],
    labels: Sequence[str],
    jobs: int,
    budget_seconds: float,
    on_end: Callable[[str], None] = lambda label: None,
    grace_seconds: float = GRACE_SECONDS,
) -> list[str]:
    """Run ``script *arguments --only LABEL`` for each label, ``jobs`` at a time, each with the budget left; return who failed.

    None begins when the budget is spent. One that has not ended ``grace_seconds`` later hangs: it is stopped, and has failed.
    on_end: called with each label when its run has ended, however it did.
    """
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    environment = {"OMP_NUM_THREADS": threads} | os.environ | {"PYTHONFAULTHANDLER": "1"}
    began = time.monotonic()
    waiting, failed = list(labels), []
    running: dict[str, subprocess.Popen] = {}
    try:
        while running or (waiting and time.monotonic() - began < budget_seconds):
            left = budget_seconds - (time.monotonic() - began)
            while waiting and len(running) < jobs and left > 0:
                label = waiting.pop(0)
                command = [sys.executable, script, *arguments, "--only", label, "--budget-seconds", str(left)]
                running[label] = subprocess.Popen(command, env=environment)
            if left < -grace_seconds:
                for label in _stop(running):
                    print(f"{label}: stopped {grace_seconds:.0f} s after the budget", file=sys.stderr, flush=True)
            for label, process in list(running.items()):
                if process.poll() is not None:
                    del running[label]
                    if process.returncode:
                        failed.append(label)
                        print(f"{label}: ended with code {process.returncode}, see above", file=sys.stderr, flush=True)
                    on_end(label)
            time.sleep(0.1)
    finally:
        _stop(running)
    return failed


def _stop(processes: Mapping[str, subprocess.Popen]) -> list[str]:
    """End those that run, one after another so that what each says of where it is (``PYTHONFAULTHANDLER``) stays whole; their names."""
    late = [name for name, process in processes.items() if process.poll() is None]
    end = time.monotonic() + ABORT_SECONDS  # for all of them
    for name in late:
        processes[name].send_signal(signal.SIGABRT)
        try:
            processes[name].wait(timeout=max(LEAST_SECONDS, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            processes[name].kill()
            processes[name].wait()
    return late


def end_of(failed: Sequence[str]) -> None:
    """``SystemExit`` that names the runs that failed, if any did."""
    if failed:
        raise SystemExit(f"{Path(sys.argv[0]).name}: these failed, see above: {' '.join(failed)}")

# SPDX-License-Identifier: Apache-2.0
"""Processes that run the cells of a recall sweep on one device. One that hangs, as a kernel may, is stopped: the sweep goes on."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ..bench.baselines import reason
from .recall_train import Cell, OutOfTime, Recipe, train_cell

GRACE_SECONDS = 10.0  # after the deadline, in which a run says that it is out of time
LOOK_SECONDS = 0.2
ABORT_SECONDS = 5.0


@dataclass(frozen=True)
class Ended:
    """A run's row, or why it failed; neither where its time was out."""

    cell: Cell
    row: dict[str, Any] | None = None
    failed: str | None = None


def outcome_of(cell: Cell, recipe: Recipe, device: torch.device, deadline: float | None) -> Ended:
    """Run a cell in this process; whatever a method raises, the others can still run."""
    try:
        return Ended(cell, train_cell(cell, recipe, device, deadline))
    except OutOfTime:
        return Ended(cell)
    except Exception as error:
        return Ended(cell, failed=reason(error))
    finally:
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # of an error of the GPU, which the run has met first
                torch.cuda.empty_cache()


def _work(connection: Connection, recipe: Recipe, device: str, deadline: float | None) -> None:
    """A worker: for each cell that comes "begun", then what became of it, until it is stopped."""
    faulthandler.enable()
    while True:
        cell = connection.recv()
        connection.send("begun")
        connection.send(outcome_of(cell, recipe, torch.device(device), deadline))


class _Worker:
    """A process, and the cell that it has; ``began``: when its run did, None while the process starts."""

    def __init__(self, recipe: Recipe, device: torch.device, deadline: float | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, recipe, str(device), deadline), daemon=True)
        self.process.start()
        other.close()  # so that the process's end is seen here
        self.cell: Cell | None = None
        self.began: float | None = None

    def give(self, cell: Cell) -> None:
        self.cell, self.began = cell, None
        self.connection.send(cell)

    def answer(self) -> Ended | None:
        """What became of its cell, or None if that is not known yet."""
        assert self.cell is not None
        try:
            said = self.connection.recv()
        except (EOFError, OSError):  # it has ended, perhaps amid an answer
            self.process.join()
            return Ended(self.cell, failed=f"its process ended with code {self.process.exitcode}")
        if said == "begun":
            self.began = time.time()
            return None
        return said

    def stop(self) -> None:
        """End it, if it has not ended; if it was at work it says first where it is."""
        if (
            self.cell is not None
            and self.began is not None
            and self.process.is_alive()
            and self.process.pid is not None
        ):
            os.kill(self.process.pid, signal.SIGABRT)
            self.process.join(ABORT_SECONDS)
        self.process.kill()
        self.process.join()
        self.connection.close()


class Workers:
    """``jobs`` workers inside a ``with`` block.

    deadline: of ``time.time()``; a run that has not ended soon after it is stopped, out of time. run_seconds: a longer run fails.
    """

    def __init__(
        self, jobs: int, recipe: Recipe, device: torch.device, deadline: float | None, run_seconds: float | None
    ) -> None:
        self.jobs, self.deadline, self.run_seconds = jobs, deadline, run_seconds
        self._start = lambda: _Worker(recipe, device, deadline)
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *unused: object) -> None:
        for worker in self._workers:
            worker.stop()

    def run(self, cells: Iterator[Cell]) -> Iterator[Ended]:
        """What becomes of each cell, as it ends."""
        while True:
            busy = [worker for worker in self._workers if worker.cell is not None]
            while len(busy) < self.jobs and (cell := next(cells, None)) is not None:
                busy.append(self._idle())
                busy[-1].give(cell)
            if not busy:
                return
            ready = wait([worker.connection for worker in busy], timeout=LOOK_SECONDS)
            for worker in busy:
                ended = worker.answer() if worker.connection in ready else self._overdue(worker)
                if ended is not None:
                    worker.cell = None
                    if ended.failed is not None:
                        worker.stop()  # after an error of the GPU every later call of a process fails
                    if not worker.process.is_alive():
                        self._workers.remove(worker)
                    yield ended

    def _idle(self) -> _Worker:
        """A worker without a cell, a new one where all have one."""
        for worker in self._workers:
            if worker.cell is None:
                return worker
        self._workers.append(self._start())
        return self._workers[-1]

    def _overdue(self, worker: _Worker) -> Ended | None:
        """Stop a worker whose run takes too long; what became of its cell."""
        assert worker.cell is not None
        now = time.time()
        if self.deadline is not None and now > self.deadline + GRACE_SECONDS:
            worker.stop()
            return Ended(worker.cell)
        if self.run_seconds is not None and worker.began is not None and now - worker.began > self.run_seconds:
            worker.stop()
            return Ended(worker.cell, failed=f"stopped after {self.run_seconds:.0f} s")
        return None

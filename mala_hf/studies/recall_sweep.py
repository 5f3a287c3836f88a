# SPDX-License-Identifier: Apache-2.0
"""All runs of the associative recall: which comes first, several at a time on one device, rows stored as they end."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from ..bench.baselines import reason
from .recall_train import Cell, OutOfTime, Recipe, train_cell
from .row_store import RowStore

LENGTHS = (1024, 2048, 4096, 8192)
WIDTHS = (64, 128, 256, 512)


def cells_of(methods: Sequence[str], lengths: Iterable[int], widths: Iterable[int], seeds: Iterable[int]) -> list[Cell]:
    """The most telling first: every seed after the one before; the longest sequences at a small width, then at all widths; then others.

    The methods of a length and a width come together, so that they can be compared whenever a sweep ends.
    """
    by_length, by_width = sorted(lengths, reverse=True), sorted(widths)
    first = by_width[min(1, len(by_width) - 1)]
    places = [(by_length[0], first), *((by_length[0], width) for width in reversed(by_width))]
    places += [(length, first) for length in by_length]
    places += [(length, width) for width in by_width for length in by_length]
    return [Cell(method, *place, seed) for seed in seeds for place in dict.fromkeys(places) for method in methods]


def run_cell(cell: Cell, recipe: Recipe, device: str, deadline: float | None) -> dict[str, Any] | None:
    """The row of a run, in a process of its own; ``None`` where its time was out."""
    if deadline is not None and time.time() > deadline:
        return None
    try:
        row = train_cell(cell, recipe, torch.device(device), deadline)
    except OutOfTime:
        return None
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return row


def sweep(
    cells: Iterable[Cell],
    recipe: Recipe,
    store: RowStore,
    device: torch.device,
    *,
    jobs: int = 1,
    budget_seconds: float | None = None,
    commit: str | None = None,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[list[Cell], dict[Cell, str]]:
    """Run what the store lacks, ``jobs`` at a time, and store each row when it is there.

    budget_seconds: a run that would end later is given up after its first steps. commit: kept with every row.
    Returns the cells for which there was no time, and those that failed, with the reason; the others go on.
    """
    wanted = [cell for cell in cells if not store.has(**asdict(cell))]
    deadline = None if budget_seconds is None else time.time() + budget_seconds
    left, failed = [], {}

    def keep(cell: Cell, run: Callable[[], dict[str, Any] | None]) -> None:
        try:
            row = run()
        except Exception as error:  # whatever a method raises: the others can still run
            failed[cell] = reason(error)
            return
        if row is None:
            left.append(cell)
        else:
            store.append([row | {"commit": commit}])
            on_row(row)

    if jobs == 1:
        for cell in wanted:
            keep(cell, partial(run_cell, cell, recipe, str(device), deadline))
        return left, failed
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run_cell, cell, recipe, str(device), deadline): cell for cell in wanted}
        for future in as_completed(running):
            keep(running[future], future.result)
    return left, failed

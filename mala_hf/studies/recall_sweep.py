# SPDX-License-Identifier: Apache-2.0
"""All runs of the associative recall: which comes first, several at a time on one device, rows stored as they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from .recall_train import Cell, Recipe
from .recall_workers import Ended, Workers, outcome_of
from .row_store import Row, RowStore

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


def least_seconds(cell: Cell, rows: Iterable[Row]) -> float:
    """What a run takes at least: as long as the longest one of its method on no longer sequences and no wider a model."""
    own = (row for row in rows if row["method"] == cell.method)
    smaller = (row["seconds"] for row in own if row["seqlen"] <= cell.seqlen and row["d_model"] <= cell.d_model)
    return max(smaller, default=0.0)


def sweep(
    cells: Iterable[Cell],
    recipe: Recipe,
    store: RowStore,
    device: torch.device,
    *,
    jobs: int = 1,
    budget_seconds: float | None = None,
    run_seconds: float | None = None,
    commit: str | None = None,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[list[Cell], dict[Cell, str]]:
    """Run what the store lacks, ``jobs`` at a time, and store each row when it is there.

    Runs have processes of their own, which can be stopped; a single job without ``run_seconds`` runs here.

    budget_seconds: no run begins that will take longer than what is left of it by the rows that are there, and one that would end later
    is given up. run_seconds: one that takes longer hangs, is stopped and has failed (None: none does). commit: kept with every row.
    Returns the cells for which there was no time, and those that failed, with the reason; the others go on.
    """
    wanted = [cell for cell in cells if not store.has(**asdict(cell))]
    deadline = None if budget_seconds is None else time.time() + budget_seconds
    left: list[Cell] = []
    failed: dict[Cell, str] = {}

    def in_time() -> Iterator[Cell]:
        for cell in wanted:
            if deadline is not None and time.time() + least_seconds(cell, store.rows) > deadline:
                left.append(cell)
            else:
                yield cell

    def keep(ended: Ended) -> None:
        if ended.failed is not None:
            failed[ended.cell] = ended.failed
        elif ended.row is None:
            left.append(ended.cell)
        else:
            store.append([ended.row | {"commit": commit}])
            on_row(ended.row)

    if jobs == 1 and run_seconds is None:
        for cell in in_time():
            keep(outcome_of(cell, recipe, device, deadline))
        return left, failed
    with Workers(jobs, recipe, device, deadline, run_seconds) as workers:
        for ended in workers.run(in_time()):
            keep(ended)
    return left, failed

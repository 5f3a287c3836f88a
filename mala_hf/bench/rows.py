# SPDX-License-Identifier: Apache-2.0
"""What all rows share: the columns of the baselines, and how much faster ours are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from .baselines import SPARSE, Attention, reason

Row = dict[str, Any]


def add_baselines(row: Row, baselines: dict[str, Attention], measured: Callable[[str, Attention], Row]) -> None:
    """``measured`` of each baseline, or the reason why there is none; and ``best_dense``, the fastest that ran."""
    for name, attention in baselines.items():
        try:
            row[name] = measured(name, attention)
        except Exception as error:  # it is none of ours: whatever it raises is reported
            row[name] = {"failed": reason(error)}
    dense = [name for name in baselines if name not in SPARSE and "median_ms" in row[name]]
    row["best_dense"] = min(dense, key=lambda name: row[name]["median_ms"], default=None)


def add_speedups(row: Row, ours: Iterable[str], baselines: Collection[str]) -> None:
    """In each of our columns, how many times faster it is: ``speedup_over_cudnn`` and so on, and ``speedup_over_best_dense``.

    ``eager_speedup_over_best_dense`` compares eager calls with the best eager ones. Of a backward also ``step_speedup_over_cudnn``
    and so on: forward and backward together.
    """
    others = {f"speedup_over_{name.removeprefix('sdpa_')}": row[name] for name in baselines}
    if row["best_dense"]:
        others["speedup_over_best_dense"] = row[row["best_dense"]]
    for name in ours:
        row[name] |= {
            label: other["median_ms"] / row[name]["median_ms"]
            for label, other in others.items()
            if "median_ms" in other
        }
        eager = [row[other]["eager_ms"] for other in baselines if other not in SPARSE and "eager_ms" in row[other]]
        if eager and "eager_ms" in row[name]:
            row[name]["eager_speedup_over_best_dense"] = min(eager) / row[name]["eager_ms"]
        row[name] |= {
            f"step_{label}": other["forward_and_backward_ms"] / row[name]["forward_and_backward_ms"]
            for label, other in others.items()
            if "forward_and_backward_ms" in other
        }

# SPDX-License-Identifier: Apache-2.0
"""Rows of stored benchmark runs, in the order and the words of the tables and figures."""

from __future__ import annotations

from typing import Any

from stored_results import results

Row = dict[str, Any]
NOTHING = "-"  # a column that was not asked for or failed; its reason is in the file


def share_flat(row: Row) -> float:
    """Which share of the query heads is Gaussian."""
    return row["flat_heads"] / row["num_heads"]


def operator_rows(*names: str) -> list[Row]:
    """The rows of those runs of ``bench_operator.py``: peaked, mixed, flat, captured ones; then by heads, lengths, retained slots."""
    rows = [row for name in names for row in results(name)["rows"]]
    return sorted(
        rows,
        key=lambda row: (
            row["captured"] is not None,
            share_flat(row),
            row["num_heads"],
            -row["head_dim"],
            row["seqlen"],
            row["key_slots_per_query"],
        ),
    )


def peer_rows() -> list[Row]:
    """The rows that were measured beside all packages, at the main shape: 16 / 8 heads of 128."""
    return [row for row in operator_rows("operator_peers_h200") if (row["num_heads"], row["head_dim"]) == (16, 128)]


def heads(row: Row) -> str:
    """Query heads / KV heads."""
    return f"{row['num_heads']} / {row['num_kv_heads']}"


def kind(row: Row) -> str:
    """What inputs are if not peaked in all heads."""
    if row["captured"] is not None:
        return " (captured)"
    if row["flat_heads"] == row["num_heads"]:
        return " (flat)"
    return f" ({row['flat_heads']} heads flat)" if row["flat_heads"] else ""


def slots(row: Row) -> str:
    """Retained key slots per query, and what the inputs are."""
    return f"{row['key_slots_per_query']:,.0f}{kind(row)}"


def milliseconds(row: Row, name: str, key: str = "median_ms") -> str:
    """A column's time with three digits at least."""
    time = row.get(name, {}).get(key)
    if time is None:
        return NOTHING
    return f"{time:.{4 if time < 0.1 else 3 if time < 10 else 1}f}"


def times_faster(row: Row, ours: str, other: str, key: str = "median_ms", digits: int = 2) -> str:
    """How many times faster one column is than another."""
    times = [row.get(name, {}).get(key) for name in (other, ours)]
    return NOTHING if None in times else f"{times[0] / times[1]:.{digits}f}x"

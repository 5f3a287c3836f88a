# SPDX-License-Identifier: Apache-2.0
"""Rows of the stored forward runs that name a shape in one string, as the tables and figures want them."""

from __future__ import annotations

from typing import Any

from stored_results import results

Row = dict[str, Any]


def shape_of(text: str) -> Row:
    """``Q,KV,D,LENGTH,SLOTS`` taken apart; requested_slots: None where all heads are flat."""
    num_heads, num_kv_heads, head_dim, seqlen, slots = text.split(",")
    return {
        "num_heads": int(num_heads),
        "num_kv_heads": int(num_kv_heads),
        "head_dim": int(head_dim),
        "seqlen": int(seqlen),
        "requested_slots": None if slots == "flat" else int(slots),
    }


def forward_rows(name: str) -> list[Row]:
    """The rows of a run of ``tune_forward.py``, with their shapes taken apart, in the order of heads, lengths and retained slots."""
    rows = [{**shape_of(row["shape"]), **row} for row in results(name)["rows"]]
    return sorted(rows, key=lambda row: (row["num_heads"], -row["head_dim"], row["seqlen"], row.get("slots", 0)))


def heads(row: Row) -> str:
    """Query heads / KV heads."""
    return f"{row['num_heads']} / {row['num_kv_heads']}"


def main_rows() -> list[Row]:
    """The forward's rows of 16 / 8 heads of 128 for which about 400 and 1,000 retained slots were asked."""
    return [
        row
        for row in forward_rows("discovery_growth_h200")
        if (row["num_heads"], row["head_dim"]) == (16, 128) and row["requested_slots"] in (400, 1000)
    ]

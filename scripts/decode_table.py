# SPDX-License-Identifier: Apache-2.0
"""The table of the decode: forms of MALA beside the dense kernels, and what they read."""

from __future__ import annotations

from typing import Any

from stored_results import results, table

Row = dict[str, Any]

FORMS, DENSE = ("two_pass", "split", "single"), ("sdpa_cudnn", "sdpa_flash")
INT8 = "mala_int8"
INT8_HEADER = ("INT8 plane, µs", "over cuDNN", "over FlashAttention-2", "GB/s", "of copy")
HEADER = (
    "batch x context",
    "heads",
    "retained slots",
    "two-pass, µs",
    "split",
    "single",
    "cuDNN",
    "FlashAttention-2",
    "two-pass over cuDNN",
    "over FlashAttention-2",
    "two-pass, GB/s",
    "of copy",
    "cuDNN, of copy",
    "two-pass eager, µs",
    "cuDNN",
)
NOTHING = "-"  # a column that failed; its reason is in the file


def decode(name: str = "decode_h200") -> str:
    """Each shape: retained slots of the two-pass form, times, speedups, and the bandwidth on the bytes that must be read."""
    found = results(name)
    rates = "Copy bandwidth in this run: {copy_gb_s:,.0f} GB/s; of a sum, which only reads: {read_gb_s:,.0f} GB/s.\n\n"
    has_plane = any(INT8 in row for row in found["rows"])
    lines = [[*cells(row), *(int8_cells(row.get(INT8, {})) if has_plane else [])] for row in found["rows"]]
    return rates.format(**found["bandwidth"]) + table((*HEADER, *(INT8_HEADER if has_plane else ())), lines)


def cells(row: Row) -> list[str]:
    """A line of the table."""
    ours = row["two_pass"]
    kind = " (flat)" if row["flat_heads"] == row["num_heads"] else ""
    return [
        f"{row['batch']} x {row['context']:,}",
        f"{row['num_heads']} / {row['num_kv_heads']}",
        f"{ours['key_slots_per_query']:,.0f}{kind}",
        *(number(row[name], "median_ms", "{:,.1f}", 1000) for name in (*FORMS, *DENSE)),
        *(number(ours, f"speedup_over_{other}", "{:.2f}x") for other in ("cudnn", "flash")),
        number(ours, "gb_s", "{:,.0f}"),
        *(number(column, "of_copy", "{:.0f} %", 100) for column in (ours, row["sdpa_cudnn"])),
        *(number(column, "eager_ms", "{:,.1f}", 1000) for column in (ours, row["sdpa_cudnn"])),
    ]


def int8_cells(column: Row) -> list[str]:
    """What a line has besides where the decode from an INT8 plane was measured."""
    return [
        number(column, "median_ms", "{:,.1f}", 1000),
        *(number(column, f"speedup_over_{other}", "{:.2f}x") for other in ("cudnn", "flash")),
        number(column, "gb_s", "{:,.0f}"),
        number(column, "of_copy", "{:.0f} %", 100),
    ]


def number(column: Row, key: str, form: str, scale: float = 1.0) -> str:
    """A number of a column, or that there is none."""
    return form.format(scale * column[key]) if key in column else NOTHING

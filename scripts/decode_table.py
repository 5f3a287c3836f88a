# SPDX-License-Identifier: Apache-2.0
"""The table of the decode: forms of MALA beside the dense kernels, and what they read."""

from __future__ import annotations

from typing import Any

from performance_rows import NOTHING, heads, kind, times_faster
from stored_results import results, table

Row = dict[str, Any]

COLUMNS = {
    "auto": '"auto", µs',
    "two_pass": "two-pass",
    "mala_int8": "INT8 plane",
    "split": "split",
    "single": "single",
    "sdpa_cudnn": "cuDNN",
    "sdpa_flash": "FlashAttention-2",
}
RATIOS = {
    ("auto", "sdpa_cudnn"): '"auto" over cuDNN',
    ("auto", "sdpa_flash"): "over FlashAttention-2",
    ("mala_int8", "sdpa_cudnn"): "INT8 plane over cuDNN",
    ("mala_int8", "sdpa_flash"): "over FlashAttention-2",
}
RATES = {"auto": '"auto", GB/s', "mala_int8": "INT8 plane, GB/s", "sdpa_cudnn": "cuDNN, GB/s"}
EAGER = {"auto": 'eager: "auto", µs', "mala_int8": "INT8 plane", "sdpa_cudnn": "cuDNN"}


def decode(name: str = "decode_h200") -> str:
    """Each shape: retained slots of the two-pass form, times, speedups, and the bandwidth on the bytes that must be read."""
    found = results(name)
    rates = "Copy bandwidth in this run: {copy_gb_s:,.0f} GB/s; of a sum, which only reads: {read_gb_s:,.0f} GB/s.\n\n"
    header = ["batch x context", "heads", "retained slots", *COLUMNS.values(), *RATIOS.values()]
    header += [cell for rate in RATES.values() for cell in (rate, "of copy")] + list(EAGER.values())
    return rates.format(**found["bandwidth"]) + table(header, [cells(row) for row in found["rows"]])


def cells(row: Row) -> list[str]:
    """A line of the table."""
    return [
        f"{row['batch']} x {row['context']:,}",
        heads(row),
        f"{row['two_pass']['key_slots_per_query']:,.0f}{kind(row)}",
        *(number(row[name], "median_ms", "{:,.1f}", 1000) for name in COLUMNS),
        *(times_faster(row, *pair) for pair in RATIOS),
        *(
            cell
            for name in RATES
            for cell in (number(row[name], "gb_s", "{:,.0f}"), number(row[name], "of_copy", "{:.0f} %", 100))
        ),
        *(number(row[name], "eager_ms", "{:,.0f}", 1000) for name in EAGER),
    ]


def number(column: Row, key: str, form: str, scale: float = 1.0) -> str:
    """A number of a column, or that there is none."""
    return form.format(scale * column[key]) if key in column else NOTHING

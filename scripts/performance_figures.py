# SPDX-License-Identifier: Apache-2.0
"""Figures of the benchmark, as SVG: how many times faster than cuDNN each column of each row is.

The same results always give the same bytes, so that a page can be checked against them.
"""

from __future__ import annotations

from typing import Any

from performance_rows import operator_rows, peer_rows, share_flat
from performance_tables import BACKWARD
from stored_results import results
from training_figure import OTHERS, text_at, ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 320, 84, 16, 64, 64  # pixels; the last four around the plot
GAP = 0.25  # of a row's place, left free
YARDSTICK = "sdpa_cudnn"
# figure -> its columns, each with its name
FIGURES = {
    "forward": {
        "mala_auto": "MALA",
        "mala_tau0": "tau 0",
        "fa4": "FlashAttention-4",
        "flash_sparse": "flash-sparse-attn",
    },
    "backward": {
        "mala": "MALA",
        "mala_state_only": "state-only",
        "fa4": "FlashAttention-4",
        "sdpa_flash": "FlashAttention-2",
    },
    "decode": {
        "auto": "MALA",
        "mala_int8": "INT8 plane",
        "two_pass": "two-pass",
        "split": "split",
        "sdpa_flash": "FlashAttention-2",
    },
}
Row = dict[str, Any]


def speedups(row: Row, names: dict[str, str]) -> list[float | None]:
    """cuDNN's time over that of each column; None where either has none."""
    times = [row[name].get("median_ms") for name in (YARDSTICK, *names)]
    return [None if time is None or times[0] is None else times[0] / time for time in times[1:]]


def labels(row: Row) -> list[str]:
    """The lines below a row's place: what it is, and how much of it is retained."""
    forward = "seqlen" in row
    retained = row if forward else row["two_pass"]
    is_main = (row["num_heads"], row["head_dim"]) == (16, 128)
    return [
        f"{row['seqlen']:,}" if forward else f"{row['batch']} x {row['context']:,}",
        "flat" if share_flat(row) == 1 else f"{retained['key_slots_per_query']:,.0f} slots",
        *([] if is_main else [f"{row['num_heads']}/{row['num_kv_heads']} of {row['head_dim']}"]),
    ]


def speedup_svg(rows: list[Row], names: dict[str, str]) -> str:
    """A place for each row, and in it a bar for each column; the line at 1 is cuDNN."""
    bars = [speedups(row, names) for row in rows]
    highest = 1.05 * max([1.0, *(value for of_row in bars for value in of_row if value is not None)])
    across, bottom = (WIDTH - RIGHT - LEFT) / len(rows), HEIGHT - BOTTOM

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * value / highest

    parts, x = [text_at(LEFT, TOP - 14, "times faster than cuDNN")], float(LEFT)
    for name, colour in zip(names.values(), OTHERS, strict=False):
        parts += [f'<rect x="{x:.1f}" y="8" width="16" height="8" fill="{colour}"/>', text_at(x + 22, 16, name)]
        x += 42 + 7.5 * len(name)
    for value in ticks(0, highest, 4):
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        parts.append(text_at(LEFT - 8, y(value) + 4, f"{value:g}", "end"))
    width = across * (1 - GAP) / len(names)
    for place, (row, of_row) in enumerate(zip(rows, bars, strict=True)):
        start = LEFT + across * (place + GAP / 2)
        for number, value in enumerate(of_row):
            if value is not None:
                parts.append(
                    f'<rect x="{start + number * width:.1f}" y="{y(value):.1f}" width="{width - 1:.1f}" '
                    f'height="{bottom - y(value):.1f}" fill="{OTHERS[number]}"/>'
                )
        for line, label in enumerate(labels(row)):
            parts.append(text_at(LEFT + across * (place + 0.5), bottom + 16 + 16 * line, label, "middle"))
    parts.append(f'<path d="M{LEFT} {y(1):.1f}H{WIDTH - RIGHT}" stroke="#333"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def performance_figures() -> dict[str, str]:
    """Every figure, by its name."""
    rows = {
        "forward": peer_rows(),
        "backward": operator_rows(*BACKWARD),
        "decode": results("decode_h200")["rows"],
    }
    return {name: speedup_svg(rows[name], columns) for name, columns in FIGURES.items()}

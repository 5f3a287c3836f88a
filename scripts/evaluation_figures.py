# SPDX-License-Identifier: Apache-2.0
"""Figures of what MALA does to a real checkpoint, as SVG: differences with their intervals by length, and needles found by depth.

The same results always give the same bytes, so that a page can be checked against them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evaluation_tables import PERPLEXITY, RULER, attention, same_attention
from stored_results import results
from training_figure import OTHERS, text_at, ticks

from mala_hf.heat_map import heat_map

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 84, 16, 64, 48  # pixels; the last four around the plot
APART = 18  # pixels between the marks of one length
FLOOR, CEILING, CLAIM = 1e-8, 1e-1, 1e-3  # nats per token
Row = dict[str, Any]


def perplexity_svg() -> str:
    """The size of the difference in nats by length and tau, on a logarithmic scale."""
    rows = [row for row in results(PERPLEXITY)["rows"] if "difference" in row]
    decades = math.log10(CEILING / FLOOR)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log10(max(abs(value), FLOOR) / FLOOR) / decades

    lines = [(FLOOR * 10**n, f"1e{n + round(math.log10(FLOOR))}") for n in range(round(decades) + 1)]
    title = "size of the difference from full attention, nats per token; hollow where MALA's likelihood is higher"
    return plot(rows, title, y, lines, emphasized=CLAIM)


def ruler_svg() -> str:
    """The difference in points by length and tau."""
    rows = [row for row in results(RULER)["lengths"] if "difference" in row and row["length"] is not None]
    low = min(row["difference"]["low"] for row in rows) - 0.5
    high = max(row["difference"]["high"] for row in rows) + 0.5

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    lines = [(value, f"{value:+g}" if value else "0") for value in ticks(low, high, 4)]
    return plot(rows, "RULER: difference from full attention, points", y, lines, emphasized=0.0)


def plot(
    rows: Sequence[Row],
    title: str,
    y: Callable[[float], float],
    lines: Sequence[tuple[float, str]],
    emphasized: float,
) -> str:
    """Means with bars for their intervals: a place for each length, and in it a mark for each tau."""
    lengths = sorted({row["length"] for row in rows})
    names = list(dict.fromkeys(attention(row) for row in rows))
    across = (WIDTH - RIGHT - LEFT) / len(lengths)
    parts, x = [text_at(LEFT, TOP - 14, title)], float(LEFT)
    for name, colour in zip(names, OTHERS, strict=False):
        parts += [f'<rect x="{x:.1f}" y="8" width="16" height="8" fill="{colour}"/>', text_at(x + 22, 16, name)]
        x += 42 + 7.5 * len(name)
    for value, label in lines:
        bold = math.isclose(value, emphasized)
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="{"#777" if bold else "#e4e4e4"}"/>')
        parts.append(text_at(LEFT - 8, y(value) + 4, label, "end"))
    for place, length in enumerate(lengths):
        middle = LEFT + across * (place + 0.5)
        parts.append(text_at(middle, HEIGHT - BOTTOM + 16, f"{length:,}", "middle"))
        for number, name in enumerate(names):
            row = next(row for row in rows if (row["length"], attention(row)) == (length, name))
            parts.append(mark(middle + APART * (number - (len(names) - 1) / 2), row["difference"], y, OTHERS[number]))
    parts.append(text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "tokens", "middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def mark(x: float, found: Row, y: Callable[[float], float], colour: str) -> str:
    """A disc at the mean, hollow below zero, and a bar over the interval; one with zero in it goes through zero."""
    ends = [y(found["low"]), y(found["high"])] + ([y(0.0)] if found["low"] <= 0 <= found["high"] else [])
    fill = "white" if found["mean"] < 0 else colour
    return (
        f'<path d="M{x:.1f} {min(ends):.1f}V{max(ends):.1f}" stroke="{colour}" stroke-width="2"/>'
        f'<circle cx="{x:.1f}" cy="{y(found["mean"]):.1f}" r="4" fill="{fill}" stroke="{colour}" stroke-width="2"/>'
    )


def needle_maps() -> dict[str, str]:
    """For each attention, by the name of its file, the share of needles found: a row a length, a column a tenth of the depth."""
    found = results(RULER)
    lengths = sorted({row["length"] for row in found["needles"]})
    maps = {}
    for one in found["lengths"]:
        if one["length"] is not None:
            continue
        rows: list[list[float | None]] = [[None] * 10 for _ in lengths]
        for row in found["needles"]:
            if same_attention(row, one):
                rows[lengths.index(row["length"])][round(10 * row["depth"][0])] = row["found"]
        name = attention(one)
        maps["needles_" + name.replace(" ", "_")] = (
            heat_map(
                rows,
                title=f"needles found, {name}",
                alt=f"share of needles found by depth and length, {name}",
                x_label="depth, tenths",
                y_label="tokens",
                row_names=[f"{length // 1024}K" for length in lengths],
                cell=(18, 18),
            )
            + "\n"
        )
    return maps


def evaluation_figures() -> dict[str, str]:
    """Every figure, by the name of its file."""
    return {"perplexity": perplexity_svg(), "ruler": ruler_svg()} | needle_maps()

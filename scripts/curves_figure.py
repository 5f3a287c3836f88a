# SPDX-License-Identifier: Apache-2.0
"""Curves through measured points as SVG, with either axis logarithmic; the same points always give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training_figure import text_at, ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 84, 16, 76, 48  # pixels; the last four around the plot
COLOURS = (
    "#d1495b", "#1f6feb", "#2e8b57", "#8250df", "#bc6c25", "#0b7285", "#c2255c", "#5c940d", "#495057", "#e8a33d", "#3b2f8f",
    "#7a7a00",
)  # fmt: skip
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """What an axis shows; a logarithmic one has no place for what is not positive."""

    label: str = ""
    is_log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, before scaling."""
        return math.log10(value) if self.is_log else value

    def lines(self, low: float, high: float) -> list[tuple[float, str]]:
        """Round places from ``low`` to ``high``, and what they are called."""
        if not self.is_log:
            return [(value, f"{value:g}") for value in ticks(low, high, 4)]
        whole = [float(power) for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
        if len(whole) > 2:
            return [(power, f"1e{power:.0f}") for power in whole]
        steps = [(power, factor) for power in range(math.floor(low), math.ceil(high) + 1) for factor in (1, 2, 5)]
        places = [(power + math.log10(factor), f"{factor * 10.0**power:g}") for power, factor in steps]
        return [(place, label) for place, label in places if low - 1e-9 <= place <= high + 1e-9]


def curves_svg(title: str, x_axis: Axis, y_axis: Axis, curves: Mapping[str, Points]) -> str:
    """A line through the points of each curve, in the order of x; points that a logarithmic axis cannot show are left out.

    The title says what y is. Raises ``ValueError`` where nothing can be shown.
    """
    shown: dict[str, list[tuple[float, float]]] = {}
    for name, points in curves.items():
        some = [(x, y) for x, y in points if (x > 0 or not x_axis.is_log) and (y > 0 or not y_axis.is_log)]
        if some:
            shown[name] = sorted((x_axis.place(x), y_axis.place(y)) for x, y in some)
    every = [point for points in shown.values() for point in points]
    if not every:
        raise ValueError(f"no point of {title!r} can be shown")
    (low_x, high_x), (low_y, high_y) = (_range([point[axis] for point in every]) for axis in (0, 1))

    def at(x: float, y: float) -> tuple[float, float]:
        across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + across * (x - low_x) / (high_x - low_x), HEIGHT - BOTTOM - down * (y - low_y) / (high_y - low_y)

    parts = [text_at(LEFT, TOP - 12, title)]
    for value, label in y_axis.lines(low_y, high_y):
        y = at(low_x, value)[1]
        parts += [
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>',
            text_at(LEFT - 8, y + 4, label, "end"),
        ]
    for value, label in x_axis.lines(low_x, high_x):
        parts.append(text_at(at(value, low_y)[0], HEIGHT - BOTTOM + 16, label, "middle"))
    x, y = float(LEFT), 16.0
    for (name, points), colour in zip(shown.items(), _colours(len(shown)), strict=True):
        width = 36 + 7.0 * len(name)
        if x + width > WIDTH - RIGHT:
            x, y = float(LEFT), y + 18
        parts += [
            f'<rect x="{x:.1f}" y="{y - 8:.1f}" width="14" height="8" fill="{colour}"/>',
            text_at(x + 19, y, name),
        ]
        x += width
        places = [at(*point) for point in points]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
    parts.append(text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_axis.label, "middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _range(places: Sequence[float]) -> tuple[float, float]:
    low, high = min(places), max(places)
    margin = 0.04 * (high - low) or 0.5
    return low - margin, high + margin


def _colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]

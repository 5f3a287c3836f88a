# SPDX-License-Identifier: Apache-2.0
"""Draw the loss curves of ``train_compare.py``: on top of each other, and below their differences to the first; SVG without a library.

The same results always give the same bytes, so that a page can be checked against them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

WIDTH, LEFT, RIGHT = 760, 84, 16  # pixels
TOP_PANEL, BOTTOM_PANEL, HEIGHT = (52, 256), (300, 410), 456  # y of the upper and lower edge
FIRST = "#b8bec8"  # drawn wide, the others over it
OTHERS = ("#d1495b", "#1f6feb", "#2e8b57", "#8250df", "#bc6c25")


def ticks(low: float, high: float, at_least: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``at_least`` to twice as many; one where there is no room."""
    if low == high:
        return [low]
    rough = (high - low) / at_least
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(factor * power for factor in (1, 2, 5) if factor * power <= rough)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class Panel:
    """A coordinate system for steps 1 to ``steps`` and values from ``low`` to ``high``, and what is drawn into it."""

    def __init__(self, edges: tuple[int, int], steps: int, values: Sequence[float], title: str) -> None:
        self.edges, self.steps = edges, steps
        low, high = min(values), max(values)
        margin = 0.06 * (high - low) or 1.0  # curves that are all one value get a unit around it
        self.low, self.high = low - margin, high + margin
        self.parts = [text_at(LEFT, edges[0] - 8, title)]
        for value in ticks(self.low, self.high, 3):
            y = self.y(value)
            self.parts.append(
                f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{"#999" if value == 0 else "#e4e4e4"}"/>'
            )
            self.parts.append(text_at(LEFT - 8, y + 4, f"{value:g}", "end"))
        for step in ticks(1, steps, 4):
            if step == int(step):
                self.parts.append(text_at(self.x(step), edges[1] + 16, f"{step:g}", "middle"))

    def x(self, step: float) -> float:
        """Pixels from the left."""
        return LEFT + (WIDTH - RIGHT - LEFT) * (step - 1) / max(self.steps - 1, 1)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        upper, lower = self.edges
        return lower - (lower - upper) * (value - self.low) / (self.high - self.low)

    def line(self, values: Sequence[float], colour: str, width: float) -> None:
        """One value a step, from step 1."""
        points = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in enumerate(values, 1))
        self.parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')


def text_at(x: float, y: float, text: str, anchor: str = "start") -> str:
    """Text that starts, ends or is centred there."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def differences(run: dict[str, Any], first: dict[str, Any]) -> list[float]:
    """Loss minus the loss of the first run at the same step, in nats per token."""
    return [loss - other for loss, other in zip(run["loss"], first["loss"], strict=True)]


def training_svg(result: dict[str, Any]) -> str:
    """The figure for one stored result with at least two runs."""
    runs = result["runs"]
    first, others = runs[0], runs[1:]
    steps = len(first["loss"])
    losses = Panel(TOP_PANEL, steps, [loss for run in runs for loss in run["loss"]], "training loss, nats per token")
    apart = [differences(run, first) for run in others]
    below = Panel(
        BOTTOM_PANEL, steps, [0.0, *(x for curve in apart for x in curve)], f"difference to {first['attention']}"
    )
    losses.line(first["loss"], FIRST, 5)
    colours = [FIRST, *(OTHERS[number % len(OTHERS)] for number in range(len(others)))]
    for run, curve, colour in zip(others, apart, colours[1:], strict=True):
        losses.line(run["loss"], colour, 1.2)
        below.line(curve, colour, 1.2)
    legend, x = [], float(LEFT)
    for run, colour in zip(runs, colours, strict=True):
        legend.append(f'<rect x="{x:.1f}" y="8" width="16" height="8" fill="{colour}"/>')
        legend.append(text_at(x + 22, 16, run["attention"]))
        x += 42 + 7.5 * len(run["attention"])
    body = [*legend, *losses.parts, *below.parts, text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "step", "middle")]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )

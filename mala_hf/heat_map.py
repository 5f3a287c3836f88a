# SPDX-License-Identifier: Apache-2.0
"""Heat maps as SVG: inline in a page, or files of their own. Text and frames follow the reader's light or dark scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

# viridis at equal steps: even to the eye, also without colour vision
COLOURS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#222}.frame{fill:none;stroke:#888}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)
LEFT, TOP, BOTTOM, LEGEND = 40, 26, 34, 74  # pixels around the cells
CHARACTER = 7  # pixels at most, on average, of a title's
Cell = float | None


@dataclass(frozen=True)
class Scale:
    """Maps values to colours, from ``low`` to ``high``; in decades if ``logarithmic``, where values outside take the ends' colours."""

    low: float = 0.0
    high: float = 1.0
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return where the value lies, 0 to 1."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = (math.log10(max(x, self.low)) for x in (value, low, high))
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def colour(self, value: float) -> str:
        """Return the colour as ``#rrggbb``."""
        place = self.place(value) * (len(COLOURS) - 1)
        left = min(int(place), len(COLOURS) - 2)
        mixed = (round(a + (b - a) * (place - left)) for a, b in zip(COLOURS[left], COLOURS[left + 1], strict=True))
        return "#" + "".join(f"{channel:02x}" for channel in mixed)


SHARES = Scale()
ERRORS = Scale(1e-6, 1e-1, logarithmic=True)


def heat_map(
    rows: Sequence[Sequence[Cell]],
    *,
    title: str,
    alt: str,
    x_label: str,
    y_label: str,
    row_names: Sequence[object] | None = None,
    scale: Scale = SHARES,
    cell: tuple[float, float] = (18, 12),
) -> str:
    """Draw rows of values as an ``svg`` element with a title, axes and a legend; None leaves a cell empty, rows may be shorter.

    cell: its (width, height) in pixels. alt: what a reader who does not see it should know.
    """
    columns = max((len(row) for row in rows), default=0)
    width, height = columns * cell[0], len(rows) * cell[1]
    names = [str(name) for name in (range(len(rows)) if row_names is None else row_names)]
    across = LEFT + max(width + LEGEND, CHARACTER * len(title))
    size = f"{across:g} {TOP + height + BOTTOM:g}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {size}" width="{size.split()[0]}" '
        f'height="{size.split()[1]}" aria-label="{escape(alt)}"><style>{STYLE}</style>',
        f'<text x="{LEFT}" y="14">{escape(title)}</text>',
        *_cells(rows, names, scale, cell),
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{width:g}" height="{height:g}"/>',
        *_ticks(columns, names, cell, height),
        f'<text x="{LEFT + width / 2:g}" y="{TOP + height + 28:g}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(11 {TOP + height / 2:g}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
        *_legend(scale, LEFT + width + 12, height),
        "</svg>",
    ]
    return "".join(parts)


def _cells(rows: Sequence[Sequence[Cell]], names: Sequence[str], scale: Scale, cell: tuple[float, float]) -> list[str]:
    """Draw neighbours of equal colour as one rectangle, unless cells are large enough to be pointed at one by one."""
    parts = []
    pointed = cell[1] >= 8
    for y, row in enumerate(rows):
        x = 0
        paints = [None if value is None else scale.colour(value) for value in row]
        for paint, run in groupby(enumerate(paints), key=lambda pair: pair if pointed else pair[1]):
            length = len(list(run))
            colour = paint[1] if pointed else paint
            if colour is not None:
                tip = f"<title>{escape(names[y])}, {x}: {row[x]:.4g}</title>" if pointed else ""
                place = f'x="{LEFT + x * cell[0]:g}" y="{TOP + y * cell[1]:g}"'
                shape = f'width="{length * cell[0]:g}" height="{cell[1]:g}" fill="{colour}"'
                parts.append(f"<rect {place} {shape}>{tip}</rect>" if tip else f"<rect {place} {shape}/>")
            x += length
    return parts


def _ticks(columns: int, names: Sequence[str], cell: tuple[float, float], height: float) -> list[str]:
    across, down = _step(columns, 26 / cell[0]), _step(len(names), 15 / cell[1])
    return [
        f'<text x="{LEFT + (x + 0.5) * cell[0]:g}" y="{TOP + height + 14:g}" text-anchor="middle">{x}</text>'
        for x in range(0, columns, across)
    ] + [
        f'<text x="{LEFT - 5}" y="{TOP + (y + 0.5) * cell[1] + 4:g}" text-anchor="end">{escape(names[y])}</text>'
        for y in range(0, len(names), down)
    ]


def _step(count: int, least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, ... that leaves at least ``least`` cells between ticks."""
    return next(
        step
        for power in range(12)
        for step in (10**power, 2 * 10**power, 5 * 10**power)
        if step >= least or step > count
    )


def _legend(scale: Scale, x: float, height: float) -> list[str]:
    steps = 20
    bars = [
        f'<rect x="{x:g}" y="{TOP + height * (1 - (n + 1) / steps):.1f}" width="10" height="{height / steps + 0.5:.1f}" '
        f'fill="{Scale().colour((n + 0.5) / steps)}"/>'
        for n in range(steps)
    ]
    at_most = "≤ " if scale.logarithmic else ""
    ends = ((TOP + 9, f"{scale.high:g}"), (TOP + height, f"{at_most}{scale.low:g}"))
    return bars + [f'<text x="{x + 14:g}" y="{y:g}">{label}</text>' for y, label in ends]

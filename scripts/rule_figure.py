# SPDX-License-Identifier: Apache-2.0
"""The rule at work on two heads of a real layer, as one SVG: which tiles are retained, and the tests of one query tile.

python scripts/rule_figure.py            # rewrite docs/how_it_works.svg
"""

from __future__ import annotations

import math

import torch
from safetensors.torch import load_file
from stored_results import ROOT

from mala_hf.ops.reference import RETAINED, SKIPPED, HeadResult, forward_head, legal_pairs

CAPTURED = ROOT / "tests" / "data" / "smollm2_layer19_kv1.safetensors"  # its README says what it is
FIGURE = ROOT / "docs" / "how_it_works.svg"
FIRST_HEAD = 3  # of the model, the first in the file
HEADS = (1, 2)  # of the file: a sparse one, a dense one
TILE = (64, 64)
SHOWN = -1  # the query tile whose tests are drawn
CELL, TOP, LEFTS = 7, 40, (16, 268)  # pixels
BARS, BAR, LOWEST, HIGHEST = 560, 9, -7.0, 8.0  # left edge and width in pixels; what the axis spans, in nats
RETAINED_COLOUR, SKIPPED_COLOUR = "#1f6feb", "#d4d9de"
STYLE = "text{font:12px system-ui,sans-serif;fill:#222}.small{font-size:11px}.title{font-weight:600}"


def judged_head(head: int) -> HeadResult:
    """Tiles and margins of one head of the capture at tau = 1, in float64: no tile is near enough its limit to depend on rounding."""
    captured = load_file(CAPTURED)
    q, k, v = (captured[name].double() for name in "qkv")
    legal = legal_pairs(q.shape[1], k.shape[1], (-1, 0))
    return forward_head(q[head], k[0], v[0], legal, tau=1.0, softmax_scale=q.shape[-1] ** -0.5, tile=TILE)


def rule_svg(results: dict[int, HeadResult]) -> str:
    """The figure of these heads; the first one's query tile ``SHOWN`` is drawn test by test."""
    parts: list[str] = []
    for left, (head, result) in zip(LEFTS, results.items(), strict=True):
        parts += tile_map(left, head, result)
    first = next(iter(results.values()))
    row = range(len(first.tiles))[SHOWN]
    side = len(first.tiles) * CELL
    parts.append(
        f'<rect x="{LEFTS[0] - 1}" y="{TOP + row * CELL - 1}" width="{side + 2}" height="{CELL + 1}" '
        'fill="none" stroke="#d1495b" stroke-width="1.5"/>'
    )
    parts += judgements(first, row, side)
    width, height = BARS + len(first.tiles) * BAR + 16, TOP + side + 62
    parts += legend(TOP + side + 44)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'aria-label="retained and skipped tiles of two heads, and the tests of one query tile"><style>{STYLE}</style>\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def tile_map(left: int, head: int, result: HeadResult) -> list[str]:
    """A square for each visible tile."""
    side = len(result.tiles) * CELL
    retained, visible = int((result.tiles == RETAINED).sum()), int((result.tiles > 0).sum())
    parts = [
        text(left, 18, f"head {FIRST_HEAD + head} retains {100 * retained / visible:.0f} %", "title"),
        text(left, 32, "query tiles downward, key tiles to the right", "small"),
        text(left, TOP + side + 16, f"{retained} of {visible} visible tiles", "small"),
    ]
    for kind, colour in ((RETAINED, RETAINED_COLOUR), (SKIPPED, SKIPPED_COLOUR)):
        places = (result.tiles == kind).nonzero().tolist()
        squares = "".join(
            f"M{left + column * CELL} {TOP + row * CELL}h{CELL - 1}v{CELL - 1}h{1 - CELL}z" for row, column in places
        )
        parts.append(f'<path d="{squares}" fill="{colour}"/>')
    return parts


def judgements(result: HeadResult, row: int, side: int) -> list[str]:
    """What each key tile of a row of tiles would add at most, over the limit of that moment; nats up, factors written beside."""
    down = side / (HIGHEST - LOWEST)

    def y(nats: float) -> float:
        return TOP + (HIGHEST - min(max(nats, LOWEST), HIGHEST)) * down

    right = BARS + len(result.tiles) * BAR
    parts = [
        text(BARS, 18, "the framed query tile, test by test", "title"),
        text(BARS, 32, "largest contribution in any row, over its limit", "small"),
    ]
    for factor, label in ((1e-3, "1/1000"), (0.1, "1/10"), (1, "limit"), (10, "10x"), (1000, "1000x")):
        line = y(math.log(factor))
        parts += [
            f'<path d="M{BARS} {line:.1f}H{right}" stroke="{"#d1495b" if factor == 1 else "#e4e4e4"}"/>',
            text(BARS - 6, line + 4, label, "small", "end"),
        ]
    for column, nats in enumerate(result.margin[row].tolist()):
        if nats == -math.inf:
            continue
        low, high = sorted((y(0), y(nats)))
        colour = RETAINED_COLOUR if result.tiles[row, column] == RETAINED else SKIPPED_COLOUR
        place = f'x="{BARS + column * BAR}" y="{low:.1f}"'
        parts.append(f'<rect {place} width="{BAR - 2}" height="{max(high - low, 1):.1f}" fill="{colour}"/>')
    arrow = TOP + side + 12
    parts += [
        f'<path d="M{right} {arrow}H{BARS}m7 -4l-7 4l7 4" fill="none" stroke="#222"/>',
        text(right, arrow + 14, "from the diagonal toward earlier keys", "small", "end"),
    ]
    return parts


def legend(y: int) -> list[str]:
    """What the colours mean."""
    entries = (
        (LEFTS[0], RETAINED_COLOUR, "retained: scores, softmax, V, P @ V"),
        (LEFTS[1], SKIPPED_COLOUR, "skipped: scores only, no row needs it"),
    )
    return [
        part
        for x, colour, says in entries
        for part in (f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>', text(x + 16, y, says))
    ]


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{content}</text>'


def main() -> None:
    torch.set_num_threads(1)
    FIGURE.write_text(rule_svg({head: judged_head(head) for head in HEADS}), "utf-8")


if __name__ == "__main__":
    main()

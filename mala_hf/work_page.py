# SPDX-License-Identifier: Apache-2.0
"""The results of ``mala-hf work`` as pictures and one HTML page, drawn from the stored numbers alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .heat_map import ERRORS, SHARES, heat_map
from .html_report import heading, maps, page, paragraph, table
from .work_tables import Row, break_even_words, head_rows, omitted_measure, percent, plain_words, summary_rows

MOST_CELLS = 128  # of a tile map's picture, on each side
BASELINE = "Full attention in float32 is what all errors are measured against; at tau 0 they are the rounding of the model's dtype."


def head_maps(result: Row, run: Row) -> list[str]:
    """Draw one tau's maps of layers by heads: work, omitted mass, output error and, where measured, the error of dQ."""
    name, label = omitted_measure(result)
    measures = [("work_fraction", "work"), (f"{name}_mean", label), ("output_error_mean", "output error")]
    if "dq_error" in run["layers"][0]:
        measures.append(("dq_error", "dQ error"))
    return [head_map(run, key, label) for key, label in measures]


def head_map(run: Row, key: str, label: str) -> str:
    """Draw one measure of one tau as a map of layers by heads."""
    layers = run["layers"]
    values = [layer[key] for layer in layers]
    flat = [value for row in values for value in row]
    return heat_map(
        values,
        title=f"{label}, tau {run['tau']:g}",
        alt=f"{label} of each layer and query head at tau {run['tau']:g}, as fractions: from {min(flat):.3g} to {max(flat):.3g}",
        x_label="query head",
        y_label="layer",
        row_names=[layer["layer"] for layer in layers],
        scale=SHARES if key == "work_fraction" else ERRORS,
    )


def tile_map(found: Row) -> str:
    """Draw which tiles one head retained; a long sequence's tiles are averaged to at most 128 cells on each side."""
    rows = found["rows"]
    step = -(-max(len(rows), *map(len, rows)) // MOST_CELLS)
    cells = tile_shares(rows, step)
    retained, visible = (sum(row.count(mark) for row in rows) for mark in ("#", "-"))
    visible += retained
    shown = "" if step == 1 else f"; each cell is the share of {step} x {step} tiles"
    side = max(2.0, min(14.0, 420 / max(len(cells), 1)))
    return heat_map(
        cells,
        title=f"layer {found['layer']}, head {found['head']}, tau {found['tau']:g}: {retained} of {visible} tiles retained",
        alt=f"retained tiles of layer {found['layer']}, head {found['head']} at tau {found['tau']:g}: {retained} of {visible} visible "
        f"ones{shown}",
        x_label="key tile",
        y_label="query tile",
        cell=(side, side),
    )


def tile_shares(rows: Sequence[str], step: int) -> list[list[float | None]]:
    """Return the share of visible tiles that were retained, in each square of ``step`` tiles a side; None where none is visible."""
    width = max(map(len, rows))
    cells: list[list[float | None]] = []
    for top in range(0, len(rows), step):
        row: list[float | None] = []
        for left in range(0, width, step):
            marks = "".join(line[left : left + step] for line in rows[top : top + step])
            visible = marks.count("#") + marks.count("-")
            row.append(marks.count("#") / visible if visible else None)
        cells.append(row)
    return cells


def work_page(result: Row) -> str:
    """Return the report as one HTML document."""
    tile = " x ".join(map(str, result["tile"]))
    parts = [
        paragraph(
            f"{result['length']:,} tokens of {result['text']}; {result['dtype']}, {result['device']}, ran as {result['impl']}, "
            f"tiles of {tile}. {BASELINE}"
        ),
        *map(paragraph, plain_words(result)),
        table(*summary_rows(result), caption="All layers and heads; shares, masses and errors in percent"),
        heading("Where time would go"),
        paragraph(break_even_words(result)),
        break_even_table(result),
        heading("Layers and heads"),
        paragraph(
            "Fractions of 1, not percent; masses and errors on a logarithmic scale. Point at a cell for its number."
        ),
        *(maps(head_maps(result, run)) for run in result["runs"][1:]),
        heading("Retained tiles of one head"),
        maps(tile_map(found) for found in result["tile_maps"]),
        heading("Every head"),
        table(*head_rows(result), caption="Press a heading to sort by it", sortable=True),
        paragraph(
            "Made with " + ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
        ),
    ]
    return page(f"What MALA does to {result['model']}", parts)


def break_even_table(result: Row) -> str:
    """Return the estimate by layer, a row for each tau but 0."""
    rows = [
        [
            f"{run['tau']:g}",
            str(layer["layer"]),
            percent(layer["break_even"]["post_score_share"]),
            percent(layer["break_even"]["operations_fraction"]),
            f"{layer['break_even']['overhead']:.3f}x",
        ]
        for run in result["runs"][1:]
        for layer in run["layers"]
    ]
    headings = [
        "tau",
        "layer",
        "after the scores, % of MALA's operations",
        "% of full attention's operations",
        "break-even",
    ]
    return table(headings, rows, caption="By layer, an estimate; press a heading to sort by it", sortable=True)


def save_report(result: Row, folder: Path) -> list[Path]:
    """Write ``work.json``, ``work.html``, ``heads.svg`` and ``tiles.svg`` (of the first tau) into the folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {
        "work.json": lambda: json.dumps(result) + "\n",
        "work.html": lambda: work_page(result),
        "heads.svg": lambda: head_map(result["runs"][1], "work_fraction", "work") + "\n",
        "tiles.svg": lambda: tile_map(result["tile_maps"][0]) + "\n",
    }
    for name, draw in drawings.items():  # the numbers first: what follows can be drawn from them again
        (folder / name).write_text(draw(), encoding="utf-8")
    return [folder / name for name in drawings]

# SPDX-License-Identifier: Apache-2.0
"""The rows of a benchmark as tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .decode import FORMS


def columns_of(row: dict[str, Any]) -> list[str]:
    """The columns of a row that were timed or failed, ours first."""
    return [name for name in row if isinstance(row[name], dict)]


def what(row: dict[str, Any]) -> str:
    """The shape of a row and the work in it, in a line."""
    heads = f"{row['num_heads']}/{row['num_kv_heads']} heads of {row['head_dim']}"
    flat = f", {row['flat_heads']} flat" if row["flat_heads"] else ""
    if "context" in row:
        slots = ", ".join(f"{row[form]['key_slots_per_query']:,.0f} {form}" for form in FORMS)
        return f"batch {row['batch']}, {heads}{flat}, context {row['context']:,}; retained slots per query: {slots}"
    name = f" of {row['captured']}" if row["captured"] else ""
    return f"{row['seqlen']:,} tokens{name}, {heads}{flat}; retained slots per query: {row['key_slots_per_query']:,.0f}"


def row_lines(row: dict[str, Any]) -> list[str]:
    """A row as a title and a table with a line for each column."""
    best = row["best_dense"]
    found = [["", "ms", "10 % to 90 %", "eager", "MiB", "error", "GB/s", "of copy", "best dense"]]
    reasons = []
    for name in columns_of(row):
        column = row[name]
        if "failed" in column:
            reasons.append(f"  {name}: {column['failed']}")
            continue
        errors = column.get("relative_errors") or [column["relative_error"]]
        memory = column.get("peak_bytes", column.get("step_peak_bytes"))
        rate = [f"{column['gb_s']:,.0f}", f"{100 * column['of_copy']:.0f} %"] if "gb_s" in column else ["", ""]
        found.append(
            [
                name,
                f"{column['median_ms']:.4f}",
                f"{column['p10_ms']:.4f} to {column['p90_ms']:.4f}",
                f"{column['eager_ms']:.4f}",
                "" if memory is None else f"{memory / 2**20:,.1f}",
                f"{max(errors):.1e}",
                *rate,
                f"{row[best]['median_ms'] / column['median_ms']:.2f}x" if best else "",
            ]
        )
    return [what(row), *aligned(found), *reasons]


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, numbers to the right; columns without any are left out."""
    kept = [place for place in range(len(cells[0])) if any(line[place] for line in cells[1:])]
    widths = [max(len(line[place]) for line in cells) for place in kept]
    return [
        "  "
        + "  ".join(
            f"{line[p]:<{w}}" if p == 0 else f"{line[p]:>{w}}" for p, w in zip(kept, widths, strict=True)
        ).rstrip()
        for line in cells
    ]


def closing_lines(result: dict[str, Any]) -> list[str]:
    """What does not belong to a row: bandwidth, generation, and what is missing."""
    lines = []
    if found := result.get("bandwidth"):
        lines.append(f"copy {found['copy_gb_s']:,.0f} GB/s, read {found['read_gb_s']:,.0f} GB/s")
    for row in result.get("generate", []):
        lines.append(
            f"generate, {row['attention']}: {row['tokens_per_second']:.1f} tokens/s after {row['prompt_tokens']:,} tokens of prompt"
        )
    lines += [f"{name} is not here: {why}" for name, why in result["unavailable"].items()]
    lines += [f"not run: {one['case']}: {one['reason']}" for one in result["not_run"]]
    return lines

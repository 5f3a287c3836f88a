# SPDX-License-Identifier: Apache-2.0
"""Read and write the files of results/, and make Markdown tables of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def results(name: str) -> dict[str, Any]:
    """The stored results of that name."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text("utf-8"))


def as_text(found: dict[str, Any]) -> str:
    """JSON with a line for each entry, and one for each row of a list of rows: short, and readable in a comparison of versions."""
    entries = []
    for name, value in found.items():
        rows = isinstance(value, list) and value and isinstance(value[0], dict)
        lines = ",\n".join(f"  {json.dumps(row)}" for row in value) if rows else json.dumps(value)
        entries.append(f" {json.dumps(name)}: " + (f"[\n{lines}\n ]" if rows else lines))
    return "{\n" + ",\n".join(entries) + "\n}\n"


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: who reads it meanwhile, or after a run that was stopped, finds the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(text, "utf-8")
    scratch.replace(path)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)

# SPDX-License-Identifier: Apache-2.0
"""The stored results of the studies on a real model, windows averaged: what their tables and figures are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from stored_results import ROOT, results

Row = dict[str, Any]


def runs(study: str) -> dict[str, Row]:
    """Every stored run of a study, by the rest of its file's name."""
    prefix = f"study_{study}_"
    paths = sorted((ROOT / "results").glob(f"{prefix}*.json"))
    return {path.stem.removeprefix(prefix): results(path.stem) for path in paths}


def averaged(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """One row for each value of ``keys``, in their first order, with the mean over windows of every number."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return [_mean(some, keys) for some in groups.values()]


def _mean(rows: Sequence[Row], keys: Sequence[str]) -> Row:
    numbers = [name for name, value in rows[0].items() if isinstance(value, float) and name not in keys]
    return rows[0] | {name: fmean(row[name] for row in rows) for name in numbers} | {"windows": len(rows)}


def title(found: Row) -> str:
    """What was measured, on what, where."""
    versions = found["versions"]
    return (
        f"{found['model']} on {found['text']}; {found['device']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}.{missing(found)}"
    )


def missing(found: Row) -> str:
    """What a run has not measured, as a sentence after others; nothing for a whole one."""
    not_run = found.get("not_run", ())
    return f" Not measured yet: {'; '.join(not_run)}." if not_run else ""


def percent(value: float, digits: int = 4) -> str:
    """A share in per cent; what is too small for the digits with an exponent."""
    shown = 100 * value
    return f"{shown:.1e}" if 0 < abs(shown) < 10.0**-digits else f"{shown:.{digits}f}"

# SPDX-License-Identifier: Apache-2.0
"""RULER's two metrics: how many of the references a prediction contains, or whether it contains any; case does not matter."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Metric = Callable[[Sequence[str], Sequence[Sequence[str]]], float]


def clean_prediction(prediction: str) -> str:
    """Strip white space at the ends and turn every control character below 0x20 into a newline, as RULER does before scoring."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def contained(prediction: str, references: Sequence[str]) -> list[bool]:
    """Return for each reference whether the prediction contains it."""
    return [reference.lower() in prediction.lower() for reference in references]


def _mean_percent(scores: list[float]) -> float:
    return round(sum(scores) / len(scores) * 100, 2)


def string_match_all(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Mean share of each prediction's references that it contains, in percent, rounded to two decimals."""
    pairs = zip(predictions, references, strict=True)
    return _mean_percent([sum(contained(prediction, some)) / len(some) for prediction, some in pairs])


def string_match_part(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Share of the predictions that contain at least one of their references, in percent, rounded to two decimals."""
    pairs = zip(predictions, references, strict=True)
    return _mean_percent([float(any(contained(prediction, some))) for prediction, some in pairs])

# SPDX-License-Identifier: Apache-2.0
"""RULER's two metrics: how many of the references a prediction contains, or whether it contains any; case does not matter."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Metric = Callable[[str, Sequence[str]], float]  # of a clean prediction and its references: 0 to 1


def clean_prediction(prediction: str) -> str:
    """Strip white space at the ends and turn every control character below 0x20 into a newline, as RULER does before scoring."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def contained(prediction: str, references: Sequence[str]) -> list[bool]:
    """Return for each reference whether the prediction contains it."""
    return [reference.lower() in prediction.lower() for reference in references]


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Return the share of the references that the prediction contains."""
    return sum(contained(prediction, references)) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if the prediction contains at least one of the references, else 0."""
    return float(any(contained(prediction, references)))


def mean_percent(shares: Sequence[float]) -> float:
    """Mean over samples in percent, rounded to two decimals."""
    return round(sum(shares) / len(shares) * 100, 2)

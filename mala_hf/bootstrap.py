# SPDX-License-Identifier: Apache-2.0
"""Paired bootstrap: how sure is the difference of two means that were measured on the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

CONFIDENCE = 0.95
RESAMPLES = 10_000
CHUNK_BYTES = 1 << 26  # of one stratum's resampled indices


@dataclass(frozen=True)
class Difference:
    """Mean of the paired differences and its percentile interval; ``low`` and ``high`` are None where one unit leaves no spread."""

    mean: float
    low: float | None
    high: float | None
    units: int

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, fit for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{self.low:+.2g}, {self.high:+.2g}]"
        return f"{self.mean:+.2g}{interval}"


def paired_difference(
    differences: Sequence[Sequence[float]], weights: Sequence[Sequence[float]] | None = None, *, seed: int = 0
) -> Difference:
    """Bootstrap the mean, over strata, of the weighted mean of each stratum's differences.

    differences: one list per stratum (a task at a length; or all in one), one number per unit (sample, document, window).
    weights: likewise (scored tokens), by default equal. Units are drawn again within their stratum, together with their weights.
    The same arguments give the same interval. Raises ``ValueError`` when there is nothing to resample.
    """
    if not differences or not all(len(stratum) for stratum in differences):
        raise ValueError("nothing to compare: a stratum without samples")
    if weights is None:
        weights = [[1.0] * len(stratum) for stratum in differences]
    generator = torch.Generator().manual_seed(seed)
    means, resampled = [], torch.zeros(RESAMPLES, dtype=torch.float64)
    for some_differences, some_weights in zip(differences, weights, strict=True):
        difference = torch.tensor(some_differences, dtype=torch.float64)
        weight = torch.tensor(some_weights, dtype=torch.float64)
        means.append(float((difference * weight).sum() / weight.sum()))
        resampled += _resampled_means(difference, weight, generator)
    units = sum(len(stratum) for stratum in differences)
    mean = sum(means) / len(means)
    if all(len(stratum) == 1 for stratum in differences):
        return Difference(mean, None, None, units)
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.quantile(resampled / len(means), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Difference(mean, low, high, units)


def _resampled_means(difference: Tensor, weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return (RESAMPLES,) weighted means of as many units as there are, drawn with replacement."""
    count = len(difference)
    rows = max(1, CHUNK_BYTES // (8 * count))
    pieces = []
    for start in range(0, RESAMPLES, rows):
        drawn = torch.randint(count, (min(rows, RESAMPLES - start), count), generator=generator)
        pieces.append((difference * weight)[drawn].sum(1) / weight[drawn].sum(1))
    return torch.cat(pieces)

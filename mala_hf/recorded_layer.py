# SPDX-License-Identifier: Apache-2.0
"""The work of one attention layer, reduced as it arrives: sums, and a histogram of the certificate for its 95th percentile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .ops import Work
from .ops.hf_heads import HeadWork
from .ops.hf_settings import DENSE

# upper edges of the histogram of omitted-mass bounds: 0, then steps of 5 % from 1e-8 to 1
LOWEST_BOUND, BINS = 1e-8, 379
QUANTILE = 0.95


def _bin_edges(device: torch.device) -> Tensor:
    edges = torch.logspace(
        torch.log10(torch.tensor(LOWEST_BOUND)).item(), 0, BINS - 1, dtype=torch.float64, device=device
    )
    return torch.cat([edges.new_zeros(1), edges])


@dataclass
class LayerWork:
    """Work of one attention layer over all its recorded forwards; means weigh every query row the same.

    Heads that ran torch's SDPA are dense: their work is not counted, their numbers are 0 and their share of the work 1. So are those
    of heads that another process has.

    Attributes:
        name: of the module in the model. index: its ``layer_idx``, or None.
        taus: {query head: its tau, None where it is dense}; without heads that another process has.
        is_whole: whether the heads are all of the layer's. False where processes share them and nobody knows which these are.
        impls, tiles: what ran; several tiles where prefill and decode use their own.
        choices: {(way, reason): calls}: how its heads were computed, and why; calls of all processes, which each make theirs.
        support_bytes: the most that one forward kept of its retained tiles until backward.
        forwards: how often the layer ran; where several processes are put together, the most of any of them.
    """

    name: str
    index: int | None
    taus: dict[int, float | None] = field(default_factory=dict)
    is_whole: bool = True
    impls: set[str] = field(default_factory=set)
    tiles: set[tuple[int, int]] = field(default_factory=set)
    choices: dict[tuple[str, str], int] = field(default_factory=dict)
    forwards: int = 0
    support_bytes: int = 0
    # float64 (4, num_heads): rows, key slots, visible slots, bounds
    _sums: Tensor = field(default_factory=lambda: torch.zeros(4, 0, dtype=torch.float64), repr=False)
    _histogram: Tensor = field(default_factory=lambda: torch.zeros(0, BINS, dtype=torch.int64), repr=False)

    def add(self, calls: Sequence[HeadWork]) -> None:
        """Add one forward of the layer: each call of some of its heads."""
        total = calls[0].total
        self.is_whole = self.is_whole and total is not None
        self._make_room(sum(len(call.heads) for call in calls) if total is None else total)
        self.forwards += 1
        for call in calls:
            heads = list(call.heads)
            self.taus |= dict.fromkeys(heads, call.tau)
            if call.work is None:
                self.impls.add(DENSE)
                continue
            self.impls.add(call.work.impl)
            self.tiles.add(call.work.tile)
            for choice in call.work.choices:
                self._count(choice.way, choice.reason, 1)
            sums, histogram = _reduced(call.work)
            self._sums[:, heads] += sums
            self._histogram[heads] += histogram
        self.support_bytes = max(self.support_bytes, sum(call.work.support_bytes for call in calls if call.work))

    def merge(self, other: LayerWork) -> None:
        """Add what another process recorded of the same layer: of other sequences, or of the heads that it has.

        Raises:
            ValueError: where nobody knows which heads these are.
        """
        if not (self.is_whole and other.is_whole):
            raise ValueError(
                f"processes share the heads of {self.name} and it is not known which has which: read each process's report alone"
            )
        self._make_room(other.num_heads)
        self.taus |= other.taus
        self.impls |= other.impls
        self.tiles |= other.tiles
        for (way, reason), calls in other.choices.items():
            self._count(way, reason, calls)
        self.forwards = max(self.forwards, other.forwards)
        self.support_bytes = max(self.support_bytes, other.support_bytes)
        self._sums = self._sums + other._sums
        self._histogram = self._histogram + other._histogram

    def _count(self, way: str, reason: str, calls: int) -> None:
        self.choices[way, reason] = self.choices.get((way, reason), 0) + calls

    def _make_room(self, num_heads: int) -> None:
        if not self.num_heads:
            self._sums, self._histogram = self._sums.new_zeros(4, num_heads), self._histogram.new_zeros(num_heads, BINS)
        if self.num_heads != num_heads:
            raise ValueError(f"{self.name} had {self.num_heads} query heads before, and now {num_heads}")

    @property
    def num_heads(self) -> int:
        """Query heads of the layer; of this process where nobody knows which it has."""
        return self._sums.shape[1]

    @property
    def is_dense(self) -> bool:
        """Whether nothing was counted: all heads ran torch's SDPA."""
        return not self._sums[0].any() and self.impls == {DENSE}

    @property
    def tau(self) -> float | list[float | None] | None:
        """Of all heads; a list with one number per head where they differ; None where all are dense."""
        some = set(self.taus.values())
        return some.pop() if len(some) == 1 else [self.taus.get(head) for head in range(self.num_heads)] or None

    @property
    def rows(self) -> int:
        """Query rows per head, summed over sequences and forwards."""
        return int(self._sums[0].max()) if self.num_heads else 0

    def _means(self, sums: int) -> Tensor:
        return self._sums[sums] / self._sums[0].clamp(min=1)

    @property
    def key_slots_per_query(self) -> Tensor:
        """float64 (num_heads,): post-score key slots, BLOCK_N for each row of a retained tile."""
        return self._means(1)

    @property
    def visible_slots_per_query(self) -> Tensor:
        """float64 (num_heads,): the same count with every visible tile retained."""
        return self._means(2)

    @property
    def work_fraction(self) -> Tensor:
        """float64 (num_heads,): retained / visible slots; 1 where nothing is visible."""
        return (self.key_slots_per_query / self.visible_slots_per_query).where(self.visible_slots_per_query > 0, 1.0)

    @property
    def omitted_mass_bound_mean(self) -> Tensor:
        """float64 (num_heads,): certified upper bound of the probability left out, mean over rows."""
        return self._means(3)

    @property
    def omitted_mass_bound_p95(self) -> Tensor:
        """float64 (num_heads,): its 95th percentile over rows, rounded up by at most 5 %."""
        return _quantile(self._histogram)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, fit for JSON; lists have one number per query head, and are empty where all heads are dense."""
        figures = {
            "key_slots_per_query": self.key_slots_per_query,
            "visible_slots_per_query": self.visible_slots_per_query,
            "work_fraction": self.work_fraction,
            "omitted_mass_bound_mean": self.omitted_mass_bound_mean,
            "omitted_mass_bound_p95": self.omitted_mass_bound_p95,
        }
        return {
            "name": self.name,
            "index": self.index,
            "tau": self.tau,
            "impls": sorted(self.impls),
            "tiles": sorted(list(tile) for tile in self.tiles),
            "choices": [
                {"way": way, "reason": why, "calls": calls} for (way, why), calls in sorted(self.choices.items())
            ],
            "forwards": self.forwards,
            "support_bytes": self.support_bytes,
            "rows": self.rows,
            **{name: [] if self.is_dense else numbers.tolist() for name, numbers in figures.items()},
        }


def counted_slots(layers: Iterable[LayerWork]) -> tuple[float, float]:
    """Retained and visible key slots, summed over layers, heads and rows; dense heads are not counted."""
    sums = [layer._sums[1:3].sum(1) for layer in layers]
    retained, visible = torch.stack(sums).sum(0).tolist() if sums else (0.0, 0.0)
    return retained, visible


def _reduced(work: Work) -> tuple[Tensor, Tensor]:
    """Sums (4, num_heads) over rows of one call, and the histogram (num_heads, BINS) of its omitted-mass bounds."""
    rows = work.rows.sum(1).double()[:, None]  # (num_sequences, 1)
    slots, visible = ((x.double() * rows).sum(0) for x in (work.key_slots_per_query, work.visible_slots_per_query))
    bound = work.omitted_mass_bound.double()
    bound = (bound if bound.ndim == 2 else bound.transpose(0, 1).flatten(1)).contiguous()  # (num_heads, all rows)
    num_heads, places = bound.shape
    bins = torch.bucketize(bound, _bin_edges(bound.device)).clamp(max=BINS - 1)
    offsets = torch.arange(num_heads, device=bound.device)[:, None] * BINS
    histogram = torch.bincount((bins + offsets).flatten(), minlength=num_heads * BINS).view(num_heads, BINS)
    histogram[:, 0] -= places - rows.sum().long()  # places without a row (padding) hold a bound of 0
    sums = torch.stack([rows.sum().expand(num_heads), slots, visible, bound.sum(1)])
    return sums.cpu(), histogram.cpu()


def _quantile(histogram: Tensor) -> Tensor:
    """Upper edge of the bin that holds the quantile, for each head."""
    counts = histogram.cumsum(1)
    reached = counts >= (counts[:, -1:] * QUANTILE).ceil().clamp(min=1)
    return _bin_edges(histogram.device)[reached.int().argmax(1)]

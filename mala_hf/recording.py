# SPDX-License-Identifier: Apache-2.0
"""What MALA did in each layer and head of a model while a ``with`` block ran.

Each layer's work is reduced as it arrives: sums, and a histogram of the certificate for its 95th percentile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .ops import Work
from .ops.hf import DENSE, recorders

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

    Attributes:
        name: of the module in the model. index: its ``layer_idx``, or None.
        tau: None where the layer ran torch's SDPA, whose work is not counted.
        impls, tiles: what ran; several tiles where prefill and decode use their own.
        support_bytes: the most that one forward kept of its retained tiles until backward.
        rows: query rows, summed over sequences and forwards.
    """

    name: str
    index: int | None
    tau: float | None = None
    impls: set[str] = field(default_factory=set)
    tiles: set[tuple[int, int]] = field(default_factory=set)
    forwards: int = 0
    support_bytes: int = 0
    _sums: Tensor | None = field(
        default=None, repr=False
    )  # float64 (4, num_heads): rows, key slots, visible slots, bounds
    _histogram: Tensor | None = field(default=None, repr=False)  # int64 (num_heads, BINS)

    def add(self, work: Work | None, tau: float | None) -> None:
        """Add one forward of the layer; None for a dense one."""
        self.tau = tau
        self.forwards += 1
        if work is None:
            self.impls.add(DENSE)
            return
        self.impls.add(work.impl)
        self.tiles.add(work.tile)
        self.support_bytes = max(self.support_bytes, work.support_bytes)
        sums, histogram = _reduced(work)
        self._sums = sums if self._sums is None else self._sums + sums
        self._histogram = histogram if self._histogram is None else self._histogram + histogram

    @property
    def is_dense(self) -> bool:
        """Whether nothing was counted: the layer ran torch's SDPA."""
        return self._sums is None

    @property
    def rows(self) -> int:
        """Query rows per head."""
        return 0 if self._sums is None else int(self._sums[0, 0])

    def _means(self, sums: int) -> Tensor:
        return torch.zeros(0) if self._sums is None else self._sums[sums] / self._sums[0].clamp(min=1)

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
        return torch.zeros(0) if self._histogram is None else _quantile(self._histogram)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, fit for JSON; lists have one number per query head."""
        return {
            "name": self.name,
            "index": self.index,
            "tau": self.tau,
            "impls": sorted(self.impls),
            "tiles": sorted(list(tile) for tile in self.tiles),
            "forwards": self.forwards,
            "support_bytes": self.support_bytes,
            "rows": self.rows,
            "key_slots_per_query": self.key_slots_per_query.tolist(),
            "visible_slots_per_query": self.visible_slots_per_query.tolist(),
            "work_fraction": self.work_fraction.tolist(),
            "omitted_mass_bound_mean": self.omitted_mass_bound_mean.tolist(),
            "omitted_mass_bound_p95": self.omitted_mass_bound_p95.tolist(),
        }


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


class WorkReport:
    """What :func:`record_work` saw. ``print`` it for a table, :meth:`to_dict` for JSON."""

    def __init__(self) -> None:
        self._by_name: dict[str, LayerWork] = {}

    @property
    def layers(self) -> dict[int | str, LayerWork]:
        """By layer index; by module name where indices are missing or shared (encoder-decoder models)."""
        works = list(self._by_name.values())
        indices = [work.index for work in works]
        by_index = None not in indices and len(set(indices)) == len(indices)
        return {(work.index if by_index else work.name): work for work in works}  # type: ignore[misc]

    def add(self, name: str, index: int | None, work: Work | None, tau: float | None) -> None:
        """Add one layer's forward."""
        self._by_name.setdefault(name, LayerWork(name, index)).add(work, tau)

    @property
    def work_fraction(self) -> float:
        """Retained / visible slots over all counted layers, heads and rows."""
        counted = [work._sums for work in self._by_name.values() if work._sums is not None]
        if not counted:
            return 1.0
        retained, visible = (float(sum(sums[row].sum() for sums in counted)) for row in (1, 2))
        return retained / visible if visible else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts, fit for JSON."""
        return {"work_fraction": self.work_fraction, "layers": [work.to_dict() for work in self._by_name.values()]}

    def __str__(self) -> str:
        if not self._by_name:
            return "no attention layer of this model ran MALA"
        lines = [
            "post-score work per query row (key slots; score discovery not counted), omitted mass as certified upper bound",
            f"{'layer':>5} {'tau':>6} {'rows':>8} {'visible':>9} {'retained':>9} {'work':>6} {'bound':>8} {'P95':>8}  work by head, %",
        ]
        for key, work in self.layers.items():
            if work.is_dense:
                lines.append(f"{key!s:>5} {DENSE:>6}  dense, not counted")
                continue
            visible, retained = work.visible_slots_per_query.mean(), work.key_slots_per_query.mean()
            share = retained / visible if visible else 1.0
            heads = " ".join(f"{100 * fraction:.0f}" for fraction in work.work_fraction.tolist())
            lines.append(
                f"{key!s:>5} {work.tau:>6.3g} {work.rows:>8} {visible:>9.1f} {retained:>9.1f} {share:>6.1%} "
                f"{work.omitted_mass_bound_mean.mean():>8.2e} {work.omitted_mass_bound_p95.max():>8.2e}  {heads}"
            )
        tiles = sorted({tile for work in self._by_name.values() for tile in work.tiles})
        impls = sorted({impl for work in self._by_name.values() for impl in work.impls})
        kept = sum(work.support_bytes for work in self._by_name.values())
        lines.append(
            f"all: work {self.work_fraction:.1%}; tiles {', '.join(f'{m}x{n}' for m, n in tiles)}; {', '.join(impls)}"
            + (f"; {kept:,} bytes kept for backward" if kept else "")
        )
        return "\n".join(lines)


@contextmanager
def record_work(model: torch.nn.Module) -> Iterator[WorkReport]:
    """Count the work of ``model``'s layers inside a ``with`` block, over all its forwards (a generation's prefill and decoding too).

    Blocks may be nested, also for several models. Recomputation by gradient checkpointing may be counted or not.
    """
    names = {id(module): name for name, module in model.named_modules()}
    report = WorkReport()

    def listen(module: torch.nn.Module, work: Work | None, tau: float | None) -> None:
        if id(module) in names:
            report.add(names[id(module)], getattr(module, "layer_idx", None), work, tau)

    recorders.append(listen)
    try:
        yield report
    finally:
        recorders.remove(listen)

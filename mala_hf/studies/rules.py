# SPDX-License-Identifier: Apache-2.0
"""The rule and its relatives on the scores of a layer: other visiting orders, splits, normalizers, and a certificate that chooses tau.

They differ in what a tile's largest contribution is compared with; in all of them every row must agree to skip a tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ops.blockwise import retained_tiles
from ..ops.reference import log_threshold
from .scores import Scores, outcome

ORDERS = ("diagonal", "sink")
NORMALIZERS = ("evolving", "full")


@dataclass(frozen=True)
class Rule:
    """How tiles are chosen.

    Attributes:
        order: "diagonal": from the diagonal to earlier keys, the rule; "sink": the first tile of the sequence before all others.
        splits: parts of the visible tiles, each tested against its own normalizer, as a split decode or sharded keys would.
        normalizer: "evolving": the mass retained so far, the rule; "full": that of all visible keys, which no single pass knows.
        max_bound: None, or a bound on the omitted mass of every row: each query tile of each head takes the largest of ``taus``
            whose certificate keeps it in every row (the smallest if none does).
        taus: one for all; with ``max_bound`` a rising ladder.
        by_layer: tau of each layer, or of each of its heads, which win over ``taus``.
    """

    taus: tuple[float, ...] = (1.0,)
    order: str = "diagonal"
    splits: int = 1
    normalizer: str = "evolving"
    max_bound: float | None = None
    by_layer: dict[int, float | list[float]] | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS or self.normalizer not in NORMALIZERS or self.splits < 1:
            raise ValueError(
                f"a rule has an order of {ORDERS}, a normalizer of {NORMALIZERS} and at least 1 split, got {self}"
            )
        if (
            not self.taus
            or (len(self.taus) > 1) != (self.max_bound is not None)
            or list(self.taus) != sorted(self.taus)
        ):
            raise ValueError(f"a rule has one tau, or a rising ladder of them with max_bound, got {self.taus}")

    def to_dict(self) -> dict[str, Any]:
        """What differs from the canonical rule but tau, fit for JSON."""
        default = Rule()
        names = ("order", "splits", "normalizer", "max_bound")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}


def choose(scores: Scores, rule: Rule, layer: int = 0) -> Tensor:
    """Return bool (Q, H, T): the tiles that the rule retains."""
    if rule.max_bound is not None:
        return _certified(scores, rule, rule.max_bound)
    tau: float | list[float] = rule.taus[0] if rule.by_layer is None else rule.by_layer[layer]
    threshold = _threshold(scores, tau)  # (Q, H or 1, M)
    if rule.normalizer == "full":
        # above tau = 1 a row may have no key that reaches its limit: its largest is retained
        limit = torch.minimum(scores.lse + threshold, scores.tile_max.amax(-1))
        return ((scores.tile_max >= limit[..., None]) & (scores.tile_max != -math.inf)).any(2)
    if rule.splits == 1:
        return _evolving(scores.tile_max, scores.log_mass, threshold, rule.order)
    visible = scores.visible.sum(-1)  # (Q,) tiles, the first ones
    part = torch.arange(scores.tile_max.shape[-1], device=visible.device) // (
        -(-visible // rule.splits)[:, None]
    )  # (Q, T)
    found = torch.zeros_like(scores.tile_max[:, :, 0], dtype=torch.bool)
    for split in range(rule.splits):
        elsewhere = (part != split)[:, None, None]
        maxima, masses = (x.masked_fill(elsewhere, -math.inf) for x in (scores.tile_max, scores.log_mass))
        found |= _evolving(maxima, masses, threshold, rule.order)
    return found


def _threshold(scores: Scores, tau: float | list[float]) -> Tensor:
    """log(tau / L_q), (Q, 1, M), or (Q, H, M) for a list with a tau for each head."""
    if not isinstance(tau, list):
        return log_threshold(scores.visible_keys, tau).to(scores.lse)[:, None]
    return torch.stack([log_threshold(scores.visible_keys, one) for one in tau], 1).to(scores.lse)


def _evolving(tile_max: Tensor, log_mass: Tensor, threshold: Tensor, order: str) -> Tensor:
    """The rule on (Q, H, M, T) in a visiting order: bool (Q, H, T)."""
    count = tile_max.shape[-1]
    visits = torch.arange(count - 1, -1, -1, device=tile_max.device)
    if order == "sink":
        visits = visits.roll(1)  # 0, then from the last to 1
    maxima, masses = (x[..., visits][:, None] for x in (tile_max, log_mass))  # (Q, 1, H, M, T)
    before = torch.full_like(maxima[..., 0], -math.inf)
    retained, _ = retained_tiles(maxima, masses, before, threshold[:, None])
    return retained[:, 0, :, visits.argsort()]


def _certified(scores: Scores, rule: Rule, max_bound: float) -> Tensor:
    found = choose(scores, replace(rule, taus=rule.taus[:1], max_bound=None))
    for tau in rule.taus[1:]:
        retained = choose(scores, replace(rule, taus=(tau,), max_bound=None))
        holds = (outcome(scores, retained).bound <= max_bound).all(2)  # (Q, H)
        found = torch.where(holds[..., None], retained, found)
    return found


def backward_tiles(scores: Scores, retained: Tensor, tau: float) -> Tensor:
    """Bool (Q, H, T): what the backward retains after such a forward, whose final normalizer is that of ``retained`` (Q, H, T)."""
    lse = scores.log_mass.masked_fill(~retained[:, :, None], -math.inf).logsumexp(-1)
    limit = (lse + _threshold(scores, tau))[..., None]
    return ((scores.tile_max >= limit) & (scores.tile_max != -math.inf)).any(2) & retained

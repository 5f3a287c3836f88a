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
VISITED_AT_ONCE = 16  # tiles


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
    maxima, masses = scores.tile_max, scores.log_mass
    if rule.splits == 1:
        return _evolving(maxima[:, None], masses[:, None], threshold[:, None], rule.order)[:, 0]
    # each split's tiles, as many columns as the widest has: a query tile's splits are as wide as one another
    count = scores.tile_max.shape[-1]
    width = -(-scores.visible.sum(-1) // rule.splits)  # (Q,)
    column = torch.arange(int(width.max()), device=width.device)
    tile = torch.arange(rule.splits, device=width.device)[:, None] * width[:, None, None] + column  # (Q, S, W)
    inside = (column < width[:, None, None]) & (tile < count)
    tile = tile.where(inside, 0)

    def by_split(x: Tensor) -> Tensor:  # (Q, H, M, T) -> (Q, S, H, M, W)
        found = x.gather(-1, tile.flatten(1)[:, None, None].expand(-1, *x.shape[1:3], -1))
        found = found.unflatten(-1, tile.shape[1:]).movedim(-2, 1)
        return found.masked_fill(~inside[:, :, None, None], -math.inf)

    retained = _evolving(by_split(maxima), by_split(masses), threshold[:, None], rule.order)  # (Q, S, H, W)
    retained = (retained & inside[:, :, None]).movedim(1, 2).flatten(2).to(torch.int8)  # (Q, H, S * W)
    found = torch.zeros_like(maxima[:, :, 0], dtype=torch.int8)  # (Q, H, T)
    return found.scatter_reduce(-1, tile.flatten(1)[:, None].expand(retained.shape), retained, "amax") > 0


def _threshold(scores: Scores, tau: float | list[float]) -> Tensor:
    """log(tau / L_q), (Q, 1, M), or (Q, H, M) for a list with a tau for each head."""
    if not isinstance(tau, list):
        return log_threshold(scores.visible_keys, tau).to(scores.lse)[:, None]
    return torch.stack([log_threshold(scores.visible_keys, one) for one in tau], 1).to(scores.lse)


def _evolving(tile_max: Tensor, log_mass: Tensor, threshold: Tensor, order: str) -> Tensor:
    """The rule on (Q, S, H, M, T), S splits that know nothing of one another, in a visiting order: bool (Q, S, H, T).

    Some tiles at a time: the fixed point of few is found in few rounds, and those after them begin with what is then known.
    """
    count = tile_max.shape[-1]
    visits = torch.arange(count - 1, -1, -1, device=tile_max.device)
    if order == "sink":
        visits = visits.roll(1)  # 0, then from the last to 1
    before = torch.full_like(tile_max[..., 0], -math.inf)
    parts = []
    for some in visits.split(VISITED_AT_ONCE):
        retained, before = retained_tiles(tile_max[..., some], log_mass[..., some], before, threshold)
        parts.append(retained)
    return torch.cat(parts, -1)[..., visits.argsort()]


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

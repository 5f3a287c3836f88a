# SPDX-License-Identifier: Apache-2.0
"""Study 1: allocations of equal total post-score work, on the activations of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..full_attention import LayerCall
from .activations import observe
from .allocation import ALLOCATIONS, allocate, visible_tiles
from .figures import Figures
from .rules import Rule, choose
from .scores import outcome, scores_by_tile

Maps = tuple[Tensor, list[Tensor]]  # reference mass, and what the rule retains at each tau; (A, H, Q, T)


def tile_maps(model: Any, ids: Tensor, taus: Sequence[float], tile: tuple[int, int]) -> Maps:
    """Run ids (1, L) once with full attention: the mass of every tile, summed over rows, and the tiles that the rule retains."""
    key_tiles = ids.shape[1] // tile[1]
    masses: list[Tensor] = []
    retained: list[list[Tensor]] = [[] for _ in taus]

    def observer(layer: int, call: LayerCall) -> None:
        of_layer: list[list[Tensor]] = [[] for _ in range(len(taus) + 1)]
        for scores in scores_by_tile(call, tile):
            maps = [scores.mass.sum(2), *(choose(scores, Rule((tau,))) for tau in taus)]  # (Q, H, T)
            for parts, one in zip(of_layer, maps, strict=True):
                missing = key_tiles - one.shape[-1]
                parts.append(torch.nn.functional.pad(one, (0, missing)).transpose(0, 1))
        mass, *chosen = (torch.cat(parts, 1) for parts in of_layer)  # (H, Q, T)
        masses.append(mass)
        for parts, one in zip(retained, chosen, strict=True):
            parts.append(one)

    observe(model, ids, observer)
    return torch.stack(masses), [torch.stack(parts) for parts in retained]


def typical_budgets(model: Any, texts: Sequence[Tensor], taus: Sequence[float], tile: tuple[int, int]) -> list[Tensor]:
    """For each tau the mean over texts of how many tiles the rule retains, (A, H, Q)."""
    counts = [[one.sum(-1).double() for one in tile_maps(model, ids, taus, tile)[1]] for ids in texts]
    return [torch.stack(of_tau).mean(0) for of_tau in zip(*counts, strict=True)]


def matched_work(
    model: Any, ids: Tensor, taus: Sequence[float], tile: tuple[int, int], typical: Sequence[Tensor]
) -> list[dict[str, Any]]:
    """Return a row for each tau and allocation: work, and mean and P95 of omitted mass and output error over layers, heads and rows.

    typical: for each tau what ``typical_budgets`` gives of other texts. Every layer gets full attention's inputs.
    """
    visible = visible_tiles(ids.shape[1], tile)
    mass, by_tau = tile_maps(model, ids, taus, tile)
    chosen = {
        (tau, name): allocate(name, mass, retained, budgets, visible)
        for tau, retained, budgets in zip(taus, by_tau, typical, strict=True)
        for name in ALLOCATIONS
    }
    figures = {key: Figures() for key in chosen}
    places: dict[int, int] = {}  # of a layer among those with attention

    def observer(layer: int, call: LayerCall) -> None:
        place = places.setdefault(layer, len(places))
        for scores in scores_by_tile(call, tile):
            query_tiles, key_tiles = len(scores.p), scores.tile_max.shape[-1]
            some = slice(scores.first, scores.first + query_tiles)
            for key, maps in chosen.items():
                kept = maps[place, :, some, :key_tiles].transpose(0, 1)  # (Q, H, T)
                figures[key].add(layer, outcome(scores, kept))

    observe(model, ids, observer)
    return [{"tau": tau, "allocation": name, **figures[tau, name].to_dict()} for tau, name in chosen]

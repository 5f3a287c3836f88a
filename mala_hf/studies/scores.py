# SPDX-License-Identifier: Apache-2.0
"""A layer's scores by tile, and what full attention without some of the tiles is: any rule can be judged on them, fast or not.

All in float32, a few query tiles at a time, so that memory grows with the length and not with its square.

Letters in the shape comments: Q query tiles of M rows, H query heads, T key tiles of N keys in all, E value head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..full_attention import LayerCall

ELEMENTS = 1 << 26  # scores that exist at once: 256 MiB


@dataclass(frozen=True)
class Scores:
    """Some query tiles of a layer.

    Attributes:
        first: index of the first query tile.
        p: (Q, H, M, N) probabilities of full attention; 0 where a row may not see a key.
        out: (Q, H, M, E) full attention's output. v: (H, N, E).
        lse: (Q, H, M) its normalizer, in nats.
        tile_max, log_mass: (Q, H, M, T) largest score of a row in a tile, and log of its summed exponentials; -inf where it sees none.
        visible_keys: (Q, M) keys that a row sees. count: (Q, M, T) of them in each tile.
    """

    first: int
    p: Tensor
    out: Tensor
    v: Tensor
    lse: Tensor
    tile_max: Tensor
    log_mass: Tensor
    visible_keys: Tensor
    count: Tensor

    @property
    def visible(self) -> Tensor:
        """Bool (Q, T): whether a row of the query tile sees a key of the tile."""
        return (self.count > 0).any(1)

    @property
    def mass(self) -> Tensor:
        """(Q, H, M, T) probability that full attention gives each tile."""
        return torch.exp(self.log_mass - self.lse[..., None])


def scores_by_tile(call: LayerCall, tile: tuple[int, int]) -> Iterator[Scores]:
    """Yield the layer's query tiles in order.

    Raises ``ValueError`` for a window, softcap or sinks, and for a length that is not whole tiles.
    """
    (block_m, block_n), length, num_heads = tile, *call.q.shape[1:3]
    if call.window is not None or call.softcap or call.sinks is not None:
        raise ValueError("the studies are of plain causal attention, without a window, softcap or sinks")
    if length % block_m or length % block_n:
        raise ValueError(f"a length of {length} is not whole tiles of {block_m} x {block_n}")
    q, k, v = (x[0].detach().float().transpose(0, 1) for x in (call.q, call.k, call.v))  # (heads, L, dim)
    k, v = (x.repeat_interleave(num_heads // x.shape[0], 0) for x in (k, v))
    step = max(1, ELEMENTS // (num_heads * length * block_m)) * block_m
    for start in range(0, length, step):
        stop = min(start + step, length)
        seen = math.ceil(stop / block_n) * block_n
        yield _scores(call.softmax_scale * q[:, start:stop], k[:, :seen], v[:, :seen], start, tile)


def _scores(q: Tensor, k: Tensor, v: Tensor, start: int, tile: tuple[int, int]) -> Scores:
    """q (H, R, D) of the rows from ``start`` on, scaled; k (H, N, D), v (H, N, E)."""
    block_m, block_n = tile
    rows, keys = q.shape[1], k.shape[1]
    row = start + torch.arange(rows, device=q.device)
    legal = torch.arange(keys, device=q.device) <= row[:, None]  # (R, N)
    scores = (q @ k.transpose(1, 2)).masked_fill_(~legal, -math.inf)  # (H, R, N)
    by_tile = scores.unflatten(-1, (-1, block_n))  # (H, R, T, Bn)
    tile_max, log_mass, lse = by_tile.amax(-1), by_tile.logsumexp(-1), scores.logsumexp(-1)
    p = scores.sub_(lse[..., None]).exp_()

    def by_query_tile(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, block_m)).transpose(0, 1)  # (H, R, ..) -> (Q, H, M, ..)

    return Scores(
        first=start // block_m,
        p=by_query_tile(p),
        out=by_query_tile(p @ v),
        v=v,
        lse=by_query_tile(lse),
        tile_max=by_query_tile(tile_max),
        log_mass=by_query_tile(log_mass),
        visible_keys=(row + 1).view(-1, block_m),
        count=legal.unflatten(-1, (-1, block_n)).sum(-1).view(-1, block_m, keys // block_n),
    )


@dataclass(frozen=True)
class Outcome:
    """What full attention is without some tiles.

    Attributes:
        out: (Q, H, M, E), normalised over the keys that are left. error: (Q, H, M) its relative L2 distance from full attention.
        omitted: (Q, H, M) probability of the skipped keys. bound: (Q, H, M) the rule's certificate of it, c / (1 + c).
        slots, visible_slots: (H,) retained and visible key slots, summed over the rows of these query tiles.
    """

    out: Tensor
    error: Tensor
    omitted: Tensor
    bound: Tensor
    slots: Tensor
    visible_slots: Tensor


def outcome(scores: Scores, retained: Tensor) -> Outcome:
    """Keep the tiles bool (Q, H, T); a row that is left without any key gives zeros, and omits everything."""
    mass = scores.mass
    keep = retained[:, :, None]  # (Q, H, 1, T)
    skipped = scores.visible[:, None] & ~retained
    omitted = (mass * skipped[:, :, None]).sum(-1)
    kept = (mass * keep).sum(-1)  # not 1 - omitted, which rounds
    block_n = scores.p.shape[-1] // mass.shape[-1]
    p = scores.p * keep.repeat_interleave(block_n, -1)
    tiny = torch.finfo(kept.dtype).tiny
    out = _times_values(p, scores.v) / kept.clamp(min=tiny)[..., None]
    certificate = torch.exp(scores.tile_max - (scores.lse + kept.log())[..., None]) * scores.count[:, None]
    certificate = (certificate * skipped[:, :, None]).sum(-1)
    rows = scores.p.shape[2]
    return Outcome(
        out=out,
        error=(out - scores.out).norm(dim=-1) / scores.out.norm(dim=-1).clamp(min=tiny),
        omitted=omitted,
        bound=torch.where(kept > 0, certificate / (1 + certificate), 1.0),
        slots=(retained & scores.visible[:, None]).sum((0, 2)).double() * rows * block_n,
        visible_slots=scores.visible.sum().double().expand(len(scores.v)) * rows * block_n,
    )


def _times_values(p: Tensor, v: Tensor) -> Tensor:
    """(Q, H, M, N) times (H, N, E)."""
    query_tiles = len(p)
    return (p.transpose(0, 1).flatten(1, 2) @ v).unflatten(1, (query_tiles, -1)).transpose(0, 1)

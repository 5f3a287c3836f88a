# SPDX-License-Identifier: Apache-2.0
"""Decode in two passes, exact or from an INT8 plane, or in splits, vectorised in PyTorch: what it runs on without a GPU.

Shapes and letters as in ``blockwise``.

Here R are the rows of a tile, the tokens of all query heads of a KV head, token by token, and T its key tiles.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from .blockwise import BACKWARD_SLACK, FORWARD_SLACK, limit_of, retained_tiles
from .key_plane import KeyPlane, score_bounds
from .query_tile import NEG_INF, Settings, finite, log_threshold
from .visibility import Sequences, visible_range
from .work import RETAINED, SKIPPED

BOUND_SLACK = 2**10  # as the others, in units of the last place: of a row's sums, which a guarantee stands on


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settings: Settings,
    sequences: Sequences,
    sinks: Optional[Tensor],
    form: str,
    num_splits: int,
    key_plane: Optional[KeyPlane] = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, tiles, certificate as ``blockwise.forward``; ``settings.tile`` counts the tokens of one head."""
    batch, seqlen_q, num_heads, _ = q.shape
    kv_heads = k.shape[2]
    group = num_heads // kv_heads
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(batch, seqlen_q, num_heads, v.shape[-1])
    lse = q.new_full((batch, num_heads, seqlen_q), NEG_INF, dtype=compute)
    if sinks is not None:
        lse[:] = sinks.to(compute)[:, None]
    certificate = torch.zeros_like(lse)
    tiles = torch.zeros(batch, num_heads, *sequences.tile_grid(settings.tile), dtype=torch.int8, device=q.device)
    for _, b, (q_begin, q_end, k_begin, k_end) in sequences.groups():
        if q_end <= q_begin or k_end <= k_begin:
            continue
        k_heads, v_heads = (x[b, k_begin:k_end].transpose(1, 2) for x in (k, v))  # (B, K, N, D)
        plane = None if key_plane is None else tuple(x[b, :, k_begin:k_end] for x in key_plane.tensors)
        if plane is None:
            k_heads, v_heads = k_heads.to(compute), v_heads.to(compute)
        for index, start in enumerate(range(q_begin, q_end, settings.tile[0])):
            rows = slice(start, min(start + settings.tile[0], q_end))
            packed = (
                q[b, rows].unflatten(2, (kv_heads, group)).transpose(1, 2).flatten(2, 3).to(compute)
            )  # (B, K, R, D)
            legal, threshold = _visible(rows, k_end - k_begin, q_end, group, settings, packed)
            sink = None if sinks is None else sinks.to(compute).view(kv_heads, group).repeat(1, rows.stop - rows.start)
            if plane is None:
                lower = upper = _scores(packed, k_heads, settings).masked_fill(~legal, NEG_INF)
            else:
                bounds = score_bounds(packed, plane, settings.softmax_scale, settings.softcap)
                lower, upper = (x.masked_fill(~legal, NEG_INF) for x in bounds)
            if form == "split":
                retained, visible = _split(lower, threshold, num_splits, settings.tile[1])
            else:
                slack = FORWARD_SLACK if plane is None else BOUND_SLACK
                retained, visible = _two_pass(lower, upper, threshold, sink, settings.tile[1], slack)
            kept = _by_key(retained, settings.tile[1], upper.shape[-1])  # (B, K, 1, N)
            if plane is None:
                scores, values = lower.masked_fill(~kept, NEG_INF), v_heads
            else:
                keys, exists = _keys_of(retained, settings.tile[1], upper.shape[-1])  # (B, K, S)
                some_k, values = (_gathered(x, keys, exists).to(compute) for x in (k_heads, v_heads))
                seen = legal.expand(*keys.shape[:2], -1, -1).gather(
                    3, keys[:, :, None].expand(-1, -1, legal.shape[0], -1)
                )
                scores = _scores(packed, some_k, settings).masked_fill(~(seen & exists[:, :, None]), NEG_INF)
            row_lse = torch.logsumexp(scores, -1)  # (B, K, R)
            if sink is not None:
                row_lse = torch.logaddexp(row_lse, sink)
            shift = finite(row_lse)[..., None]

            def of_heads(x: Tensor) -> Tensor:
                return x.unflatten(2, (-1, group)).transpose(2, 3).flatten(1, 2)  # (B, H, tokens, ...)

            out[b, rows] = of_heads(torch.exp(scores - shift) @ values).transpose(1, 2).to(out.dtype)
            lse[b, :, rows] = of_heads(row_lse)
            omitted = torch.exp(upper - shift).where(~kept, 0)
            certificate[b, :, rows] = of_heads(_omitted(omitted, upper != NEG_INF, form, settings.tile[1]))
            codes = visible * torch.where(retained, RETAINED, SKIPPED)  # (B, K, T)
            tiles[b, :, index, : codes.shape[-1]] = codes.repeat_interleave(group, 1).to(torch.int8)
    return out, lse, tiles, certificate


def _visible(
    rows: slice, seqlen_k: int, q_end: int, group: int, settings: Settings, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Legal pairs (R, N), and log(tau / L_q) (R,)."""
    position = torch.arange(rows.start, rows.stop, device=like.device) + seqlen_k - q_end
    low, high = (x.repeat_interleave(group) for x in visible_range(position, seqlen_k, settings.window))
    keys = torch.arange(seqlen_k, device=like.device)
    legal = (keys >= low[:, None]) & (keys < high[:, None])
    return legal, log_threshold(high - low, settings.tau).to(like.dtype)


def _scores(packed: Tensor, k: Tensor, settings: Settings) -> Tensor:
    """(B, K, R, N)."""
    scores = (packed * settings.softmax_scale) @ k.mT
    return settings.softcap * torch.tanh(scores / settings.softcap) if settings.softcap else scores


def _by_key(tiles: Tensor, block_n: int, seqlen_k: int) -> Tensor:
    """(B, K, T) -> (B, K, 1, N)."""
    return tiles.repeat_interleave(block_n, -1)[:, :, None, :seqlen_k]


def _keys_of(tiles: Tensor, block_n: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """The keys of each head's tiles, (B, K, S), S the most of any head; and which of them exist."""
    count = tiles.sum(-1)
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., : int(count.max())]  # (B, K, most)
    exists = torch.arange(order.shape[-1], device=tiles.device) < count[..., None]
    keys = (order[..., None] * block_n + torch.arange(block_n, device=tiles.device)).flatten(2)
    return keys.clamp(max=seqlen_k - 1), exists.repeat_interleave(block_n, -1) & (keys < seqlen_k)


def _gathered(x: Tensor, keys: Tensor, exists: Tensor) -> Tensor:
    """Rows ``keys`` (B, K, S) of (B, K, N, D), zero where there is none."""
    return x.gather(2, keys[..., None].expand(-1, -1, -1, x.shape[-1])).masked_fill(~exists[..., None], 0)


def _by_tile(x: Tensor, block_n: int, fill: float) -> Tensor:
    """(..., N) -> (..., T, BLOCK_N)."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % block_n), value=fill).unflatten(-1, (-1, block_n))


def _two_pass(
    lower: Tensor, upper: Tensor, threshold: Tensor, sink: Optional[Tensor], block_n: int, slack: int
) -> tuple[Tensor, Tensor]:
    """Retained and visible tiles, bool (B, K, T), of scores that lie between ``lower`` and ``upper`` (B, K, R, N)."""
    full = torch.logsumexp(lower, -1)  # (B, K, R)
    if sink is not None:
        full = torch.logaddexp(full, sink)
    tile_max = _by_tile(upper, block_n, NEG_INF).amax(-1)  # (B, K, R, T)
    legal = tile_max != NEG_INF  # a NaN votes
    largest = tile_max.amax(-1)

    def reaching(mass: Tensor, slack: int) -> Tensor:
        limit = torch.minimum(limit_of(mass, threshold, slack), largest)
        return (~(tile_max < limit[..., None]) & legal).any(2)

    tile_mass = _by_tile(lower, block_n, NEG_INF).logsumexp(-1)
    kept = tile_mass.where(reaching(full, BACKWARD_SLACK)[:, :, None], NEG_INF).logsumexp(-1)
    if sink is not None:
        kept = torch.logaddexp(kept, sink)
    return reaching(kept, slack), legal.any(2)


def _split(scores: Tensor, threshold: Tensor, num_splits: int, block_n: int) -> tuple[Tensor, Tensor]:
    """The rule within each of ``num_splits`` equal parts of the tiles with visible keys, later tiles first."""
    by_tile = _by_tile(scores, block_n, NEG_INF)[:, :, None]  # (B, K, 1, R, T, Bn): one group, whose rows vote together
    tile_max, log_mass = by_tile.amax(-1), by_tile.logsumexp(-1)
    legal = (tile_max != NEG_INF).any(3)[:, :, 0]  # (B, K, T)
    seen = torch.nonzero(legal.flatten(0, 1).any(0))[:, 0].tolist()
    retained = torch.zeros_like(legal)
    first, last = (seen[0], seen[-1] + 1) if seen else (0, 0)
    per_split = math.ceil((last - first) / num_splits)
    for start in range(first, last, max(per_split, 1)):
        part = slice(start, min(start + per_split, last))
        before = torch.full_like(tile_max[..., 0], NEG_INF)
        found, _ = retained_tiles(tile_max[..., part].flip(-1), log_mass[..., part].flip(-1), before, threshold)
        retained[..., part] = found[:, :, 0].flip(-1)
    return retained, legal


def _omitted(omitted: Tensor, legal: Tensor, form: str, block_n: int) -> Tensor:
    """(B, K, R): the sum in two passes, (legal keys) x (largest) of each skipped tile in splits."""
    if form != "split":
        return omitted.sum(-1)
    return (_by_tile(omitted, block_n, 0).amax(-1) * _by_tile(legal, block_n, False).sum(-1)).sum(-1)

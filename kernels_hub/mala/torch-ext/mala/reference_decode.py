# SPDX-License-Identifier: Apache-2.0
"""The rule for a few new tokens over a long cache, executable. The query heads of a KV head share a tile, and so its fate.

Three forms of the test "is the largest contribution of this tile below tau / L_q in each of its rows":

- two_pass: of the mass of the tiles that pass the same test against the full normalizer (all visible keys, and the sink). So every
  skipped key has less than tau / L_q of the retained mass, as in the rule, and of full attention, however the keys are split. The
  full normalizer alone would not do: beside one key with half of the mass, every other key of an even rest has less than 1 / L_q.
  A row's largest key is always retained, so no row is ever empty.
- int8_two_pass: the same from an INT8 plane of the keys (``key_plane.py``) and its residuals, which give a lower and an upper bound of
  every score. A tile is tested with its upper bounds, against a mass made of lower bounds: what it skips has less than tau / L_q of
  the mass that is retained. Exact keys and values are read of retained tiles alone.
- split: of what the tile's own split of the keys has retained so far, later keys first; the splits are merged by their lse.

Letters in the shape comments: R = rows, tokens x query heads of a KV head, token by token; N = seqlen_k, D = head_dim, E = value
head_dim, Bm x Bn = one tile.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from .key_plane import KeyPlane, score_bounds
from .reference import NOT_VISIBLE, RETAINED, SKIPPED, HeadResult, forward_head, legal_pairs, log_threshold, scores_of


def two_pass_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    legal: Tensor,
    *,
    tau: float,
    softmax_scale: float,
    tile: tuple[int, int],
    softcap: float = 0.0,
    sink: Optional[Tensor] = None,
    plane: Optional[tuple[Tensor, Tensor, Tensor]] = None,
) -> HeadResult:
    """q (R, D), k (N, D), v (N, E), legal bool (R, N), tile (Bm, Bn), sink a scalar or (R,). lse is that of the retained keys.

    plane: quantized (N, D), scales (N,), residuals (N,) of k, for the form int8_two_pass. Without, the certificate is exact: omitted
    mass = c / (1 + c); with one it is what the omitted mass can be at most.
    """
    if plane is None:
        lower = upper = scores_of(q, k, softmax_scale, softcap).masked_fill(~legal, -math.inf)  # (R, N)
    else:
        lower, upper = (x.masked_fill(~legal, -math.inf) for x in score_bounds(q, plane, softmax_scale, softcap))
    threshold = log_threshold(legal.sum(1), tau).to(q)  # (R,)
    full = _with_sink(torch.logsumexp(lower, 1), sink)  # (R,)
    first = _reaching(upper, torch.minimum(full + threshold, upper.amax(1)), tile)  # bool (q_tiles, k_tiles)
    kept = _with_sink(
        torch.logsumexp(lower.masked_fill(~_by_key(first, lower.shape, tile), -math.inf), 1), sink
    )  # (R,)
    # a row's largest key is always retained: tau above 1, or a large sink, would leave a row without any
    tiles, margin = _tested(upper, torch.minimum(kept + threshold, upper.amax(1)), tile)
    retained = _by_key(tiles == RETAINED, lower.shape, tile).to(q.device)  # bool (R, N)
    if plane is None:
        scores = lower
    else:
        needed = retained.any(0)[:, None]  # (N, 1)
        k, v = k.where(needed, 0), v.where(needed, 0)
        scores = scores_of(q, k, softmax_scale, softcap).masked_fill(~legal, -math.inf)
    lse = _with_sink(torch.logsumexp(scores.masked_fill(~retained, -math.inf), 1), sink)  # (R,)
    shift = torch.where(lse != -math.inf, lse, 0)[:, None]
    p = torch.exp(scores - shift)  # (R, N)
    return HeadResult((p * retained) @ v, lse, tiles, torch.exp(upper - shift).where(~retained, 0).sum(1), margin)


def _with_sink(mass: Tensor, sink: Optional[Tensor]) -> Tensor:
    return mass if sink is None else torch.logaddexp(mass, sink.expand_as(mass))


def _tested(upper: Tensor, limit: Tensor, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The map of tiles (q_tiles, k_tiles), and by how much each was decided; ``upper`` (R, N) against ``limit`` (R,)."""
    block_m, block_n = tile
    q_tiles, k_tiles = math.ceil(upper.shape[0] / block_m), math.ceil(upper.shape[1] / block_n)
    tiles = torch.full((q_tiles, k_tiles), NOT_VISIBLE, dtype=torch.int8)
    margin = torch.full((q_tiles, k_tiles), -math.inf, dtype=upper.dtype)
    for q_tile in range(q_tiles):
        rows = slice(q_tile * block_m, (q_tile + 1) * block_m)
        for k_tile in range(k_tiles):
            keys = slice(k_tile * block_n, (k_tile + 1) * block_n)
            tile_max = upper[rows, keys].amax(1)  # (Bm,)
            constrains = tile_max != -math.inf  # (Bm,); a NaN does
            if not constrains.any():
                continue
            margin[q_tile, k_tile] = (tile_max - limit[rows])[constrains].amax()
            retained = not (tile_max < limit[rows])[constrains].all()
            tiles[q_tile, k_tile] = RETAINED if retained else SKIPPED
    return tiles, margin


def _reaching(scores: Tensor, limit: Tensor, tile: tuple[int, int]) -> Tensor:
    """bool (q_tiles, k_tiles): some row of the tile has a key that reaches its limit (R,)."""
    block_m, block_n = tile
    reaches = (~(scores < limit[:, None])) & (scores != -math.inf)  # a NaN does
    padded = torch.nn.functional.pad(reaches, (0, -scores.shape[1] % block_n, 0, -scores.shape[0] % block_m))
    return padded.unflatten(1, (-1, block_n)).unflatten(0, (-1, block_m)).any(-1).any(1)


def _by_key(tiles: Tensor, shape: torch.Size, tile: tuple[int, int]) -> Tensor:
    """A map of tiles as one of (rows, keys)."""
    return tiles.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[: shape[0], : shape[1]]


def split_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    legal: Tensor,
    *,
    num_splits: int,
    tau: float,
    softmax_scale: float,
    tile: tuple[int, int],
    softcap: float = 0.0,
    sink: Optional[Tensor] = None,
) -> HeadResult:
    """Arguments as :func:`two_pass_head`. ``num_splits`` equal parts of the tiles with visible keys.

    ``tau / L_q`` counts the full context, and the sink joins at the merge.
    """
    block_m, block_n = tile
    visible_keys = legal.sum(1)  # (R,)
    visible = torch.nonzero(legal.any(0))[:, 0]  # keys
    first, last = (int(visible[0]) // block_n, int(visible[-1]) // block_n + 1) if len(visible) else (0, 0)
    per_split = math.ceil((last - first) / num_splits)
    starts = [min(first + i * per_split, last) * block_n for i in range(num_splits + 1)]
    parts = [
        forward_head(
            q, k[lo:hi], v[lo:hi], legal[:, lo:hi],
            tau=tau, softmax_scale=softmax_scale, tile=tile, softcap=softcap, visible_keys=visible_keys,
        )
        for lo, hi in zip(starts, starts[1:])
        if lo < hi
    ]  # fmt: skip
    q_tiles, k_tiles = math.ceil(len(q) / block_m), math.ceil(len(k) / block_n)
    tiles = torch.full((q_tiles, k_tiles), NOT_VISIBLE, dtype=torch.int8)
    margin = torch.full((q_tiles, k_tiles), -math.inf, dtype=q.dtype)
    lse = torch.stack([part.lse for part in parts] or [q.new_full((len(q),), -math.inf)])  # (splits, R)
    merged = _with_sink(torch.logsumexp(lse, 0), sink)  # (R,)
    weights = torch.exp(lse - torch.where(merged != -math.inf, merged, 0))  # (splits, R)
    out, certificate = q.new_zeros(len(q), v.shape[1]), q.new_zeros(len(q))
    for weight, part in zip(weights, parts):
        out += weight[:, None] * part.out
        certificate += weight * part.certificate
    if parts:
        tiles[:, first:last], margin[:, first:last] = (
            torch.cat([getattr(part, name) for part in parts], 1) for name in ("tiles", "margin")
        )
    return HeadResult(out, merged, tiles, certificate, margin)


def decode_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settings,
    sequences,
    sinks: Optional[Tensor],
    form: str,
    num_splits: int,
    key_plane: Optional[KeyPlane] = None,
):
    """out, lse, tiles, certificate of a whole call, as ``reference.forward_sequences``; ``settings.tile`` counts tokens of one head."""
    batch, seqlen_q, num_heads, _ = q.shape
    num_kv_heads = k.shape[2]
    group = num_heads // num_kv_heads
    tokens, block_n = settings.tile
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(batch, seqlen_q, num_heads, v.shape[-1])
    lse = q.new_full((batch, num_heads, seqlen_q), -math.inf, dtype=compute)
    if sinks is not None:
        lse[:] = sinks.to(compute)[:, None]
    certificate = torch.zeros_like(lse)
    tiles = torch.zeros(batch, num_heads, *sequences.tile_grid(settings.tile), dtype=torch.int8, device=q.device)
    bounds = [sequences.common] * batch if sequences.bounds is None else sequences.bounds.tolist()
    numbers = {"tau": settings.tau, "softmax_scale": settings.softmax_scale, "softcap": settings.softcap}
    for b, (q_begin, q_end, k_begin, k_end) in enumerate(bounds):
        if q_end <= q_begin or k_end <= k_begin:
            continue
        visible = legal_pairs(q_end - q_begin, k_end - k_begin, settings.window).to(q.device)
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            head_k, head_v = (x[b, k_begin:k_end, kv_head].to(compute) for x in (k, v))
            for index, start in enumerate(range(q_begin, q_end, tokens)):
                rows = slice(start, min(start + tokens, q_end))
                packed = q[b, rows, heads].flatten(0, 1).to(compute)  # (R, D)
                legal = visible[start - q_begin : rows.stop - q_begin].repeat_interleave(group, 0)
                of_tile = {**numbers, "tile": (len(packed), block_n)}
                if sinks is not None:
                    of_tile["sink"] = sinks[heads].to(compute).repeat(rows.stop - start)
                if form == "split":
                    result = split_head(packed, head_k, head_v, legal, num_splits=num_splits, **of_tile)
                else:
                    if key_plane is not None:
                        of_tile["plane"] = tuple(x[b, kv_head, k_begin:k_end] for x in key_plane.tensors)
                    result = two_pass_head(packed, head_k, head_v, legal, **of_tile)
                out[b, rows, heads] = result.out.unflatten(0, (-1, group)).to(out.dtype)
                lse[b, heads, rows] = result.lse.unflatten(0, (-1, group)).T
                certificate[b, heads, rows] = result.certificate.unflatten(0, (-1, group)).T
                tiles[b, heads, index, : result.tiles.shape[1]] = result.tiles[0].to(tiles.device)
    return out, lse, tiles, certificate

# SPDX-License-Identifier: Apache-2.0
"""The MALA rule, executable: one head, tile by tile, plain PyTorch.

    for each query tile, key tiles from the diagonal toward earlier keys:
        tile_max = max over the legal keys of the tile                       # one number per row
        retained = any row:  exp(tile_max - row_max) / row_sum >= tau / visible_keys
        if retained: the ordinary online-softmax step on row_max, row_sum, acc
    out = acc / row_sum,   lse = row_max + log(row_sum)

A row whose tile_max is -inf has no legal key there and does not constrain. A row's first legal tile finds row_sum = 0 and is
retained. Backward repeats the test with the final lse in place of row_max + log(row_sum). Everything else in this package
computes the same thing faster; this file is what it is compared with. (The blockwise form multiplies the values of skipped tiles by
zero instead of not reading them, so it wants them finite.)

Letters in the shape comments: M = seqlen_q, N = seqlen_k, D = head_dim, E = value head_dim, Bm x Bn = one tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

NOT_VISIBLE, SKIPPED, RETAINED = 0, 1, 2


@dataclass
class HeadResult:
    """One head's forward: out (M, E), lse (M,), tiles int8 (q_tiles, k_tiles), certificate (M,), margin (q_tiles, k_tiles).

    ``margin`` is the largest ``tile_max - limit`` over the constraining rows (nats): retained where it is not negative.
    """

    out: Tensor
    lse: Tensor
    tiles: Tensor
    certificate: Tensor
    margin: Tensor


def legal_pairs(
    seqlen_q: int, seqlen_k: int, window: tuple[int, int] = (-1, -1), mask: Optional[Tensor] = None
) -> Tensor:
    """Bool (M, N): may row i see key j. Row i is aligned with key i + N - M; ``window`` counts keys left and right of it (-1: all).

    Causal attention is ``window=(left, 0)``.
    """
    position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q  # (M, 1)
    key = torch.arange(seqlen_k)[None, :]  # (1, N)
    left, right = window
    legal = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        legal &= key >= position - left
    if right >= 0:
        legal &= key <= position + right
    return legal if mask is None else legal & mask.cpu()


def scores_of(q: Tensor, k: Tensor, softmax_scale: float, softcap: float) -> Tensor:
    """Scaled logits (M, N), before masking."""
    scores = softmax_scale * (q @ k.T)
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def log_threshold(visible_keys: Tensor, tau: float) -> Tensor:
    """log(tau / L_q), capped at 0 (tau / L_q = 1); -inf for tau = 0, which skips nothing. visible_keys (M,)."""
    return torch.log((tau / visible_keys.clamp(min=1)).clamp(max=1.0))


def forward_head(
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
    visible_keys: Optional[Tensor] = None,
) -> HeadResult:
    """One head: q (M, D), k (N, D), v (N, E), legal bool (M, N), sink a scalar. Computes in the dtype of q (float32 or float64).

    ``visible_keys`` (M,) is given where ``legal`` shows only a part of the context (a split).
    """
    (seqlen_q, _), seqlen_k, (block_m, block_n) = q.shape, len(k), tile
    scores = scores_of(q, k, softmax_scale, softcap).masked_fill(~legal, -math.inf)  # (M, N)
    limit_offset = log_threshold(legal.sum(1) if visible_keys is None else visible_keys, tau).to(q)  # (M,)
    q_tiles, k_tiles = math.ceil(seqlen_q / block_m), math.ceil(seqlen_k / block_n)
    tiles = torch.full((q_tiles, k_tiles), NOT_VISIBLE, dtype=torch.int8)
    margin = torch.full((q_tiles, k_tiles), -math.inf, dtype=q.dtype)
    out, lse, certificate = q.new_zeros(seqlen_q, v.shape[1]), q.new_zeros(seqlen_q), q.new_zeros(seqlen_q)

    for q_tile in range(q_tiles):
        rows = slice(q_tile * block_m, min((q_tile + 1) * block_m, seqlen_q))
        row_max = torch.full_like(lse[rows], -math.inf)  # (Bm,)
        row_sum = torch.zeros_like(row_max)  # (Bm,)
        acc = torch.zeros_like(out[rows])  # (Bm, E)
        skipped = []  # (n_T, tile_max) of each skipped tile
        for k_tile in reversed(range(k_tiles)):  # from the diagonal toward earlier keys
            keys = slice(k_tile * block_n, min((k_tile + 1) * block_n, seqlen_k))
            tile_scores = scores[rows, keys]  # (Bm, Bn)
            tile_max = tile_scores.amax(1)  # (Bm,)
            constrains = tile_max != -math.inf  # (Bm,); a NaN does
            if not constrains.any():
                continue
            limit = row_max + torch.log(row_sum) + limit_offset[rows]  # (Bm,)
            margin[q_tile, k_tile] = (tile_max - limit)[constrains].amax()
            if (tile_max < limit)[constrains].all():
                tiles[q_tile, k_tile] = SKIPPED
                skipped.append((legal[rows, keys].sum(1), tile_max))
                continue
            tiles[q_tile, k_tile] = RETAINED
            new_max = torch.maximum(row_max, tile_max)  # (Bm,)
            shift = torch.where(new_max != -math.inf, new_max, 0)
            weights = torch.exp(tile_scores - shift[:, None])  # (Bm, Bn)
            decay = torch.exp(row_max - shift)  # (Bm,)
            row_sum = row_sum * decay + weights.sum(1)
            acc = acc * decay[:, None] + weights @ v[keys]
            row_max = new_max
        row_lse = row_max + torch.log(row_sum)  # (Bm,)
        if sink is not None:  # joins the normalizer after the last tile
            row_lse = torch.logaddexp(row_lse, sink.expand_as(row_lse))
        shift = torch.where(row_lse != -math.inf, row_lse, 0)
        out[rows] = acc * torch.exp(torch.where(row_max != -math.inf, row_max, 0) - shift)[:, None]
        lse[rows] = row_lse
        for count, tile_max in skipped:
            certificate[rows] += count * torch.exp(tile_max - shift)
    return HeadResult(out, lse, tiles, certificate, margin)


def backward_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    legal: Tensor,
    out: Tensor,
    lse: Tensor,
    do: Tensor,
    *,
    tau: float,
    softmax_scale: float,
    tile: tuple[int, int],
    softcap: float = 0.0,
    sink: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq (M, D), dk (N, D), dv (N, E), dsink (), retained bool (q_tiles, k_tiles) of one head, from the forward's out and lse."""
    (seqlen_q, _), seqlen_k, (block_m, block_n) = q.shape, len(k), tile
    scores = scores_of(q, k, softmax_scale, softcap).masked_fill(~legal, -math.inf)  # (M, N)
    rounding = (
        8 * torch.finfo(lse.dtype).eps * (1 + lse.abs())
    )  # a tile at the limit is retained: equal scores put all there
    limit = lse + log_threshold(legal.sum(1), tau).to(q) - rounding  # (M,)
    lse = torch.where(lse != -math.inf, lse, 0)
    delta = (out * do).sum(1)  # (M,)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    q_tiles, k_tiles = math.ceil(seqlen_q / block_m), math.ceil(seqlen_k / block_n)
    retained = torch.zeros(q_tiles, k_tiles, dtype=torch.bool)
    for q_tile in range(q_tiles):
        rows = slice(q_tile * block_m, min((q_tile + 1) * block_m, seqlen_q))
        for k_tile in range(k_tiles):
            keys = slice(k_tile * block_n, min((k_tile + 1) * block_n, seqlen_k))
            tile_scores = scores[rows, keys]  # (Bm, Bn)
            tile_max = tile_scores.amax(1)  # (Bm,)
            if not (~(tile_max < limit[rows]) & (tile_max != -math.inf)).any():
                continue
            retained[q_tile, k_tile] = True
            p = torch.exp(tile_scores - lse[rows, None])  # (Bm, Bn)
            dv[keys] += p.T @ do[rows]
            ds = p * (do[rows] @ v[keys].T - delta[rows, None])  # (Bm, Bn)
            if softcap:  # d tanh(x) = 1 - tanh(x)^2; p = 0 where illegal, so any finite value serves there
                ds = ds * (1 - (tile_scores.masked_fill(~legal[rows, keys], 0) / softcap) ** 2)
            dq[rows] += softmax_scale * ds @ k[keys]
            dk[keys] += softmax_scale * ds.T @ q[rows]
    dsink = q.new_zeros(()) if sink is None else -(torch.exp(sink - lse) * delta).sum()
    return dq, dk, dv, dsink, retained


def full_attention_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    legal: Tensor,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    sink: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Full attention of one head: out (M, E), lse (M,), p (M, N). Rows that see nothing give zeros."""
    scores = scores_of(q, k, softmax_scale, softcap).masked_fill(~legal, -math.inf)  # (M, N)
    lse = torch.logsumexp(scores, 1)  # (M,)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.expand_as(lse))
    p = torch.exp(scores - torch.where(lse != -math.inf, lse, 0)[:, None])  # (M, N)
    return p @ v, lse, p


def omitted_mass_head(p: Tensor, tiles: Tensor, tile: tuple[int, int]) -> Tensor:
    """Exact probability of the keys in skipped tiles, per row (M,), from full attention's p (M, N) and a tile map."""
    skipped = (tiles == SKIPPED).repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
    return (p * skipped[: p.shape[0], : p.shape[1]]).sum(1)


def _heads(q: Tensor, k: Tensor, settings, sequences, mask: Optional[Tensor]):
    """Every (sequence, batch index, head, kv_head, rows, keys, legal) of a call on (batch, seqlen, heads, head_dim) tensors.

    ``settings`` and ``sequences`` are those of the public functions; rows and keys are the slices that the sequence owns.
    """
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    bounds = [sequences.common] * sequences.num_sequences if sequences.bounds is None else sequences.bounds.tolist()
    if mask is not None:
        mask = mask.expand(q.shape[0], num_heads, q.shape[1], k.shape[1])
    for sequence, (q_begin, q_end, k_begin, k_end) in enumerate(bounds):
        b = 0 if sequences.is_packed else sequence
        rows, keys = slice(q_begin, q_end), slice(k_begin, k_end)
        if q_end <= q_begin or k_end <= k_begin:
            continue
        for head in range(num_heads):
            head_mask = None if mask is None else mask[b, head, rows, keys]
            legal = legal_pairs(q_end - q_begin, k_end - k_begin, settings.window, head_mask).to(q.device)
            yield sequence, b, head, head // (num_heads // num_kv_heads), rows, keys, legal


def _numbers(settings, sinks: Optional[Tensor], head: int, dtype: torch.dtype) -> dict:
    return {
        "tau": settings.tau,
        "softmax_scale": settings.softmax_scale,
        "tile": settings.tile,
        "softcap": settings.softcap,
        "sink": None if sinks is None else sinks[head].to(dtype),
    }


def forward_sequences(
    q: Tensor, k: Tensor, v: Tensor, settings, sequences, sinks: Optional[Tensor], mask: Optional[Tensor]
):
    """out, lse, tiles, certificate of a whole call, head by head; float32, or float64 for float64 inputs."""
    batch, seqlen_q, num_heads, _ = q.shape
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(batch, seqlen_q, num_heads, v.shape[-1])
    lse = q.new_full((batch, num_heads, seqlen_q), -math.inf, dtype=compute)
    if sinks is not None:
        lse[:] = sinks.to(compute)[:, None]
    certificate = torch.zeros_like(lse)
    grid = sequences.tile_grid(settings.tile)
    tiles = torch.zeros(sequences.num_sequences, num_heads, *grid, dtype=torch.int8, device=q.device)
    for sequence, b, head, kv_head, rows, keys, legal in _heads(q, k, settings, sequences, mask):
        head_q, head_k, head_v = (
            x[b, part, h].to(compute) for x, part, h in ((q, rows, head), (k, keys, kv_head), (v, keys, kv_head))
        )
        result = forward_head(head_q, head_k, head_v, legal, **_numbers(settings, sinks, head, compute))
        out[b, rows, head] = result.out.to(out.dtype)
        lse[b, head, rows] = result.lse
        certificate[b, head, rows] = result.certificate
        tiles[sequence, head, : result.tiles.shape[0], : result.tiles.shape[1]] = result.tiles
    return out, lse, tiles, certificate


def backward_sequences(q, k, v, out, lse, do, settings, sequences, sinks, mask):
    """dq, dk, dv, dsinks, tiles of a whole call, head by head."""
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    dq, dk, dv = (torch.zeros_like(x, dtype=compute) for x in (q, k, v))
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=compute)
    grid = sequences.tile_grid(settings.tile)
    tiles = torch.zeros(sequences.num_sequences, q.shape[2], *grid, dtype=torch.int8, device=q.device)
    for sequence, b, head, kv_head, rows, keys, legal in _heads(q, k, settings, sequences, mask):
        head_q, head_k, head_v = (
            x[b, part, h].to(compute) for x, part, h in ((q, rows, head), (k, keys, kv_head), (v, keys, kv_head))
        )
        row_out, row_do, row_lse = (
            out[b, rows, head].to(compute),
            do[b, rows, head].to(compute),
            lse[b, head, rows].to(compute),
        )
        numbers = _numbers(settings, sinks, head, compute)
        head_dq, head_dk, head_dv, dsink, retained = backward_head(
            head_q, head_k, head_v, legal, row_out, row_lse, row_do, **numbers
        )
        dq[b, rows, head] = head_dq
        dk[b, keys, kv_head] += head_dk
        dv[b, keys, kv_head] += head_dv
        if dsinks is not None:
            dsinks[head] += dsink
        visible = torch.nn.functional.pad(
            legal, (0, -legal.shape[1] % settings.tile[1], 0, -legal.shape[0] % settings.tile[0])
        )
        visible = visible.unflatten(1, (-1, settings.tile[1])).unflatten(0, (-1, settings.tile[0])).any(-1).any(1)
        found = torch.where(retained.to(visible.device), RETAINED, SKIPPED) * visible
        tiles[sequence, head, : found.shape[0], : found.shape[1]] = found.to(torch.int8)
    dsinks = None if dsinks is None else dsinks.to(sinks.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, tiles

# SPDX-License-Identifier: Apache-2.0
"""The MALA rule vectorised over batch, heads and rows, in PyTorch: what models run on without a GPU.

Memory is that of one query tile times KEYS_PER_CHUNK keys, besides float32 copies of 16-bit inputs and one row of tiles of a mask.
The rule is sequential in the key tiles: whether a tile is retained depends on the mass retained before it. ``retained_tiles`` solves
that recurrence as a fixed point: start from "all retained", test every tile against the normalizer that the current guess gives it,
repeat until nothing changes. After n rounds the first n tiles in visiting order are certainly right, so the fixed point is unique and
is the rule's answer; two or three rounds are usual.

Letters in the shape comments: B batch, K num_kv_heads, G query heads per KV head, M rows, T key tiles, N keys of a chunk.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from .query_tile import NEG_INF, QueryTile, Settings, finite, grouped_mask, heads_first, query_tiles
from .support_bits import pack_support, unpack_support
from .visibility import Sequences
from .work import RETAINED, SKIPPED

# in units of the last place; the forward's is the larger, so that the backward's support stays inside the forward's
FORWARD_SLACK, BACKWARD_SLACK = 32, 8


def limit_of(normalizer: Tensor, threshold: Tensor, slack: int) -> Tensor:
    """A row's limit, less what rounding may add: a tile at its limit is retained, as all are in the backward of equal scores."""
    return normalizer + threshold - slack * torch.finfo(normalizer.dtype).eps * (1 + normalizer.abs())


def retained_tiles(
    tile_max: Tensor, log_mass: Tensor, log_before: Tensor, threshold: Tensor, known: Optional[Tensor] = None
) -> tuple[Tensor, Tensor]:
    """The rule over tiles in visiting order.

    Args:
        tile_max, log_mass: (B, K, G, M, T) row maximum and log of the summed exponentials of each tile; -inf where nothing is legal.
        log_before: (B, K, G, M) log normalizer retained before the first of these tiles.
        threshold: (..., M) log(tau / L_q).
        known: bool (B, K, G, T), the answer where an earlier call found it.

    Returns:
        bool (B, K, G, T) and the log normalizer (B, K, G, M) after the last of them.
    """
    legal = tile_max != NEG_INF  # a NaN votes
    visible = legal.any(3)
    retained = visible if known is None else known
    while True:
        retained_mass = log_mass.where(retained[..., None, :], NEG_INF)
        normalizer = torch.cat([log_before[..., None], retained_mass], -1).logcumsumexp(-1)  # (B, K, G, M, 1 + T)
        if known is not None:
            return known, normalizer[..., -1]
        passes = ~(tile_max < limit_of(normalizer[..., :-1], threshold[..., None], FORWARD_SLACK)) & legal
        update = passes.any(3)
        if torch.equal(update, retained):
            return retained, normalizer[..., -1]
        retained = update


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settings: Settings,
    sequences: Sequences,
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
    save_support: bool = False,
    support: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Optional[Tensor]]:
    """out, lse, tiles, certificate, support of q (batch, seqlen_q, H, D), k, v; in float32 (float64 for float64 inputs).

    Returns out like q with v's head_dim, lse and certificate (batch, H, seqlen_q) in the computing dtype, tiles int8
    (num_sequences, H, q_tiles, k_tiles), and with ``save_support`` the retained ones as int32 (num_sequences, H, q_tiles, words).
    ``support``: what an earlier call on the same inputs saved; the same bits come out without the search for it.
    """
    batch, seqlen_q, num_heads, _ = q.shape
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    block_m, block_n = settings.tile
    out = q.new_zeros(batch, seqlen_q, num_heads, v.shape[-1])
    lse = q.new_full((batch, num_heads, seqlen_q), NEG_INF, dtype=compute)
    if sinks is not None:
        lse[:] = sinks.to(compute)[:, None]
    certificate = torch.zeros_like(lse)
    grid = math.ceil(sequences.max_seqlen_q / block_m), math.ceil(sequences.max_seqlen_k / block_n)
    tiles = torch.zeros(sequences.num_sequences, num_heads, *grid, dtype=torch.int8, device=q.device)
    known = None if support is None else unpack_support(support, grid[1])
    for seq, b, (q_begin, q_end, k_begin, k_end) in sequences.groups():
        if q_end <= q_begin or k_end <= k_begin:
            continue
        kv_heads = k.shape[2]
        q_heads = heads_first(q[b, q_begin:q_end], kv_heads).to(compute)
        k_heads, v_heads = (x[b, k_begin:k_end].transpose(1, 2).to(compute) for x in (k, v))
        group_mask = grouped_mask(
            None if mask is None else mask[b if mask.shape[0] > 1 else slice(0, 1)], kv_heads, seqlen_q
        )
        group_mask = None if group_mask is None else group_mask[..., q_begin:q_end, :]
        for index, rows in enumerate(query_tiles(q_end - q_begin, block_m)):
            tile = QueryTile(q_heads, k_heads, (q_end - q_begin, k_end - k_begin), rows, settings, group_mask)
            of_tile = tiles[seq, :, index].unflatten(1, (kv_heads, -1))
            known_of_tile = None if known is None else known[seq, :, index].unflatten(1, (kv_heads, -1))
            tile_out, tile_lse, tile_certificate = _forward_tile(tile, v_heads, of_tile, known_of_tile)
            if sinks is not None:
                with_sink = torch.logaddexp(tile_lse, sinks.to(compute).view(kv_heads, -1, 1))
                tile_out *= torch.exp(finite(tile_lse) - finite(with_sink))[..., None]
                tile_certificate *= torch.exp(finite(tile_lse) - finite(with_sink))
                tile_lse = with_sink
            where = slice(q_begin + rows.start, q_begin + rows.stop)
            out[b, where] = tile_out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(out.dtype)
            lse[b, :, where] = tile_lse.flatten(1, 2)
            certificate[b, :, where] = tile_certificate.flatten(1, 2)
    return out, lse, tiles, certificate, pack_support(tiles == RETAINED) if save_support else None


def _forward_tile(tile: QueryTile, v: Tensor, tiles: Tensor, known: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, K, G, M, E), lse and certificate (B, K, G, M) of one query tile; writes its row of ``tiles`` (B, K, G, k_tiles).

    ``known``: the retained ones among them, if they are.
    """
    block_n = tile.settings.tile[1]
    shape = tile.q.shape[:4]
    out = v.new_zeros(*shape, v.shape[-1])
    lse, certificate = v.new_full(shape, NEG_INF), v.new_zeros(shape)
    for start, stop in tile.chunks:
        scores, legal = tile.scores(start, stop)
        scores = tile.by_tile(scores, NEG_INF)  # (B, K, G, M, T, Bn)
        tile_max = scores.amax(-1)  # (B, K, G, M, T)
        weights = scores.sub_(finite(tile_max)[..., None]).exp_()
        log_mass = tile_max + weights.sum(-1).log()
        first = start // block_n
        known_here = None if known is None else known[..., first : first + tile_max.shape[-1]].flip(-1)
        retained, new_lse = retained_tiles(tile_max.flip(-1), log_mass.flip(-1), lse, tile.threshold, known_here)
        retained = retained.flip(-1)  # (B, K, G, T)
        visible = (tile_max != NEG_INF).any(3)
        tiles[..., first : first + retained.shape[-1]] = (
            torch.where(retained, RETAINED, SKIPPED).to(torch.int8) * visible
        )

        contribution = torch.exp(tile_max - finite(new_lse)[..., None])  # (B, K, G, M, T)
        decay = torch.exp(lse - finite(new_lse))
        skipped = contribution.masked_fill(retained[..., None, :], 0)
        count = block_n if legal is None else tile.by_tile(legal, 0).sum(-1)
        certificate = certificate * decay + (skipped * count).sum(-1)
        weights *= contribution.where(retained[..., None, :], 0)[..., None]
        p = weights.flatten(-2)[..., : stop - start].flatten(2, 3)  # (B, K, G * M, N)
        out = out * decay[..., None] + (p @ v[:, :, start:stop]).view_as(out)
        lse = new_lse
    return out, lse, certificate


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    do: Tensor,
    settings: Settings,
    sequences: Sequences,
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
    support: Optional[Tensor] = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[Tensor], Tensor]:
    """dq, dk, dv, dsinks and tiles: scores are recomputed and tested against the final lse, so the support lies inside that of a
    forward with the same rounding.

    ``support``: the forward's; no other tile is tested then, which changes no gradient. ``needs``: of dq, of dk and dv, of dsinks;
    what nobody needs is None. ``tiles`` is 0 where a tile was not tested.
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    block_m, block_n = settings.tile
    kv_heads = k.shape[2]
    needs_dq, needs_dkv, needs_dsinks = needs
    dq = q.new_zeros(q.shape)
    dk, dv = (x.new_zeros(x.shape, dtype=compute) for x in (k, v))
    grid = math.ceil(sequences.max_seqlen_q / block_m), math.ceil(sequences.max_seqlen_k / block_n)
    tiles = torch.zeros(sequences.num_sequences, q.shape[2], *grid, dtype=torch.int8, device=q.device)
    forwards = None if support is None else unpack_support(support, grid[1])
    dsinks = q.new_zeros(q.shape[2], dtype=compute)
    lse = lse.to(compute)
    delta = (out.to(compute) * do.to(compute)).sum(-1).transpose(1, 2)  # (batch, H, seqlen_q)
    for seq, b, (q_begin, q_end, k_begin, k_end) in sequences.groups():
        if q_end <= q_begin or k_end <= k_begin:
            continue
        q_heads, do_heads = (heads_first(x[b, q_begin:q_end], kv_heads).to(compute) for x in (q, do))
        k_heads, v_heads = (x[b, k_begin:k_end].transpose(1, 2).to(compute) for x in (k, v))
        dk_heads, dv_heads = (x[b, k_begin:k_end].transpose(1, 2) for x in (dk, dv))
        group_mask = grouped_mask(
            None if mask is None else mask[b if mask.shape[0] > 1 else slice(0, 1)], kv_heads, q.shape[1]
        )
        group_mask = None if group_mask is None else group_mask[..., q_begin:q_end, :]
        for index, rows in enumerate(query_tiles(q_end - q_begin, block_m)):
            where = slice(q_begin + rows.start, q_begin + rows.stop)
            tile = QueryTile(q_heads, k_heads, (q_end - q_begin, k_end - k_begin), rows, settings, group_mask)
            row_lse, row_delta = (x[b, :, where].unflatten(1, (kv_heads, -1)) for x in (lse, delta))  # (B, K, G, M)
            tile_do = do_heads[:, :, :, rows].flatten(2, 3)  # (B, K, G * M, E)
            tile_dq = torch.zeros_like(tile.q)
            for start, stop in tile.chunks if needs_dq or needs_dkv else ():
                of_chunk = seq, slice(None), index, slice(start // block_n, math.ceil(stop / block_n))
                if forwards is not None and not forwards[of_chunk].any():
                    continue
                scores, _ = tile.scores(start, stop)
                tile_max = tile.by_tile(scores, NEG_INF).amax(-1)  # (B, K, G, M, T)
                tested = tile_max != NEG_INF
                if forwards is not None:
                    tested &= forwards[of_chunk].unflatten(1, (kv_heads, -1))[..., None, :]
                limit = limit_of(row_lse, tile.threshold, BACKWARD_SLACK)[..., None]
                retained = (~(tile_max < limit) & tested).any(3)  # (B, K, G, T)
                tiles[of_chunk] = (
                    (torch.where(retained, RETAINED, SKIPPED) * tested.any(3)).to(torch.int8).flatten(1, 2)
                )
                keep = retained.repeat_interleave(block_n, -1)[..., None, : stop - start]
                p = torch.exp(scores - finite(row_lse)[..., None]) * keep  # (B, K, G, M, N)
                if needs_dkv:
                    dv_heads[:, :, start:stop] += p.flatten(2, 3).mT @ tile_do
                dp = (tile_do @ v_heads[:, :, start:stop].mT).view_as(p)
                ds = p * (dp - row_delta[..., None])
                if settings.softcap:
                    ds = ds * (1 - (finite(scores) / settings.softcap) ** 2)
                ds = ds.flatten(2, 3)  # (B, K, G * M, N)
                if needs_dq:
                    tile_dq += (ds @ k_heads[:, :, start:stop]).view_as(tile_dq)
                if needs_dkv:
                    dk_heads[:, :, start:stop] += ds.mT @ tile.q.flatten(2, 3)  # tile.q carries softmax_scale
            dq[b, where] = (tile_dq * settings.softmax_scale).permute(0, 3, 1, 2, 4).flatten(2, 3).to(dq.dtype)
            if sinks is not None and needs_dsinks:
                sink_mass = torch.exp(sinks.to(compute).view(kv_heads, -1, 1) - finite(row_lse))
                dsinks -= (sink_mass * row_delta).sum((0, 3)).flatten()
    return (
        dq if needs_dq else None,
        dk.to(k.dtype) if needs_dkv else None,
        dv.to(v.dtype) if needs_dkv else None,
        dsinks.to(sinks.dtype) if sinks is not None and needs_dsinks else None,
        tiles,
    )

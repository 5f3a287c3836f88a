# SPDX-License-Identifier: Apache-2.0
"""Discovery in INT8: which tiles may be retained, found at a fraction of the cost of exact scores, and certified.

1. Keys less their mean are quantised once per key tile, with the largest norms of what is kept and of what is lost.
2. A program quantises its query rows, computes their first tiles exactly, which every row retains, and with that normalizer passes
   over the other key tiles in INT8. The normalizer only grows from there, and the quantisation error is bounded by norms:

       q k <= q_hat k_hat + |e_q| |k_hat| + (|q_hat| + |e_q|) |e_k|        (q = q_hat + e_q, k = mean + k_hat + e_k)

   A tile whose bound stays below the limit in every row would be skipped by the exact test too; all others are candidates.

Masks are not looked at: a key that is not visible can only add candidates. The candidates, one bit per tile as in ``support``, go to
the forward, which tests them exactly in the rule's order: out, lse and the retained tiles are those of a search through all tiles.
"""

from __future__ import annotations

import contextlib
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blockwise import Settings
from .rule import FORWARD_SLACK, limit_of, log2_threshold
from .support import empty_support, set_bit
from .tile_config import DiscoveryConfig, padded_head_dim
from .tile_steps import LOG2_E, key_range, legal_pairs, load_tile
from .visibility import Sequences

LARGEST = tl.constexpr(127.0)
COLUMNS = tl.constexpr(32)
# of a float32 product of 16-bit numbers, per term, relative to the product of norms
PRODUCT_ROUNDING = tl.constexpr(2.0**-23)
# of the float32 arithmetic on bounds and of the running normalizer, in log2 units and relative
BOUND_ROUNDING = tl.constexpr(2.0**-14)
RUNTIME_VALUES = [
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "q_begin", "seqlen_q", "seqlen_k",
    "num_q_tiles", "num_k_tiles", "num_heads", "num_kv_heads", "num_kv_groups", "words", "window_left", "window_right",
    "scale_log2", "tau",
]  # fmt: skip


@triton.jit
def _either(a, b):
    return a | b


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def quantize_keys_kernel(
    k_ptr, mean_ptr, quantized_ptr, norms_ptr, stride_kb, stride_ks, stride_kh, seqlen_k, num_k_tiles, num_kv_heads,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One key tile: int8 (BLOCK_N, BLOCK_D), and its scale, largest |k_hat|, largest |e_k| and largest |k|."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (keys < seqlen_k)[:, None] & (offs_d < HEAD_DIM)[None, :]
    base = batch.to(tl.int64) * stride_kb + head.to(tl.int64) * stride_kh
    k = tl.load(k_ptr + base + keys.to(tl.int64)[:, None] * stride_ks + offs_d[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    head_index = batch * num_kv_heads + head
    mean = tl.load(mean_ptr + head_index * HEAD_DIM + offs_d, mask=offs_d < HEAD_DIM, other=0.0)
    centred = tl.where(mask, k - mean[None, :], 0.0)
    scale = tl.maximum(tl.max(tl.max(tl.abs(centred), 1), 0), 1e-30) / LARGEST
    quantized = tl.floor(centred / scale + 0.5)
    kept = quantized * scale
    lost = centred - kept
    tile_index = head_index.to(tl.int64) * num_k_tiles + tile
    rows = tile_index * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(quantized_ptr + rows[:, None] * BLOCK_D + offs_d[None, :], quantized.to(tl.int8))
    norms = norms_ptr + tile_index * 4
    tl.store(norms, scale)
    tl.store(norms + 1, tl.sqrt(tl.max(tl.sum(kept * kept, 1), 0)))
    tl.store(norms + 2, tl.sqrt(tl.max(tl.sum(lost * lost, 1), 0)))
    tl.store(norms + 3, tl.sqrt(tl.max(tl.sum(k * k, 1), 0)))


@triton.jit
def _row_norms(q_ptr, mean_ptr, rows, row_exists, stride_qs, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Per row: INT8 scale, q mean, |q|, |q_hat|, |e_q|; and |mean|. A few columns at a time: whole rows would spill."""
    columns = tl.arange(0, COLUMNS)
    q_rows = q_ptr + rows[:, None] * stride_qs
    largest = tl.zeros([rows.shape[0]], tl.float32)
    for start in tl.range(0, BLOCK_D, COLUMNS):
        mask = row_exists[:, None] & (start + columns < HEAD_DIM)[None, :]
        q = tl.load(q_rows + (start + columns)[None, :], mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(q), 1))
    scale = tl.maximum(largest, 1e-30) / LARGEST
    of_mean = tl.zeros_like(scale)
    norm = tl.zeros_like(scale)
    kept_norm = tl.zeros_like(scale)
    lost_norm = tl.zeros_like(scale)
    mean_norm = 0.0
    for start in tl.range(0, BLOCK_D, COLUMNS):
        mask = row_exists[:, None] & (start + columns < HEAD_DIM)[None, :]
        q = tl.load(q_rows + (start + columns)[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + start + columns, mask=start + columns < HEAD_DIM, other=0.0)
        kept = tl.floor(q / scale[:, None] + 0.5) * scale[:, None]
        lost = q - kept
        of_mean += tl.sum(q * mean[None, :], 1)
        norm += tl.sum(q * q, 1)
        kept_norm += tl.sum(kept * kept, 1)
        lost_norm += tl.sum(lost * lost, 1)
        mean_norm += tl.sum(mean * mean, 0)
    return scale, of_mean, tl.sqrt(norm), tl.sqrt(kept_norm), tl.sqrt(lost_norm), tl.sqrt(mean_norm)


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def discover_kernel(
    q_ptr, k_ptr, mean_ptr, quantized_ptr, norms_ptr, candidates_ptr, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    q_begin, seqlen_q, seqlen_k, num_q_tiles, num_k_tiles, num_heads, num_kv_groups, words, window_left, window_right, scale_log2, tau,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """GROUP neighbouring query tiles of one head: a bit for each key tile that may be retained."""
    num_groups = tl.cdiv(seqlen_q, GROUP * BLOCK_M)
    program = tl.program_id(0)
    q_tile_index = (num_groups - 1 - program % num_groups) * GROUP  # the longest rows first
    head = (program // num_groups) % num_heads
    batch = program // num_groups // num_heads
    num_kv_heads = num_heads // num_kv_groups
    kv_head = head // num_kv_groups
    start_m = q_tile_index * BLOCK_M
    offs_m = start_m + tl.arange(0, GROUP * BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row_exists = offs_m < seqlen_q
    position = offs_m + seqlen_k - seqlen_q
    batch64 = batch.to(tl.int64)
    q_base = batch64 * stride_qb + head.to(tl.int64) * stride_qh
    k_base = batch64 * stride_kb + kv_head.to(tl.int64) * stride_kh
    rows = (q_begin + offs_m).to(tl.int64)
    q_tile = tl.load(q_ptr + q_base + rows[:, None] * stride_qs + offs_d[None, :],
                     mask=row_exists[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)  # fmt: skip

    low, high, _, _, row_low, row_high = key_range(
        start_m, position, seqlen_q, seqlen_k, window_left, window_right, GROUP * BLOCK_M, HAS_LEFT, HAS_RIGHT
    )
    first = low // BLOCK_N
    last = tl.cdiv(high, BLOCK_N)
    # a query tile's first tiles hold the nearest key of some row each, so all of them are retained
    own_tile = q_tile_index + tl.arange(0, GROUP * BLOCK_M) // BLOCK_M
    nearest = seqlen_k - 1 + tl.zeros_like(position)
    if HAS_RIGHT:
        nearest = tl.minimum(nearest, own_tile * BLOCK_M + seqlen_k - seqlen_q + window_right)
    own_first_seed = tl.maximum(nearest, 0) // BLOCK_N
    first_seed = tl.maximum(tl.min(own_first_seed, 0), first)
    row_max = tl.full([GROUP * BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP * BLOCK_M], tl.float32)
    head_index = batch64 * num_heads + head
    q_tiles = q_tile_index + tl.arange(0, GROUP)
    candidate_rows = candidates_ptr + (head_index * num_q_tiles + q_tiles) * words
    farthest = last - 1 + tl.zeros_like(q_tiles)  # the last tile that a row of each query tile sees
    if HAS_RIGHT:
        farthest = tl.minimum(farthest, ((q_tiles + 1) * BLOCK_M - 1 + seqlen_k - seqlen_q + window_right) // BLOCK_N)
    for tile in range(first_seed, last):
        start_n = tile * BLOCK_N
        k_tile = load_tile(k_ptr, k_base, batch, kv_head, 0, start_n, seqlen_k, offs_d, stride_ks, HEAD_DIM, True, False,
                           BLOCK_N, BLOCK_D)  # fmt: skip
        scores = tl.dot(q_tile, k_tile.T)
        legal = legal_pairs(
            (start_n + tl.arange(0, BLOCK_N))[None, :], position[:, None], offs_m[:, None], row_exists[:, None], seqlen_k,
            k_ptr, 0, window_left, window_right, HAS_LEFT, HAS_RIGHT, False,
        )  # fmt: skip
        scores = tl.where(legal & (tile >= own_first_seed)[:, None], scores * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)
        row_max = new_max
        set_bit(candidate_rows, tile, (q_tiles < num_q_tiles) & (tile <= farthest))

    q_scale, of_mean, norm, kept_norm, lost_norm, mean_norm = _row_norms(
        q_ptr + q_base,
        mean_ptr + (batch * num_kv_heads + kv_head) * HEAD_DIM,
        rows,
        row_exists,
        stride_qs,
        HEAD_DIM,
        BLOCK_D,
    )
    # a row asks for more than ``needed`` from q_hat k_hat, less what each key tile's norms may add
    limit = limit_of(row_max + tl.log2(row_sum), log2_threshold(row_high - row_low, tau), row_exists, FORWARD_SLACK)
    needed = (limit - BOUND_ROUNDING * (1.0 + tl.abs(limit))) / scale_log2 - of_mean
    needed = needed - BOUND_ROUNDING * norm * mean_norm
    needed = tl.where(row_exists, needed / q_scale, float("inf"))
    per_kept = (1.0 + BOUND_ROUNDING) * lost_norm / q_scale
    per_lost = (1.0 + BOUND_ROUNDING) * (kept_norm + lost_norm) / q_scale
    per_norm = HEAD_DIM * PRODUCT_ROUNDING * norm / q_scale

    q_tile = tl.load(q_ptr + q_base + rows[:, None] * stride_qs + offs_d[None, :],
                     mask=row_exists[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
    q_int8 = tl.floor(q_tile.to(tl.float32) / q_scale[:, None] + 0.5).to(tl.int8)
    kv_tiles = (batch64 * num_kv_heads + kv_head) * num_k_tiles
    key_rows = tl.arange(0, BLOCK_N)
    found = tl.zeros([GROUP * BLOCK_M], tl.int32)
    for tile in tl.range(first, first_seed):
        k_tile = tl.load(quantized_ptr + ((kv_tiles + tile) * BLOCK_N + key_rows)[:, None] * BLOCK_D + offs_d[None, :])
        norms = norms_ptr + (kv_tiles + tile) * 4
        k_scale = tl.load(norms)
        bound = needed - per_kept * tl.load(norms + 1) - per_lost * tl.load(norms + 2) - per_norm * tl.load(norms + 3)
        largest = tl.max(tl.dot(q_int8, k_tile.T), 1).to(tl.float32)
        found |= tl.where(largest * k_scale < bound, 0, 1) << (tile % 32)  # a NaN is a candidate
        if (tile % 32 == 31) | (tile == first_seed - 1):
            of_tiles = tl.reduce(tl.reshape(found, [GROUP, BLOCK_M]), 1, _either)
            tl.atomic_or(candidate_rows + tile // 32, of_tiles, mask=q_tiles < num_q_tiles, sem="relaxed")
            found = tl.zeros([GROUP * BLOCK_M], tl.int32)


def supports(q: Tensor, settings: Settings, sequences: Sequences, has_mask: bool) -> bool:
    """Does INT8 discovery cover this call?"""
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and sequences.bounds is None
        and not has_mask
        and settings.softcap == 0
        and settings.tau > 0
    )


def launch_discover(q: Tensor, k: Tensor, settings: Settings, sequences: Sequences, config: DiscoveryConfig) -> Tensor:
    """Candidates, int32 (batch, num_heads, q_tiles, words), of q (batch, seqlen_q, num_heads, head_dim) and k."""
    batch, _, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    block_m, block_n = settings.tile
    block_d = padded_head_dim(head_dim)
    num_q_tiles, num_k_tiles = sequences.tile_grid(settings.tile)
    q_begin, q_end, _, seqlen_k = sequences.common
    candidates = empty_support(sequences, num_heads, settings.tile, q.device)
    mean = k.mean(1, dtype=torch.float32).contiguous()  # (batch, num_kv_heads, head_dim)
    quantized = torch.empty(batch, num_kv_heads, num_k_tiles * block_n, block_d, dtype=torch.int8, device=q.device)
    norms = torch.empty(batch, num_kv_heads, num_k_tiles, 4, dtype=torch.float32, device=q.device)
    group = max(config.rows // block_m, 1)
    left, right = settings.window
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        quantize_keys_kernel[(num_k_tiles, num_kv_heads, batch)](
            k, mean, quantized, norms, *k.stride()[:3], seqlen_k, num_k_tiles, num_kv_heads,
            HEAD_DIM=head_dim, BLOCK_N=block_n, BLOCK_D=block_d, num_warps=8,
        )  # fmt: skip
        q_tiles = math.ceil((q_end - q_begin) / block_m)
        discover_kernel[(math.ceil(q_tiles / group) * num_heads * batch,)](
            q, k, mean, quantized, norms, candidates, *q.stride()[:3], *k.stride()[:3], q_begin, q_end - q_begin, seqlen_k,
            num_q_tiles, num_k_tiles, num_heads, num_heads // num_kv_heads, candidates.shape[-1], left, right,
            settings.softmax_scale * LOG2_E.value, settings.tau, HEAD_DIM=head_dim, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
            GROUP=group, HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return candidates

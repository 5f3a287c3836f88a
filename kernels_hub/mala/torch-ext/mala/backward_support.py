# SPDX-License-Identifier: Apache-2.0
"""Which tiles the backward retains: scored again (all, or those that the forward saved) and tested with the final lse.

They are written down twice, by query tile and by key tile, for the gradient kernels to walk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .program_order import longest_first
from .rule import BACKWARD_SLACK, limit_of, log2_threshold, reaches_limit
from .support import load_words, next_bit, set_bit
from .tile_steps import LOG2_E, key_range, legal_pairs, score_tile

# fmt: off
RUNTIME_VALUES = [
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
    "stride_ob", "stride_os", "stride_oh", "stride_gb", "stride_gs", "stride_gh", "stride_mb", "stride_mh", "stride_ms",
    "stride_nb", "stride_nh", "q_begin", "q_end", "k_begin", "k_end", "total_q", "total_k",
    "num_q_tiles", "num_k_tiles", "units_at_once", "num_heads", "num_kv_groups", "window_left", "window_right",
    "softmax_scale", "softcap_log2", "tau",
]
# fmt: on


@triton.jit
def sequence_bounds(bounds_ptr, sequence, q_begin, q_end, k_begin, k_end, HAS_BOUNDS: tl.constexpr):
    """The sequence's own bounds where there are such, else those that all share."""
    if HAS_BOUNDS:
        q_begin = tl.load(bounds_ptr + sequence * 4)
        q_end = tl.load(bounds_ptr + sequence * 4 + 1)
        k_begin = tl.load(bounds_ptr + sequence * 4 + 2)
        k_end = tl.load(bounds_ptr + sequence * 4 + 3)
    return q_begin, q_end, k_begin, k_end


@triton.jit
def _retains(q_tile, k, k_base, batch, kv_head, k_begin, tile, seqlen_k, position, row_exists, mask_base, stride_ms, limit,
             whole_low, whole_high, window_left, window_right, stride_ks, scale_log2, softcap_log2,
             HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
             USE_TMA: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr,
             HAS_SOFTCAP: tl.constexpr, DOT_PRECISION: tl.constexpr):  # fmt: skip
    """(GROUP,) bool: which of the neighbouring query tiles retain key tile ``tile``; rows that do not exist retain nothing."""
    start_n = tile * BLOCK_N
    scores = score_tile(q_tile, k, k_base, batch, kv_head, k_begin, start_n, seqlen_k, stride_ks, scale_log2, softcap_log2,
                        HEAD_DIM, BLOCK_N, BLOCK_D, True, USE_TMA, HAS_SOFTCAP, DOT_PRECISION)  # fmt: skip
    if (start_n < whole_low) | (start_n + BLOCK_N > whole_high) | HAS_MASK:
        legal = legal_pairs(
            (start_n + tl.arange(0, BLOCK_N))[None, :], position[:, None], tl.arange(0, GROUP * BLOCK_M)[:, None],
            row_exists[:, None], seqlen_k, mask_base, stride_ms, window_left, window_right, HAS_LEFT, HAS_RIGHT, HAS_MASK,
        )  # fmt: skip
        scores = tl.where(legal, scores, float("-inf"))
    to_log2 = 1.0 if HAS_SOFTCAP else scale_log2
    reaches = reaches_limit(tl.max(scores, 1) * to_log2, limit) & row_exists
    return tl.max(tl.reshape(reaches.to(tl.int32), [GROUP, BLOCK_M]), 1) > 0


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def backward_support_kernel(
    q_ptr, k, lse_ptr, saved_ptr, by_query_ptr, by_key_ptr, mask_ptr, visible_ptr, bounds_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_mb, stride_mh, stride_ms, stride_nb, stride_nh,
    q_begin, q_end, k_begin, k_end, total_q, num_q_tiles, num_k_tiles,
    units_at_once, num_heads, num_kv_groups, window_left, window_right, softmax_scale, softcap_log2, tau,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, USE_TMA: tl.constexpr, IS_PACKED: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_SAVED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):  # fmt: skip
    """GROUP neighbouring query tiles of one head: the key tiles with exp(tile max - lse) >= tau / L_q in some row."""
    num_groups = tl.cdiv(num_q_tiles, GROUP)
    place, unit = longest_first(num_groups, units_at_once)
    q_tile_index = (num_groups - 1 - place) * GROUP  # late rows see the most keys
    head = unit % num_heads
    sequence = unit // num_heads
    kv_head = head // num_kv_groups
    q_begin, q_end, k_begin, k_end = sequence_bounds(bounds_ptr, sequence, q_begin, q_end, k_begin, k_end, HAS_BOUNDS)
    seqlen_q = q_end - q_begin
    seqlen_k = k_end - k_begin
    start_m = q_tile_index * BLOCK_M
    if start_m >= seqlen_q:
        return

    offs_m = start_m + tl.arange(0, GROUP * BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row_exists = offs_m < seqlen_q
    rows = (q_begin + offs_m).to(tl.int64)
    position = offs_m + seqlen_k - seqlen_q
    batch = 0 if IS_PACKED else sequence
    batch64 = tl.cast(batch, tl.int64)
    head64 = head.to(tl.int64)
    row_base = (batch64 * num_heads + head) * total_q
    q_base = (batch64 * stride_qb + head64 * stride_qh) * STRIDE_UNIT
    k_base = (batch64 * stride_kb + kv_head.to(tl.int64) * stride_kh) * STRIDE_UNIT
    q_tile = tl.load(q_ptr + q_base + rows[:, None] * (stride_qs * STRIDE_UNIT) + offs_d[None, :],
                     mask=row_exists[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
    low, high, whole_low, whole_high, row_low, row_high = key_range(
        start_m, position, seqlen_q, seqlen_k, window_left, window_right, GROUP * BLOCK_M, HAS_LEFT, HAS_RIGHT
    )
    visible_keys = row_high - row_low
    mask_base = head64
    if HAS_MASK:
        visible_keys = tl.load(visible_ptr + batch64 * stride_nb + head64 * stride_nh + rows, mask=row_exists, other=1)
        mask_base = (
            mask_ptr + batch64 * stride_mb + head64 * stride_mh + tl.cast(q_begin + start_m, tl.int64) * stride_ms
        )
    lse_log2 = tl.load(lse_ptr + row_base + rows, mask=row_exists, other=0.0) * LOG2_E
    limit = limit_of(lse_log2, log2_threshold(visible_keys, tau), row_exists, BACKWARD_SLACK)

    scale_log2 = softmax_scale * LOG2_E
    q_tiles = q_tile_index + tl.arange(0, GROUP)
    head_index = tl.cast(sequence, tl.int64) * num_heads + head
    k_words = tl.cdiv(num_k_tiles, 32)
    q_words = tl.cdiv(num_q_tiles, 32)
    by_query_row = by_query_ptr + (head_index * num_q_tiles + q_tiles) * k_words
    by_key_row = by_key_ptr + head_index * num_k_tiles * q_words
    if HAS_SAVED:
        for chunk in range(tl.cdiv(k_words, 32)):
            words, count = load_words(saved_ptr + (head_index * num_q_tiles + q_tile_index) * k_words, chunk, k_words)
            place = -1
            word = 0
            for _ in tl.range(0, count):
                bit, place, word = next_bit(words, place, word)
                tile = chunk * 1024 + bit
                retained = _retains(
                    q_tile, k, k_base, batch, kv_head, k_begin, tile, seqlen_k, position, row_exists, mask_base, stride_ms, limit,
                    whole_low, whole_high, window_left, window_right, stride_ks * STRIDE_UNIT, scale_log2, softcap_log2,
                    HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, GROUP, USE_TMA, HAS_LEFT, HAS_RIGHT, HAS_MASK, HAS_SOFTCAP,
                    DOT_PRECISION)  # fmt: skip
                set_bit(by_query_row, tile, retained)
                set_bit(by_key_row + tile * q_words, q_tiles, retained)
    else:
        first = low // BLOCK_N
        last = tl.cdiv(high, BLOCK_N)
        for tile in tl.range(first, last):
            retained = _retains(
                q_tile, k, k_base, batch, kv_head, k_begin, tile, seqlen_k, position, row_exists, mask_base, stride_ms, limit,
                whole_low, whole_high, window_left, window_right, stride_ks * STRIDE_UNIT, scale_log2, softcap_log2,
                HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, GROUP, USE_TMA, HAS_LEFT, HAS_RIGHT, HAS_MASK, HAS_SOFTCAP,
                DOT_PRECISION)  # fmt: skip
            set_bit(by_query_row, tile, retained)
            set_bit(by_key_row + tile * q_words, q_tiles, retained)

# SPDX-License-Identifier: Apache-2.0
"""The fused forward kernel: every legal tile is scored; softmax, V load and PV run only where the rule retains the tile.

Key tiles are visited from the diagonal toward earlier keys, because nearby keys carry most mass and raise the normalizer early.
A query tile's key range falls into whole tiles (every pair legal) and edge tiles (diagonal, window edge, end of the keys), which
alone pay for masking.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from .program_order import longest_first
from .rule import log2_threshold
from .tile_loops import visit_tiles, walk_tiles
from .tile_steps import LOG2_E, key_range

LN_2 = tl.constexpr(math.log(2.0))
# values that differ from call to call; none of them may cost a recompile
# fmt: off
RUNTIME_VALUES = [
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
    "stride_ob", "stride_os", "stride_oh", "stride_lb", "stride_lh", "stride_mb", "stride_mh", "stride_ms", "stride_nb",
    "stride_nh", "stride_tb", "stride_th", "stride_tm", "support_rows", "support_words", "q_begin", "q_end", "k_begin", "k_end",
    "num_q_tiles", "units_at_once", "num_heads", "num_kv_groups", "window_left", "window_right", "scale_log2", "softcap_log2", "tau",
]
# fmt: on


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def mala_forward_kernel(
    q_ptr, k, v, out_ptr, lse_ptr, sinks_ptr, mask_ptr, visible_ptr, tiles_ptr, certificate_ptr, support_ptr, walked_ptr, bounds_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    stride_lb, stride_lh, stride_mb, stride_mh, stride_ms, stride_nb, stride_nh, stride_tb, stride_th, stride_tm,
    support_rows, support_words, q_begin, q_end, k_begin, k_end, num_q_tiles, units_at_once, num_heads, num_kv_groups,
    window_left, window_right, scale_log2, softcap_log2, tau,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, STRIDE_UNIT: tl.constexpr, USE_TMA: tl.constexpr, IS_PACKED: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    RETURN_WORK: tl.constexpr, SAVE_SUPPORT: tl.constexpr, IS_WALK: tl.constexpr, IS_SUPPORT: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):  # fmt: skip
    """One query tile of one head. q, k, v, out strides count STRIDE_UNIT elements, so that their divisibility needs no recompile."""
    place, unit = longest_first(num_q_tiles, units_at_once)
    q_tile_index = num_q_tiles - 1 - place  # late rows see the most keys
    head = unit % num_heads
    sequence = unit // num_heads
    kv_head = head // num_kv_groups
    if HAS_BOUNDS:
        q_begin = tl.load(bounds_ptr + sequence * 4)
        q_end = tl.load(bounds_ptr + sequence * 4 + 1)
        k_begin = tl.load(bounds_ptr + sequence * 4 + 2)
        k_end = tl.load(bounds_ptr + sequence * 4 + 3)
    seqlen_q = q_end - q_begin
    seqlen_k = k_end - k_begin
    start_m = q_tile_index * BLOCK_M
    if start_m >= seqlen_q:
        return
    batch = 0 if IS_PACKED else sequence

    offs_m = start_m + tl.arange(0, BLOCK_M)
    row_exists = offs_m < seqlen_q
    rows = (q_begin + offs_m).to(tl.int64)
    position = offs_m + seqlen_k - seqlen_q  # the key a row is aligned with

    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    batch64 = tl.cast(batch, tl.int64)
    head64 = tl.cast(head, tl.int64)
    kv_head64 = tl.cast(kv_head, tl.int64)
    q_base = (batch64 * stride_qb + head64 * stride_qh) * STRIDE_UNIT
    k_base = (batch64 * stride_kb + kv_head64 * stride_kh) * STRIDE_UNIT
    v_base = (batch64 * stride_vb + kv_head64 * stride_vh) * STRIDE_UNIT
    # (BLOCK_M, BLOCK_D)
    q_tile = tl.load(
        q_ptr + q_base + rows[:, None] * (stride_qs * STRIDE_UNIT) + offs_d[None, :],
        mask=row_exists[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )

    low, high, whole_low, whole_high, row_low, row_high = key_range(
        start_m, position, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M, HAS_LEFT, HAS_RIGHT
    )
    visible_keys = row_high - row_low
    if HAS_MASK:
        visible_base = visible_ptr + batch64 * stride_nb + head64 * stride_nh
        visible_keys = tl.load(visible_base + rows, mask=row_exists, other=1)
    threshold_log2 = log2_threshold(visible_keys, tau)

    # key tiles [first, edge_low) and [edge_high, last) need masking, [edge_low, edge_high) do not
    first = low // BLOCK_N
    last = tl.cdiv(high, BLOCK_N)
    edge_high = tl.maximum(tl.minimum(whole_high // BLOCK_N, last), first)
    edge_low = tl.minimum(tl.maximum(tl.cdiv(whole_low, BLOCK_N), first), edge_high)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    limit = tl.where(row_exists, float("-inf"), float("inf"))
    omitted = tl.zeros([BLOCK_M], tl.float32)
    mask_base = head64
    if HAS_MASK:
        mask_base = (
            mask_ptr + batch64 * stride_mb + head64 * stride_mh + tl.cast(q_begin + start_m, tl.int64) * stride_ms
        )
        edge_high = first
        edge_low = first
    tiles_base = head64
    if RETURN_WORK:
        tiles_base = (
            tiles_ptr
            + tl.cast(sequence, tl.int64) * stride_tb
            + head64 * stride_th
            + q_tile_index.to(tl.int64) * stride_tm
        )
    support_base = head64
    support_row = (tl.cast(sequence, tl.int64) * num_heads + head) * support_rows + q_tile_index
    if SAVE_SUPPORT:
        support_base = support_ptr + support_row * support_words
    if IS_WALK:
        walked_base = walked_ptr + support_row * support_words
        row_max, row_sum, acc = walk_tiles(
            q_tile, k, v, k_base, v_base, mask_base, stride_ms, walked_base, support_base, support_words, batch, kv_head, k_begin,
            seqlen_k, position, row_exists, threshold_log2, row_max, row_sum, acc, limit, whole_low, whole_high,
            stride_ks * STRIDE_UNIT, stride_vs * STRIDE_UNIT, window_left, window_right, scale_log2, softcap_log2,
            HEAD_DIM, V_HEAD_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, IS_SUPPORT, USE_TMA, HAS_LEFT, HAS_RIGHT, HAS_MASK, HAS_SOFTCAP,
            SAVE_SUPPORT, DOT_PRECISION)  # fmt: skip
    else:
        row_max, row_sum, acc, limit, omitted = visit_tiles(
            q_tile, k, v, k_base, v_base, mask_base, stride_ms, tiles_base, support_base, batch, kv_head, k_begin, seqlen_k, position,
            row_exists, threshold_log2, row_max, row_sum, acc, limit, omitted, edge_high, last, stride_ks * STRIDE_UNIT,
            stride_vs * STRIDE_UNIT, window_left, window_right, scale_log2, softcap_log2, HEAD_DIM, V_HEAD_DIM, BLOCK_N, BLOCK_D,
            BLOCK_DV, True, USE_TMA, HAS_LEFT, HAS_RIGHT, HAS_MASK, HAS_SOFTCAP, RETURN_WORK, SAVE_SUPPORT, DOT_PRECISION)  # fmt: skip
    if not HAS_MASK and not IS_WALK:
        row_max, row_sum, acc, limit, omitted = visit_tiles(
            q_tile, k, v, k_base, v_base, mask_base, stride_ms, tiles_base, support_base, batch, kv_head, k_begin, seqlen_k, position,
            row_exists, threshold_log2, row_max, row_sum, acc, limit, omitted, edge_low, edge_high, stride_ks * STRIDE_UNIT,
            stride_vs * STRIDE_UNIT, window_left, window_right, scale_log2, softcap_log2, HEAD_DIM, V_HEAD_DIM, BLOCK_N,
            BLOCK_D, BLOCK_DV, False, USE_TMA, HAS_LEFT, HAS_RIGHT, HAS_MASK, HAS_SOFTCAP, RETURN_WORK, SAVE_SUPPORT,
            DOT_PRECISION)  # fmt: skip
        if HAS_LEFT:
            row_max, row_sum, acc, limit, omitted = visit_tiles(
                q_tile, k, v, k_base, v_base, mask_base, stride_ms, tiles_base, support_base, batch, kv_head, k_begin, seqlen_k,
                position, row_exists, threshold_log2, row_max, row_sum, acc, limit, omitted, first, edge_low, stride_ks * STRIDE_UNIT,
                stride_vs * STRIDE_UNIT, window_left, window_right, scale_log2, softcap_log2, HEAD_DIM, V_HEAD_DIM, BLOCK_N,
                BLOCK_D, BLOCK_DV, True, USE_TMA, HAS_LEFT, HAS_RIGHT, HAS_MASK, HAS_SOFTCAP, RETURN_WORK, SAVE_SUPPORT,
                DOT_PRECISION)  # fmt: skip

    if not HAS_SOFTCAP:
        row_max *= scale_log2
    if HAS_SINKS:  # joins the normalizer after the last tile
        sink_log2 = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        new_max = tl.maximum(row_max, sink_log2)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.exp2(sink_log2 - shift)
        acc *= decay[:, None]
        omitted *= decay
        row_max = new_max
    is_empty = row_sum == 0.0
    inverse = tl.where(is_empty, 0.0, 1.0 / row_sum)
    lse = (row_max + tl.log2(row_sum)) * LN_2
    out_base = (batch64 * stride_ob + head64 * stride_oh) * STRIDE_UNIT
    tl.store(
        out_ptr + out_base + rows[:, None] * (stride_os * STRIDE_UNIT) + offs_dv[None, :],
        (acc * inverse[:, None]).to(out_ptr.dtype.element_ty),
        mask=row_exists[:, None] & (offs_dv < V_HEAD_DIM)[None, :],
    )
    row_base = batch64 * stride_lb + head64 * stride_lh
    tl.store(lse_ptr + row_base + rows, lse, mask=row_exists)
    if RETURN_WORK:
        tl.store(certificate_ptr + row_base + rows, omitted * inverse, mask=row_exists)

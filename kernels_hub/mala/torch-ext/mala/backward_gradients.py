# SPDX-License-Identifier: Apache-2.0
"""The gradients over retained tiles alone: dQ by query tile, dK and dV by key tile through all query heads of its group.

Each kernel walks the bits of the backward's support and adds in one fixed order in float32: gradients are bitwise repeatable.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .backward_support import RUNTIME_VALUES, sequence_bounds
from .program_order import longest_first
from .support import load_words, next_bit
from .tile_steps import LOG2_E, key_range, legal_pairs, load_tile

DELTA_ROWS = 32  # of one program
DELTA_VALUES = ["stride_ob", "stride_os", "stride_oh", "stride_gb", "stride_gs", "stride_gh", "q_begin", "q_end", "total_q",
                "num_blocks", "num_heads"]  # fmt: skip


@triton.jit(do_not_specialize=DELTA_VALUES)
def backward_delta_kernel(
    out_ptr, do_ptr, delta_ptr, bounds_ptr, stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh,
    q_begin, q_end, total_q, num_blocks, num_heads,
    V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, STRIDE_UNIT: tl.constexpr, IS_PACKED: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    """delta: the sum over the value head_dim of out * do, one float32 for each row; float32 (batch, num_heads, total_q).

    In a kernel of its own, because the order of a sum follows from the launch shape: with and without a saved support it is the same.
    """
    sequence = tl.program_id(0) // num_blocks
    head = tl.program_id(1)
    q_begin, q_end, k_begin, k_end = sequence_bounds(bounds_ptr, sequence, q_begin, q_end, 0, 1, HAS_BOUNDS)
    offs_dv = tl.arange(0, BLOCK_DV)
    rows = (q_begin + tl.program_id(0) % num_blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    row_exists = (rows < q_end) & (k_begin < k_end)  # the gradient of rows without keys may be anything
    batch64 = tl.cast(0 if IS_PACKED else sequence, tl.int64)
    head64 = head.to(tl.int64)
    mask = row_exists[:, None] & (offs_dv < V_HEAD_DIM)[None, :]
    out_rows = out_ptr + (batch64 * stride_ob + head64 * stride_oh + rows * stride_os) * STRIDE_UNIT
    do_rows = do_ptr + (batch64 * stride_gb + head64 * stride_gh + rows * stride_gs) * STRIDE_UNIT
    out = tl.load(out_rows[:, None] + offs_dv[None, :], mask=mask, other=0.0)
    do = tl.load(do_rows[:, None] + offs_dv[None, :], mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + (batch64 * num_heads + head) * total_q + rows, delta, mask=row_exists)


@triton.jit
def _probabilities(scores, lse_log2, scale_log2, softcap_log2, HAS_SOFTCAP: tl.constexpr):
    """p of raw products q k^T and, with a softcap, the derivative of the capped score; all pairs taken for legal."""
    slope = 1.0
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        tanh = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E * scale_log2 / softcap_log2)) + 1.0)
        slope = 1.0 - tanh * tanh
        p = tl.exp2(softcap_log2 * tanh - lse_log2)
    else:
        p = tl.exp2(scores * scale_log2 - lse_log2)
    return p, slope


@triton.jit
def _load_rows(lse_ptr, delta_ptr, rows, row_exists):
    """lse in log2 units and delta; rows that do not exist or see no key get lse = +inf, hence p = 0."""
    lse_log2 = tl.load(lse_ptr + rows, mask=row_exists, other=float("inf")) * LOG2_E
    lse_log2 = tl.where(lse_log2 == float("-inf"), float("inf"), lse_log2)
    return lse_log2, tl.load(delta_ptr + rows, mask=row_exists, other=0.0)


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def backward_query_kernel(
    q_ptr, k, v, do_ptr, dq_ptr, lse_ptr, delta_ptr, support_ptr, mask_ptr, bounds_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, stride_mb, stride_mh, stride_ms,
    q_begin, q_end, k_begin, k_end, total_q, num_q_tiles, num_k_tiles, units_at_once, num_heads, num_kv_groups, window_left,
    window_right, softmax_scale, softcap_log2,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, STRIDE_UNIT: tl.constexpr, USE_TMA: tl.constexpr, IS_PACKED: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ (contiguous) of one query tile: its retained key tiles in steps of STEP keys."""
    place, unit = longest_first(num_q_tiles, units_at_once)
    q_tile_index = num_q_tiles - 1 - place  # late rows see the most keys
    head = unit % num_heads
    sequence = unit // num_heads
    kv_head = head // num_kv_groups
    q_begin, q_end, k_begin, k_end = sequence_bounds(bounds_ptr, sequence, q_begin, q_end, k_begin, k_end, HAS_BOUNDS)
    seqlen_q = q_end - q_begin
    seqlen_k = k_end - k_begin
    start_m = q_tile_index * BLOCK_M
    if start_m >= seqlen_q:
        return

    in_tile = tl.arange(0, BLOCK_M)
    offs_m = start_m + in_tile
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    row_exists = offs_m < seqlen_q
    rows = (q_begin + offs_m).to(tl.int64)
    position = offs_m + seqlen_k - seqlen_q
    batch = 0 if IS_PACKED else sequence
    batch64 = tl.cast(batch, tl.int64)
    head64 = head.to(tl.int64)
    kv_head64 = kv_head.to(tl.int64)
    q_base = (batch64 * stride_qb + head64 * stride_qh) * STRIDE_UNIT
    do_base = (batch64 * stride_gb + head64 * stride_gh) * STRIDE_UNIT
    k_base = (batch64 * stride_kb + kv_head64 * stride_kh) * STRIDE_UNIT
    v_base = (batch64 * stride_vb + kv_head64 * stride_vh) * STRIDE_UNIT
    q_tile = tl.load(q_ptr + q_base + rows[:, None] * (stride_qs * STRIDE_UNIT) + offs_d[None, :],
                     mask=row_exists[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
    do_tile = tl.load(do_ptr + do_base + rows[:, None] * (stride_gs * STRIDE_UNIT) + offs_dv[None, :],
                      mask=row_exists[:, None] & (offs_dv < V_HEAD_DIM)[None, :], other=0.0)  # fmt: skip
    row_base = (batch64 * num_heads + head) * total_q
    lse_log2, delta = _load_rows(lse_ptr + row_base, delta_ptr + row_base, rows, row_exists)
    _, _, whole_low, whole_high, _, _ = key_range(
        start_m, position, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M, HAS_LEFT, HAS_RIGHT
    )
    mask_base = head64
    if HAS_MASK:
        mask_base = (
            mask_ptr + batch64 * stride_mb + head64 * stride_mh + tl.cast(q_begin + start_m, tl.int64) * stride_ms
        )

    scale_log2 = softmax_scale * LOG2_E
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_words = tl.cdiv(num_k_tiles, 32)
    head_index = tl.cast(sequence, tl.int64) * num_heads + head
    support_row = support_ptr + (head_index * num_q_tiles + q_tile_index) * k_words
    for chunk in range(tl.cdiv(k_words, 32)):
        words, count = load_words(support_row, chunk, k_words)
        place = -1
        word = 0
        bit = 0
        for step in tl.range(0, count * (BLOCK_N // STEP)):
            part = step % (BLOCK_N // STEP)
            following, following_place, following_word = next_bit(words, place, word)
            bit = tl.where(part == 0, following, bit)
            place = tl.where(part == 0, following_place, place)
            word = tl.where(part == 0, following_word, word)
            start_n = (chunk * 1024 + bit) * BLOCK_N + part * STEP
            k_tile = load_tile(k, k_base, batch, kv_head, k_begin, start_n, seqlen_k, offs_d, stride_ks * STRIDE_UNIT,
                               HEAD_DIM, not USE_TMA, USE_TMA, STEP, BLOCK_D)  # fmt: skip
            v_tile = load_tile(v, v_base, batch, kv_head, k_begin, start_n, seqlen_k, offs_dv, stride_vs * STRIDE_UNIT,
                               V_HEAD_DIM, not USE_TMA, USE_TMA, STEP, BLOCK_DV)  # fmt: skip
            scores = tl.dot(q_tile, k_tile.T, input_precision=DOT_PRECISION)  # (BLOCK_M, STEP)
            dp = tl.dot(do_tile, v_tile.T, input_precision=DOT_PRECISION)
            p, slope = _probabilities(scores, lse_log2[:, None], scale_log2, softcap_log2, HAS_SOFTCAP)
            if (start_n < whole_low) | (start_n + STEP > whole_high) | HAS_MASK:
                legal = legal_pairs(
                    (start_n + tl.arange(0, STEP))[None, :], position[:, None], in_tile[:, None], row_exists[:, None], seqlen_k,
                    mask_base, stride_ms, window_left, window_right, HAS_LEFT, HAS_RIGHT, HAS_MASK,
                )  # fmt: skip
                p = tl.where(legal, p, 0.0)
            ds = p * (dp - delta[:, None]) * slope
            dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=DOT_PRECISION)
    dq_rows = dq_ptr + ((batch64 * total_q + rows) * num_heads + head)[:, None] * HEAD_DIM
    tl.store(dq_rows + offs_d[None, :], (dq * softmax_scale).to(dq_ptr.dtype.element_ty),
             mask=row_exists[:, None] & (offs_d < HEAD_DIM)[None, :])  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def backward_key_kernel(
    q, k_ptr, v_ptr, do, dk_ptr, dv_ptr, lse_ptr, delta_ptr, support_ptr, mask_ptr, bounds_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, stride_mb, stride_mh, stride_ms,
    q_begin, q_end, k_begin, k_end, total_q, total_k, num_q_tiles, num_k_tiles, units_at_once, num_heads, num_kv_groups,
    window_left, window_right, softmax_scale, softcap_log2,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, STRIDE_UNIT: tl.constexpr, USE_TMA: tl.constexpr, IS_PACKED: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV (contiguous) of STEP keys of one key tile: the query tiles of all heads of the group that retained it."""
    parts = BLOCK_N // STEP
    place, unit = longest_first(num_k_tiles * parts, units_at_once)
    k_tile_index = place // parts  # most rows see early keys
    num_kv_heads = num_heads // num_kv_groups
    kv_head = unit % num_kv_heads
    sequence = unit // num_kv_heads
    q_begin, q_end, k_begin, k_end = sequence_bounds(bounds_ptr, sequence, q_begin, q_end, k_begin, k_end, HAS_BOUNDS)
    seqlen_q = q_end - q_begin
    seqlen_k = k_end - k_begin
    start_n = k_tile_index * BLOCK_N + place % parts * STEP
    if start_n >= seqlen_k:
        return

    offs_n = start_n + tl.arange(0, STEP)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    key_exists = offs_n < seqlen_k
    keys = (k_begin + offs_n).to(tl.int64)
    batch = 0 if IS_PACKED else sequence
    batch64 = tl.cast(batch, tl.int64)
    kv_head64 = kv_head.to(tl.int64)
    k_base = (batch64 * stride_kb + kv_head64 * stride_kh) * STRIDE_UNIT
    v_base = (batch64 * stride_vb + kv_head64 * stride_vh) * STRIDE_UNIT
    k_mask = key_exists[:, None] & (offs_d < HEAD_DIM)[None, :]
    v_mask = key_exists[:, None] & (offs_dv < V_HEAD_DIM)[None, :]
    k_tile = tl.load(
        k_ptr + k_base + keys[:, None] * (stride_ks * STRIDE_UNIT) + offs_d[None, :], mask=k_mask, other=0.0
    )
    v_tile = tl.load(
        v_ptr + v_base + keys[:, None] * (stride_vs * STRIDE_UNIT) + offs_dv[None, :], mask=v_mask, other=0.0
    )

    scale_log2 = softmax_scale * LOG2_E
    dk = tl.zeros([STEP, BLOCK_D], tl.float32)
    dv = tl.zeros([STEP, BLOCK_DV], tl.float32)
    in_tile = tl.arange(0, BLOCK_M)
    q_words = tl.cdiv(num_q_tiles, 32)
    for head in range(kv_head * num_kv_groups, (kv_head + 1) * num_kv_groups):
        head64 = tl.cast(head, tl.int64)
        q_base = (batch64 * stride_qb + head64 * stride_qh) * STRIDE_UNIT
        do_base = (batch64 * stride_gb + head64 * stride_gh) * STRIDE_UNIT
        row_base = (batch64 * num_heads + head) * total_q
        head_index = tl.cast(sequence, tl.int64) * num_heads + head
        support_row = support_ptr + (head_index * num_k_tiles + k_tile_index) * q_words
        for chunk in range(tl.cdiv(q_words, 32)):
            words, count = load_words(support_row, chunk, q_words)
            place = -1
            word = 0
            for _ in tl.range(0, count):
                bit, place, word = next_bit(words, place, word)
                start_m = (chunk * 1024 + bit) * BLOCK_M
                q_tile = load_tile(q, q_base, batch, head, q_begin, start_m, seqlen_q, offs_d, stride_qs * STRIDE_UNIT,
                                   HEAD_DIM, not USE_TMA, USE_TMA, BLOCK_M, BLOCK_D)  # fmt: skip
                do_tile = load_tile(do, do_base, batch, head, q_begin, start_m, seqlen_q, offs_dv, stride_gs * STRIDE_UNIT,
                                    V_HEAD_DIM, not USE_TMA, USE_TMA, BLOCK_M, BLOCK_DV)  # fmt: skip
                offs_m = start_m + in_tile
                row_exists = offs_m < seqlen_q
                lse_log2, delta = _load_rows(
                    lse_ptr + row_base, delta_ptr + row_base, (q_begin + offs_m).to(tl.int64), row_exists
                )
                scores = tl.dot(k_tile, q_tile.T, input_precision=DOT_PRECISION)  # (STEP, BLOCK_M)
                dp = tl.dot(v_tile, do_tile.T, input_precision=DOT_PRECISION)
                p, slope = _probabilities(scores, lse_log2[None, :], scale_log2, softcap_log2, HAS_SOFTCAP)
                position = offs_m + seqlen_k - seqlen_q
                _, _, whole_low, whole_high, _, _ = key_range(
                    start_m, position, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M, HAS_LEFT, HAS_RIGHT
                )
                if (start_n < whole_low) | (start_n + STEP > whole_high) | HAS_MASK:
                    mask_base = head64
                    if HAS_MASK:
                        mask_base = mask_ptr + batch64 * stride_mb + head64 * stride_mh
                        mask_base += tl.cast(q_begin + start_m, tl.int64) * stride_ms
                    legal = legal_pairs(
                        offs_n[:, None], position[None, :], in_tile[None, :], row_exists[None, :], seqlen_k, mask_base, stride_ms,
                        window_left, window_right, HAS_LEFT, HAS_RIGHT, HAS_MASK,
                    )  # fmt: skip
                    p = tl.where(legal, p, 0.0)
                dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=DOT_PRECISION)
                ds = p * (dp - delta[None, :]) * slope
                dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=DOT_PRECISION)
    key_rows = (batch64 * total_k + keys) * num_kv_heads + kv_head
    tl.store(
        dk_ptr + key_rows[:, None] * HEAD_DIM + offs_d[None, :],
        (dk * softmax_scale).to(dk_ptr.dtype.element_ty),
        mask=k_mask,
    )
    tl.store(dv_ptr + key_rows[:, None] * V_HEAD_DIM + offs_dv[None, :], dv.to(dv_ptr.dtype.element_ty), mask=v_mask)

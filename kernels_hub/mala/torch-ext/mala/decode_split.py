# SPDX-License-Identifier: Apache-2.0
"""Split decode, the paper's form: each split of the keys tests its tiles against its own partial normalizer, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_chain import gdc_launch_dependents
from .decode_combine import store_split
from .decode_rows import (
    RUNTIME_VALUES,
    decode_place,
    decode_rows,
    decode_scores,
    load_cached,
    load_queries,
    split_range,
)
from .rule import FORWARD_SLACK, is_any, is_tile_retained, largest_of_rows, limit_of, online_softmax_step
from .tile_steps import LOG2_E


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def attend_split_kernel(
    q_ptr, k_ptr, v_ptr, acc_ptr, state_ptr, tiles_ptr, bounds_ptr, tables_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_tables,
    q_begin, q_end, k_begin, k_end, num_q_tiles, num_k_tiles, num_kv_heads, num_splits, window_left, window_right,
    softmax_scale, softcap_log2, tau,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, TOKENS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    RETURN_WORK: tl.constexpr, DOT_PRECISION: tl.constexpr, IS_CHAINED: tl.constexpr, CAN_SKIP: tl.constexpr,
):  # fmt: skip
    """The rule over one split's tiles, last to first. tau / L_q counts the full context.

    With CAN_SKIP False (tau = 0, no report) there is no vote, and values are loaded ahead of time as keys are.
    """
    group = tl.program_id(0)
    q_tile, kv_head, sequence, q_begin, k_begin, seqlen_q, seqlen_k = decode_place(
        group, num_q_tiles, num_kv_heads, bounds_ptr, q_begin, q_end, k_begin, k_end, HAS_BOUNDS
    )
    token, exists, row_low, row_high, threshold_log2, low, high = decode_rows(
        q_tile, seqlen_q, seqlen_k, window_left, window_right, tau, TOKENS, GROUP, BLOCK_R, HAS_LEFT, HAS_RIGHT
    )
    begin, end = split_range(tl.program_id(1), num_splits, low, high, BLOCK_N)
    batch = sequence.to(tl.int64)
    q = load_queries(q_ptr, batch, kv_head * GROUP, token, exists, q_begin, stride_qb * STRIDE_UNIT, stride_qs * STRIDE_UNIT,
                     stride_qh * STRIDE_UNIT, HEAD_DIM, GROUP, BLOCK_R, BLOCK_D)  # fmt: skip
    if IS_CHAINED:
        gdc_launch_dependents()
    row_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_R], tl.float32)
    omitted = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    limit = tl.where(exists, float("-inf"), float("inf"))
    for step in tl.range(0, end - begin):
        tile = end - 1 - step
        start_n = tile * BLOCK_N
        k = load_cached(k_ptr, tables_ptr, stride_tables, batch, kv_head, k_begin, start_n, seqlen_k, stride_kb * STRIDE_UNIT,
                        stride_ks * STRIDE_UNIT, stride_kh * STRIDE_UNIT, HEAD_DIM, BLOCK_N, BLOCK_D, PAGE)  # fmt: skip
        scores = decode_scores(q, k, start_n, row_low, row_high, softmax_scale, softcap_log2, LOG2_E, BLOCK_N, HAS_SOFTCAP,
                               DOT_PRECISION)  # fmt: skip
        tile_max = largest_of_rows(scores)
        if not CAN_SKIP:
            v = load_cached(v_ptr, tables_ptr, stride_tables, batch, kv_head, k_begin, start_n, seqlen_k, stride_vb * STRIDE_UNIT,
                            stride_vs * STRIDE_UNIT, stride_vh * STRIDE_UNIT, V_HEAD_DIM, BLOCK_N, BLOCK_DV, PAGE)  # fmt: skip
            p, decay, row_max, row_sum = online_softmax_step(scores, 1.0, tile_max, row_max, row_sum, True)
            acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=DOT_PRECISION)
        else:
            retained = is_tile_retained(tile_max, limit)
            if RETURN_WORK:
                code = (1 + retained.to(tl.int8)) * is_any(tile_max != float("-inf")).to(tl.int8)
                tl.store(tiles_ptr + tl.cast(group, tl.int64) * num_k_tiles + tile, code)
            if retained:
                v = load_cached(v_ptr, tables_ptr, stride_tables, batch, kv_head, k_begin, start_n, seqlen_k, stride_vb * STRIDE_UNIT,
                                stride_vs * STRIDE_UNIT, stride_vh * STRIDE_UNIT, V_HEAD_DIM, BLOCK_N, BLOCK_DV, PAGE)  # fmt: skip
                p, decay, row_max, row_sum = online_softmax_step(scores, 1.0, tile_max, row_max, row_sum, True)
                acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=DOT_PRECISION)
                limit = limit_of(row_max + tl.log2(row_sum), threshold_log2, exists, FORWARD_SLACK)
                omitted *= decay
            elif RETURN_WORK:
                legal = (scores > float("-inf")).to(tl.int32)
                omitted += tl.sum(legal, 1) * tl.exp2(tile_max - tl.where(row_max == float("-inf"), 0.0, row_max))
    store_split(acc_ptr, state_ptr, acc, row_max, row_sum, omitted, group, tl.program_id(1), num_splits, V_HEAD_DIM, BLOCK_DV,
                TOKENS, GROUP, BLOCK_R)  # fmt: skip

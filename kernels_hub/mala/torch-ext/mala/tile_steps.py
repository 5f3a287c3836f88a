# SPDX-License-Identifier: Apache-2.0
"""What a kernel does with one tile: load it, score it, mask it, and let the rule allocate its post-score work."""

import math

import triton
import triton.language as tl

from .rule import FORWARD_SLACK, is_any, is_tile_retained, limit_of, online_softmax_step
from .support import set_bit

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def load_tile(x, base, batch, head, first_row, row, num_rows, dim, stride, WIDTH: tl.constexpr, IS_EDGE: tl.constexpr,
              USE_TMA: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """(BLOCK_N, BLOCK_D) rows of K or V, zero beyond the sequence and beyond head_dim. ``x``: descriptor or pointer."""
    if USE_TMA:
        tile = x.load([batch, head, (first_row + row).to(tl.int32), 0]).reshape(BLOCK_N, BLOCK_D)
        if IS_EDGE:
            tile = tl.where((row + tl.arange(0, BLOCK_N) < num_rows)[:, None], tile, 0.0)
    else:
        rows = row + tl.arange(0, BLOCK_N)
        pointers = x + base + (first_row + rows).to(tl.int64)[:, None] * stride + dim[None, :]
        if IS_EDGE:
            tile = tl.load(pointers, mask=(rows < num_rows)[:, None] & (dim < WIDTH)[None, :], other=0.0)
        elif WIDTH != BLOCK_D:
            tile = tl.load(pointers, mask=(dim < WIDTH)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def score_tile(q_tile, k, base, batch, kv_head, k_begin, start_n, seqlen_k, stride_ks, scale_log2, softcap_log2,
               HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, IS_EDGE: tl.constexpr,
               USE_TMA: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DOT_PRECISION: tl.constexpr):  # fmt: skip
    """(BLOCK_M, BLOCK_N) unmasked scores; log2 units with a softcap, else still to be multiplied by scale_log2."""
    k_tile = load_tile(k, base, batch, kv_head, k_begin, start_n, seqlen_k, tl.arange(0, BLOCK_D), stride_ks,
                       HEAD_DIM, IS_EDGE and not USE_TMA, USE_TMA, BLOCK_N, BLOCK_D)  # fmt: skip
    scores = tl.dot(q_tile, k_tile.T, input_precision=DOT_PRECISION)
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        exponent = scores * (2.0 * LOG2_E * scale_log2 / softcap_log2)
        scores = softcap_log2 * (1.0 - 2.0 / (tl.exp2(exponent) + 1.0))
    return scores


@triton.jit
def key_range(start_m, position, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M: tl.constexpr,
              HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):  # fmt: skip
    """Keys that some row of a query tile sees (low, high), that all see (whole_low, whole_high), that each sees (row_low, row_high)."""
    low = 0
    high = seqlen_k
    whole_low = 0
    whole_high = seqlen_k
    row_low = tl.zeros_like(position)
    row_high = row_low + seqlen_k
    first_position = start_m + seqlen_k - seqlen_q
    last_position = tl.minimum(start_m + BLOCK_M, seqlen_q) - 1 + seqlen_k - seqlen_q
    if HAS_LEFT:
        low = tl.maximum(first_position - window_left, 0)
        whole_low = tl.maximum(last_position - window_left, 0)
        row_low = tl.maximum(position - window_left, 0)
    if HAS_RIGHT:
        high = tl.maximum(tl.minimum(last_position + window_right + 1, seqlen_k), 0)
        whole_high = tl.minimum(first_position + window_right + 1, seqlen_k)
        row_high = tl.minimum(position + window_right + 1, seqlen_k)
    return low, high, whole_low, whole_high, row_low, row_high


@triton.jit
def legal_pairs(keys, position, row_in_tile, row_exists, seqlen_k, mask_base, stride_ms, window_left, window_right,
                HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr):  # fmt: skip
    """May rows aligned with ``position`` see ``keys``: bool, of the shape that keys and the three row arguments broadcast to."""
    legal = (keys < seqlen_k) & row_exists
    if HAS_LEFT:
        legal &= keys >= position - window_left
    if HAS_RIGHT:
        legal &= keys <= position + window_right
    if HAS_MASK:
        legal &= tl.load(mask_base + row_in_tile * stride_ms + keys, mask=legal, other=0) != 0
    return legal


@triton.jit
def allocate(scores, to_log2, tile_max, legal_keys, v, base, batch, kv_head, k_begin, start_n, seqlen_k, stride_vs,
             tiles_base, support_base, index, row_exists, threshold_log2, row_max, row_sum, acc, limit, omitted,
             V_HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr, IS_EDGE: tl.constexpr,
             USE_TMA: tl.constexpr, RETURN_WORK: tl.constexpr, SAVE_SUPPORT: tl.constexpr,
             DOT_PRECISION: tl.constexpr):  # fmt: skip
    """The rule's step for one scored tile: post-score work where it is retained, its certificate where it is skipped."""
    retained = is_tile_retained(tile_max * to_log2, limit)
    if RETURN_WORK:
        code = 1 + retained.to(tl.int8)
        if IS_EDGE:
            code *= is_any(tile_max != float("-inf")).to(tl.int8)
        tl.store(tiles_base + index, code)
    if retained:
        v_tile = load_tile(v, base, batch, kv_head, k_begin, start_n, seqlen_k, tl.arange(0, BLOCK_DV), stride_vs,
                            V_HEAD_DIM, IS_EDGE, USE_TMA, BLOCK_N, BLOCK_DV)  # fmt: skip
        p, decay, row_max, row_sum = online_softmax_step(scores, to_log2, tile_max, row_max, row_sum, IS_EDGE)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision=DOT_PRECISION)
        limit = limit_of(row_max * to_log2 + tl.log2(row_sum), threshold_log2, row_exists, FORWARD_SLACK)
        if SAVE_SUPPORT:
            set_bit(support_base, index, retained)
        if RETURN_WORK:
            omitted *= decay
    elif RETURN_WORK:
        omitted += legal_keys * tl.exp2((tile_max - tl.where(row_max == float("-inf"), 0.0, row_max)) * to_log2)
    return row_max, row_sum, acc, limit, omitted

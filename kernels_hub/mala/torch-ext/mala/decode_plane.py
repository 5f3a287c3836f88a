# SPDX-License-Identifier: Apache-2.0
"""First pass of a decode that reads the keys' INT8 plane: for each tile and row the largest score there can be, and the least mass.

INT8 numbers are exact in 16 bits, so the product with q is what an exact key of those numbers would give. How far a score may lie from
it, |q| times the key's residual, is in ``key_plane``. The second pass is that of ``decode_two_pass``.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .decode_chain import gdc_launch_dependents, gdc_wait
from .decode_rows import RUNTIME_VALUES, decode_place, decode_rows, load_cached, load_queries, split_range
from .key_plane import NORM_ROUNDING, KeyPlane
from .tile_steps import LOG2_E

PLANE_VALUES = [*RUNTIME_VALUES, "stride_pb", "stride_ps", "stride_ph", "stride_nb", "stride_nh"]
NORM = tl.constexpr(NORM_ROUNDING)
LARGEST_FINITE = tl.constexpr(3e38)
SOFTCAP_ROUNDING = tl.constexpr(2.0**-19)  # of the kernels' tanh in both passes, relative to the softcap


@triton.jit
def _capped(scores, softcap_log2, SIGN: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """A bound of scores as one of capped scores: the cap is monotone. SIGN: 1 for an upper bound."""
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        capped = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap_log2)) + 1.0)
        scores = softcap_log2 * (capped + SIGN * SOFTCAP_ROUNDING)
    return scores


@triton.jit
def _numbers(scales_ptr, residuals_ptr, of_numbers, start_n, seqlen_k, BLOCK_N: tl.constexpr):
    """Scales and residuals of a tile's keys, zero beyond the sequence."""
    keys = start_n + tl.arange(0, BLOCK_N)
    exists = keys < seqlen_k
    scales = tl.load(scales_ptr + of_numbers + keys, mask=exists, other=0.0)
    return scales, tl.load(residuals_ptr + of_numbers + keys, mask=exists, other=0.0)


@triton.jit(do_not_specialize=PLANE_VALUES)
def score_plane_kernel(
    q_ptr, quantized_ptr, scales_ptr, residuals_ptr, maxima_ptr, sums_ptr, lower_ptr, split_max_ptr, split_sum_ptr, split_top_ptr,
    bounds_ptr, stride_qb, stride_qs, stride_qh, stride_pb, stride_ps, stride_ph, stride_nb, stride_nh,
    q_begin, q_end, k_begin, k_end, num_q_tiles, num_k_tiles, num_kv_heads, num_splits, window_left, window_right,
    softmax_scale, softcap_log2, tau,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, STRIDE_UNIT: tl.constexpr, PLANE_UNIT: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, RETURN_WORK: tl.constexpr, DOT_PRECISION: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """One split, (num_groups, num_k_tiles, rows) of each tile and (num_groups, num_splits, rows) of the split, in log2 units.

    maxima: upper bounds of a row's largest score. lower: lower bounds of log2 of its mass. sums (RETURN_WORK): upper bounds of its
    mass over exp2(maxima). split_max, split_sum: a lower bound of the split's mass; split_top: the largest of maxima.
    """
    group = tl.program_id(0)
    q_tile, kv_head, sequence, q_begin, k_begin, seqlen_q, seqlen_k = decode_place(
        group, num_q_tiles, num_kv_heads, bounds_ptr, q_begin, q_end, k_begin, k_end, HAS_BOUNDS
    )
    token, exists, row_low, row_high, _, low, high = decode_rows(
        q_tile, seqlen_q, seqlen_k, window_left, window_right, tau, TOKENS, GROUP, BLOCK_R, HAS_LEFT, HAS_RIGHT
    )
    begin, end = split_range(tl.program_id(1), num_splits, low, high, BLOCK_N)
    if IS_CHAINED:
        gdc_wait()  # for whatever wrote q and the plane
    batch = sequence.to(tl.int64)
    q = load_queries(q_ptr, batch, kv_head * GROUP, token, exists, q_begin, stride_qb * STRIDE_UNIT, stride_qs * STRIDE_UNIT,
                     stride_qh * STRIDE_UNIT, HEAD_DIM, GROUP, BLOCK_R, BLOCK_D)  # fmt: skip
    if IS_CHAINED:
        gdc_launch_dependents()
    to_log2 = softmax_scale * LOG2_E
    norm = tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)) * (1.0 + NORM)
    error_of = norm * to_log2
    rows = tl.arange(0, BLOCK_R)
    is_row = rows < TOKENS * GROUP
    row_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    top = row_max
    row_sum = tl.zeros([BLOCK_R], tl.float32)
    of_numbers = batch * stride_nb + kv_head.to(tl.int64) * stride_nh + k_begin
    next_scales, next_residuals = _numbers(scales_ptr, residuals_ptr, of_numbers, begin * BLOCK_N, seqlen_k, BLOCK_N)
    for tile in tl.range(begin, end):
        scales, residuals = (
            next_scales,
            next_residuals,
        )  # loaded a tile ahead: no product takes them, so the compiler does not
        next_scales, next_residuals = _numbers(
            scales_ptr, residuals_ptr, of_numbers, (tile + 1) * BLOCK_N, seqlen_k, BLOCK_N
        )
        k = load_cached(quantized_ptr, None, 0, batch, kv_head, k_begin, tile * BLOCK_N, seqlen_k, stride_pb * PLANE_UNIT,
                        stride_ps * PLANE_UNIT, stride_ph * PLANE_UNIT, HEAD_DIM, BLOCK_N, BLOCK_D, 0)  # fmt: skip
        scores = tl.dot(q, k.to(q.dtype).T, input_precision=DOT_PRECISION) * (scales * to_log2)[None, :]
        error = error_of[:, None] * residuals[None, :]
        upper, lower = scores + error, scores - error
        bounded = upper - lower < float("inf")  # a NaN is not
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = (keys[None, :] >= row_low[:, None]) & (keys[None, :] < row_high[:, None])
        upper = tl.where(bounded, _capped(upper, softcap_log2, 1, HAS_SOFTCAP), float("inf"))
        upper = tl.where(seen, upper, float("-inf"))
        lower = tl.where(bounded & seen, _capped(lower, softcap_log2, -1, HAS_SOFTCAP), float("-inf"))
        tile_top = tl.max(upper, 1)
        # a tile with a score that may be anything has no mass to count on
        base = tl.where(tile_top == float("-inf"), 0.0, tl.minimum(tile_top, LARGEST_FINITE))
        tile_sum = tl.sum(tl.exp2(lower - base[:, None]), 1)
        has_mass = tile_sum > 0.0
        new_max = tl.maximum(row_max, tl.where(has_mass, base, float("-inf")))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.where(has_mass, tile_sum * tl.exp2(base - shift), 0.0)
        row_max = new_max
        top = tl.maximum(top, tile_top)
        of_tile = (tl.cast(group, tl.int64) * num_k_tiles + tile) * (TOKENS * GROUP) + rows
        tl.store(maxima_ptr + of_tile, tile_top, mask=is_row)
        tl.store(lower_ptr + of_tile, tl.where(has_mass, base + tl.log2(tile_sum), float("-inf")), mask=is_row)
        if RETURN_WORK:  # such a tile is retained, and its sum is not asked for
            tl.store(sums_ptr + of_tile, tl.sum(tl.exp2(tl.minimum(upper - base[:, None], 0.0)), 1), mask=is_row)
    of_split = (group * num_splits + tl.program_id(1)) * (TOKENS * GROUP) + rows
    tl.store(split_max_ptr + of_split, row_max, mask=is_row)
    tl.store(split_sum_ptr + of_split, row_sum, mask=is_row)
    tl.store(split_top_ptr + of_split, top, mask=is_row)


def plane_arguments(plane: KeyPlane) -> dict[str, Any]:
    """Of the kernel; strides in units that its compiler knows to be aligned."""
    batch, head, key = plane.quantized.stride()[:3]
    unit = next(unit for unit in (16, 8, 1) if all(stride % unit == 0 for stride in (batch, head, key)))
    return {
        "quantized_ptr": plane.quantized,
        "scales_ptr": plane.scales,
        "residuals_ptr": plane.residuals,
        "stride_pb": batch // unit,
        "stride_ps": key // unit,
        "stride_ph": head // unit,
        "stride_nb": plane.scales.stride(0),
        "stride_nh": plane.scales.stride(1),
        "PLANE_UNIT": unit,
    }

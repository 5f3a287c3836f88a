# SPDX-License-Identifier: Apache-2.0
"""First pass of a decode that reads the keys' INT8 plane: for each tile and row the largest score there can be, and the least mass.

A row's product with the plane is one of INT8 digits, exact, and no key is converted (``decode_plane_rows``). How far a score may lie
from it is in ``key_plane``. The second pass is that of ``decode_two_pass``. A step of the loop scores TILES tiles, one to a warp
where there are as many: none has to reduce over warps.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .decode_chain import gdc_launch_dependents, gdc_wait
from .decode_plane_rows import ROWS_AT_ONCE, digit_lines, joined_digits
from .decode_rows import RUNTIME_VALUES, decode_place, decode_rows, split_range
from .key_plane import DIGITS_ERROR, KeyPlane
from .launch_cache import INT32_END
from .tile_config import PlaneLaunch, padded_head_dim
from .tile_steps import LOG2_E

PLANE_VALUES = [*RUNTIME_VALUES, "stride_pb", "stride_ps", "stride_ph", "stride_nb", "stride_nh"]
WIDEST_COLUMN = 512  # bytes: rows as long as this one leave few registers
MOST_SCORES = 4096  # of a step
ERROR = tl.constexpr(DIGITS_ERROR)
LARGEST_FINITE = tl.constexpr(3e38)
SOFTCAP_ROUNDING = tl.constexpr(2.0**-19)  # of the kernels' tanh in both passes, relative to the softcap


@triton.jit
def _capped(scores, softcap_log2, SIGN: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """A bound of scores as one of capped scores, the cap is monotone; none stays none. SIGN: 1 for an upper bound."""
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        capped = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap_log2)) + 1.0)
        capped = softcap_log2 * (capped + SIGN * SOFTCAP_ROUNDING)
        scores = tl.where(tl.abs(scores) < float("inf"), capped, scores)
    return scores


@triton.jit
def _numbers(numbers_ptr, keys, end):
    """Scales or residuals of keys, zero from ``end`` on."""
    return tl.load(numbers_ptr + keys, mask=keys < end, other=0.0)


@triton.jit
def _largest_of_tiles(x):
    """(SIDE, rows, REPEATS, TILES, 8) -> (rows, TILES)."""
    return tl.max(tl.max(tl.max(x, 2), 3), 0)


@triton.jit
def _of_tiles(x):
    """(rows, TILES) -> (1, rows, 1, TILES, 1), in the layout that the reductions came from."""
    return tl.expand_dims(tl.expand_dims(tl.expand_dims(x, 0), 3), 2)


@triton.jit
def _sum_of_tiles(x):
    """(SIDE, rows, REPEATS, TILES, 8) -> (rows, TILES)."""
    return tl.sum(tl.sum(tl.sum(x, 2), 3), 0)


@triton.jit(do_not_specialize=PLANE_VALUES)
def score_plane_kernel(
    q_ptr, quantized_ptr, scales_ptr, residuals_ptr, maxima_ptr, sums_ptr, lower_ptr, split_max_ptr, split_sum_ptr, split_top_ptr,
    bounds_ptr, stride_qb, stride_qs, stride_qh, stride_pb, stride_ps, stride_ph, stride_nb, stride_nh,
    q_begin, q_end, k_begin, k_end, num_q_tiles, num_k_tiles, num_kv_heads, num_splits, window_left, window_right,
    softmax_scale, softcap_log2, tau,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, SIDE: tl.constexpr, TILES: tl.constexpr, STRIDE_UNIT: tl.constexpr, PLANE_UNIT: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    RETURN_WORK: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """One split, (num_groups, num_k_tiles, rows) of each tile and (num_groups, num_splits, rows) of the split, in log2 units.

    maxima: upper bounds of a row's largest score. lower: lower bounds of log2 of its mass. sums (RETURN_WORK): upper bounds of its
    mass over exp2(maxima). split_max, split_sum: a lower bound of the split's mass; split_top: the largest of maxima.
    """
    group = tl.program_id(0)
    q_tile, kv_head, sequence, q_begin, k_begin, seqlen_q, seqlen_k = decode_place(
        group, num_q_tiles, num_kv_heads, bounds_ptr, q_begin, q_end, k_begin, k_end, HAS_BOUNDS
    )
    _, _, row_low, row_high, _, low, high = decode_rows(
        q_tile, seqlen_q, seqlen_k, window_left, window_right, tau, TOKENS, GROUP, BLOCK_R, HAS_LEFT, HAS_RIGHT
    )
    begin, end = split_range(tl.program_id(1), num_splits, low, high, BLOCK_N)
    last_key = tl.minimum(end * BLOCK_N, seqlen_k)
    row_high = tl.minimum(row_high, last_key)
    if IS_CHAINED:
        gdc_wait()  # for whatever wrote q and the plane
    batch = sequence.to(tl.int64)
    q, to_log2, norm = digit_lines(
        q_ptr, batch, kv_head, q_tile, q_begin, seqlen_q, stride_qb * STRIDE_UNIT, stride_qs * STRIDE_UNIT, stride_qh * STRIDE_UNIT,
        softmax_scale * LOG2_E, HEAD_DIM, BLOCK_D, TOKENS, GROUP, BLOCK_R, SIDE,
    )  # fmt: skip
    if IS_CHAINED:
        gdc_launch_dependents()
    REPEATS: tl.constexpr = BLOCK_N // SIDE // 8
    COLUMNS: tl.constexpr = TILES * REPEATS * 8
    row_scale = tl.max(to_log2.reshape(SIDE, BLOCK_R), 0)[:, None]  # one of equal ones
    to_log2 = to_log2.reshape(SIDE, BLOCK_R, 1, 1, 1)
    norm = norm.reshape(SIDE, BLOCK_R, 1, 1, 1)
    rows = tl.arange(0, BLOCK_R)[:, None]
    is_row = rows < TOKENS * GROUP
    tiles = tl.arange(0, TILES)[None, :]

    # a column's tile is in the bits that say which warp has it
    column = tl.arange(0, COLUMNS)
    first_key = column // 8 % TILES * BLOCK_N + (column // (8 * TILES) * 8 + column % 8) * SIDE
    dim = tl.arange(0, SIDE * BLOCK_D)
    column_keys = first_key[:, None] + (dim // BLOCK_D)[None, :]
    of_column = column_keys * (stride_ps * PLANE_UNIT) + (dim % BLOCK_D)[None, :]
    in_head = (dim % BLOCK_D < HEAD_DIM)[None, :]
    plane = quantized_ptr + batch * (stride_pb * PLANE_UNIT) + kv_head.to(tl.int64) * (stride_ph * PLANE_UNIT)
    side = tl.arange(0, SIDE)[:, None, None, None]
    repeat = tl.arange(0, REPEATS)[None, :, None, None]
    keys = side + (repeat * 8 + tl.arange(0, 8)[None, None, None, :]) * SIDE
    keys += tl.arange(0, TILES)[None, None, :, None] * BLOCK_N  # (SIDE, REPEATS, TILES, 8)

    of_numbers = batch * stride_nb + kv_head.to(tl.int64) * stride_nh + k_begin
    scales_ptr += of_numbers
    residuals_ptr += of_numbers
    row_max = tl.full([BLOCK_R, TILES], float("-inf"), tl.float32)
    top = row_max
    row_sum = tl.zeros([BLOCK_R, TILES], tl.float32)
    next_scales = _numbers(scales_ptr, keys + begin * BLOCK_N, last_key)
    next_residuals = _numbers(residuals_ptr, keys + begin * BLOCK_N, last_key)
    for tile in tl.range(begin, end, TILES):
        start = tile * BLOCK_N
        # loaded a step ahead: no product takes them, so the compiler does not
        scales, residuals = next_scales, next_residuals
        next_scales = _numbers(scales_ptr, keys + (start + TILES * BLOCK_N), last_key)
        next_residuals = _numbers(residuals_ptr, keys + (start + TILES * BLOCK_N), last_key)
        of_step = plane + (k_begin + start).to(tl.int64) * (stride_ps * PLANE_UNIT)
        k = tl.load(of_step + of_column, mask=(column_keys < last_key - start) & in_head, other=0)
        product = joined_digits(tl.dot(q, k.T, out_dtype=tl.int32), SIDE * BLOCK_R, COLUMNS)
        units = product.to(tl.float32).reshape(SIDE, BLOCK_R, REPEATS, TILES, 8)
        scale = scales.reshape(SIDE, 1, REPEATS, TILES, 8)
        error = norm * residuals.reshape(SIDE, 1, REPEATS, TILES, 8) + scale * (HEAD_DIM * ERROR)
        in_step = keys.reshape(SIDE, 1, REPEATS, TILES, 8)
        seen = in_step < _of_tiles((row_high - start)[:, None])
        if HAS_LEFT:
            seen &= in_step >= _of_tiles((row_low - start)[:, None])
        upper = tl.where(seen, units * scale + error, float("-inf"))
        lower = tl.where(seen, units * scale - error, float("-inf"))
        tile_top = _capped(_largest_of_tiles(upper) * row_scale, softcap_log2, 1, HAS_SOFTCAP)
        # a tile with a score that may be anything has no mass to count on
        base = tl.where(tile_top == float("-inf"), 0.0, tl.minimum(tile_top, LARGEST_FINITE))
        of_base = _of_tiles(base)
        lower = _capped(lower * to_log2, softcap_log2, -1, HAS_SOFTCAP)
        tile_sum = _sum_of_tiles(tl.exp2(lower - of_base))
        has_mass = tile_sum > 0.0
        new_max = tl.maximum(row_max, tl.where(has_mass, base, float("-inf")))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.where(has_mass, tile_sum * tl.exp2(base - shift), 0.0)
        row_max = new_max
        top = tl.maximum(top, tile_top)
        of_tile = (tl.cast(group, tl.int64) * num_k_tiles + tile + tiles) * (TOKENS * GROUP) + rows
        is_tile = is_row & (tile + tiles < end)
        tl.store(maxima_ptr + of_tile, tile_top, mask=is_tile)
        tl.store(lower_ptr + of_tile, tl.where(has_mass, base + tl.log2(tile_sum), float("-inf")), mask=is_tile)
        if RETURN_WORK:  # such a tile is retained, and its sum is not asked for
            upper = _capped(upper * to_log2, softcap_log2, 1, HAS_SOFTCAP)
            tl.store(sums_ptr + of_tile, _sum_of_tiles(tl.exp2(tl.minimum(upper - of_base, 0.0))), mask=is_tile)
    of_split = (group * num_splits + tl.program_id(1)) * (TOKENS * GROUP) + tl.arange(0, BLOCK_R)
    is_row = tl.arange(0, BLOCK_R) < TOKENS * GROUP
    split_max = tl.max(row_max, 1)
    shift = tl.where(split_max == float("-inf"), 0.0, split_max)
    tl.store(split_max_ptr + of_split, split_max, mask=is_row)
    tl.store(split_sum_ptr + of_split, tl.sum(row_sum * tl.exp2(row_max - shift[:, None]), 1), mask=is_row)
    tl.store(split_top_ptr + of_split, tl.max(top, 1), mask=is_row)


def plane_arguments(plane: KeyPlane, block_r: int, block_n: int, launch: PlaneLaunch) -> dict[str, Any]:
    """Of the kernel, for tiles of so many rows, a power of two, and keys; strides in units that its compiler knows to be aligned.

    Raises:
        ValueError: for a plane whose keys lie so far apart that a step has no 32-bit offsets.
    """
    batch, head, key = plane.quantized.stride()[:3]
    unit = next(unit for unit in (16, 8, 1) if all(stride % unit == 0 for stride in (batch, head, key)))
    block_d = padded_head_dim(plane.quantized.shape[-1])
    if key * max(launch.step, block_n) >= INT32_END:
        raise ValueError(
            f"key_plane.quantized: {key} bytes from key to key are too many, at most 2^31 over {launch.step} keys"
        )
    side = max(1, min(ROWS_AT_ONCE // block_r, WIDEST_COLUMN // block_d, block_n // ROWS_AT_ONCE))
    block_r = max(block_r, ROWS_AT_ONCE // side)
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
        "BLOCK_R": block_r,
        "SIDE": side,
        "TILES": max(1, min(launch.step, MOST_SCORES // block_r) // block_n),
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }

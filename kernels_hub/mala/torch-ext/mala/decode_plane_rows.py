# SPDX-License-Identifier: Apache-2.0
"""Rows of q as lines of a product with the INT8 plane: a number, and two INT8 digits of each coordinate.

A tensor core takes 16 lines, both digits of 8 rows. Where there are fewer rows they are there once for each of SIDE keys, whose
coordinates lie side by side in one column of the other operand, with zeros for the other keys: so every line is a score that somebody
asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .key_plane import DIGIT_BASE, LARGEST_COVERED, LARGEST_UNITS, NORM_ROUNDING, SMALLEST_KEY, SMALLEST_SCALE

ROWS_AT_ONCE = 8  # whose two digits are the lines of one product
BASE, UNITS = tl.constexpr(DIGIT_BASE), tl.constexpr(LARGEST_UNITS)
NORM = tl.constexpr(NORM_ROUNDING)
SMALLEST, COVERED = tl.constexpr(SMALLEST_KEY), tl.constexpr(LARGEST_COVERED)
LEAST_SCALE = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def digit_lines(q_ptr, batch, kv_head, q_tile, q_begin, seqlen_q, stride_qb, stride_qs, stride_qh, to_log2, HEAD_DIM: tl.constexpr,
                BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr,
                SIDE: tl.constexpr):  # fmt: skip
    """int8 (2 SIDE BLOCK_R, SIDE BLOCK_D): of each 16 lines, 8 high digits of rows and then their low ones.

    And (SIDE BLOCK_R,) each: a unit of the product in log2 units, and |q| in units, inf for a row with a NaN or beyond what is covered.
    """
    line = tl.arange(0, 2 * SIDE * BLOCK_R)
    is_high = line % 16 < 8
    place = line // 16 * 8 + line % 8
    row = place % BLOCK_R
    token = q_tile * TOKENS + row // GROUP
    exists = (row < TOKENS * GROUP) & (token < seqlen_q)
    dim = tl.arange(0, BLOCK_D)
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    pointers = q_ptr + batch * stride_qb + (q_begin + token).to(tl.int64) * stride_qs + head * stride_qh
    q = tl.load(pointers[:, None] + dim[None, :], mask=exists[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    q = q.to(tl.float32)
    largest = tl.max(tl.where(tl.abs(q) <= COVERED, tl.abs(q), float("inf")), 1)  # a NaN is not
    size = tl.maximum(largest, SMALLEST)
    to_log2 = size * (1.0 / UNITS) * to_log2
    covered = (to_log2 >= LEAST_SCALE) & (to_log2 <= COVERED)
    # rounded as the definition's, so that a tile at its limit falls on the same side of it
    units = tl.where(covered[:, None], q, 0.0) * (tl.div_rn(1.0, size) * UNITS)[:, None]
    norm = (tl.sqrt_rn(tl.sum(units * units, 1)) + 1.0) * (1.0 + NORM)
    rounded = tl.floor(units + 0.5)
    high = tl.floor(rounded * (1.0 / BASE) + 0.5)
    digits = tl.where(is_high[:, None], high, rounded - high * BASE).to(tl.int8)
    if SIDE > 1:
        mine = (place // BLOCK_R)[:, None] == tl.arange(0, SIDE)[None, :]
        zero = tl.zeros([1], tl.int8)[:, None, None]
        digits = tl.where(mine[:, :, None], digits[:, None, :], zero).reshape(2 * SIDE * BLOCK_R, SIDE * BLOCK_D)
    to_log2 = _of_pairs(tl.where(covered, to_log2, 1.0), SIDE * BLOCK_R)
    return digits, to_log2, _of_pairs(tl.where(covered, norm, float("inf")), SIDE * BLOCK_R)


@triton.jit
def _of_pairs(x, ROWS: tl.constexpr):
    """Numbers of lines as those of rows: both digits have the same."""
    return tl.max(x.reshape(ROWS // 8, 2, 8), 1).reshape(ROWS)


@triton.jit
def joined_digits(product, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """int32 (2 ROWS, COLUMNS), lines as those of ``digit_lines`` -> (ROWS, COLUMNS)."""
    base = tl.where(tl.arange(0, 2) == 0, BASE, 1)[None, :, None, None]
    return tl.sum(product.reshape(ROWS // 8, 2, 8, COLUMNS) * base, 1).reshape(ROWS, COLUMNS)

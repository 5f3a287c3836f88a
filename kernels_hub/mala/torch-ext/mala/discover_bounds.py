# SPDX-License-Identifier: Apache-2.0
"""What certifies INT8 discovery: keys in INT8 with their norms, and for each row what a tile must reach to matter.

With ``q = q_hat + e_q`` and ``k = mean + k_hat + e_k``, hats in INT8 times a scale, and norms for the rest,

    | q k - q mean - q_hat k_hat |  <=  |e_q| |k_hat| + (|q_hat| + |e_q|) |e_k|

A row's first tiles are retained by every query tile, so their exact normalizer is one that the rule's never falls below. The limit
it gives is what ``q_hat k_hat`` and the error on the right together must reach in a tile for the exact test to retain it.

That limit grows on the way. After a tile whose largest score in a row is m, the row's limit is at least m + log2(tau / L_q): if the
tile is retained, its mass, at least that of m, is in the normalizer; and if it is not, m is below the limit. So is m less the error.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rule import FORWARD_SLACK, limit_of, log2_threshold
from .support import set_bit
from .tile_steps import key_range, legal_pairs, load_tile

LARGEST = tl.constexpr(127.0)
# of a float32 product of 16-bit numbers, per term, relative to the product of norms
PRODUCT_ROUNDING = tl.constexpr(2.0**-23)
# of the float32 arithmetic on bounds and of the running normalizer: log2 units, and relative
BOUND_ROUNDING = tl.constexpr(2.0**-14)
# numbers per row: inverse INT8 scale, the limit less q mean, the error per |k_hat| and per |e_k|, and what a limit is below the score
# that it comes from; the last four in units of the scale
ROW_NUMBERS = tl.constexpr(5)
# numbers per key tile: INT8 scale, largest |k_hat|, and largest |e_k| with all that rounding may add
KEY_NUMBERS = tl.constexpr(3)
RUNTIME_VALUES = [
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "q_begin", "seqlen_q", "seqlen_k",
    "num_q_tiles", "num_k_tiles", "units_at_once", "num_heads", "num_kv_heads", "num_kv_groups", "words", "window_left", "window_right",
    "scale_log2", "tau",
]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def quantize_keys_kernel(
    k_ptr, mean_ptr, quantized_ptr, norms_ptr, stride_kb, stride_ks, stride_kh, seqlen_k, num_k_tiles, num_kv_heads,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STRIDE_UNIT: tl.constexpr,
):  # fmt: skip
    """One key tile: int8 (BLOCK_N, BLOCK_D), and its KEY_NUMBERS."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (keys < seqlen_k)[:, None] & (offs_d < HEAD_DIM)[None, :]
    k_base = (batch.to(tl.int64) * stride_kb + head.to(tl.int64) * stride_kh) * STRIDE_UNIT
    k_rows = k_ptr + k_base + keys.to(tl.int64)[:, None] * (stride_ks * STRIDE_UNIT)
    k = tl.load(k_rows + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
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
    kept_norm = tl.sqrt(tl.max(tl.sum(kept * kept, 1), 0))
    lost_norm = tl.sqrt(tl.max(tl.sum(lost * lost, 1), 0))
    rounding = tl.sqrt(tl.max(tl.sum(k * k, 1), 0)) * (HEAD_DIM * PRODUCT_ROUNDING)
    # of q mean, and of the arithmetic on scores and errors, which are at most 1.2 |q| |k_hat| each: |e_k| is far below |k_hat|
    rounding += (tl.sqrt(tl.sum(mean * mean, 0)) + 3.0 * kept_norm) * BOUND_ROUNDING
    norms = norms_ptr + tile_index * KEY_NUMBERS
    tl.store(norms, scale)
    tl.store(norms + 1, kept_norm)
    tl.store(norms + 2, lost_norm + rounding)


@triton.jit
def _row_norms(q_tile, mean):
    """Per row: INT8 scale and its inverse, q mean, |q_hat|, |e_q|."""
    q = q_tile.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(q), 1), 1e-30) / LARGEST
    inverse = 1.0 / scale
    kept = tl.floor(q * inverse[:, None] + 0.5) * scale[:, None]
    lost = q - kept
    of_mean = tl.sum(q * mean[None, :], 1)
    return scale, inverse, of_mean, tl.sqrt(tl.sum(kept * kept, 1)), tl.sqrt(tl.sum(lost * lost, 1))


@triton.jit
def first_retained_tile(start_m, seqlen_q, seqlen_k, window_right, BLOCK_N: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """The earliest key tile that holds the nearest key of some row of the query tile: it and the later ones are always retained."""
    nearest = seqlen_k - 1
    if HAS_RIGHT:
        nearest = tl.minimum(nearest, start_m + seqlen_k - seqlen_q + window_right)
    return tl.maximum(nearest, 0) // BLOCK_N


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def bound_rows_kernel(
    q_ptr, k_ptr, mean_ptr, rows_ptr, candidates_ptr, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    q_begin, seqlen_q, seqlen_k, num_q_tiles, num_heads, num_kv_groups, words, window_left, window_right, scale_log2, tau,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """One query tile: its first tiles, exactly, into ``candidates``; ROW_NUMBERS float32 (batch, heads, ROW_NUMBERS, seqlen_q) each."""
    q_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    q_tile_index = program % q_tiles
    head = (program // q_tiles) % num_heads
    batch = program // q_tiles // num_heads
    num_kv_heads = num_heads // num_kv_groups
    kv_head = head // num_kv_groups
    start_m = q_tile_index * BLOCK_M
    in_tile = tl.arange(0, BLOCK_M)
    offs_m = start_m + in_tile
    offs_d = tl.arange(0, BLOCK_D)
    row_exists = offs_m < seqlen_q
    position = offs_m + seqlen_k - seqlen_q
    batch64 = batch.to(tl.int64)
    q_base = (batch64 * stride_qb + head.to(tl.int64) * stride_qh) * STRIDE_UNIT
    k_base = (batch64 * stride_kb + kv_head.to(tl.int64) * stride_kh) * STRIDE_UNIT
    rows = (q_begin + offs_m).to(tl.int64)
    q_tile = tl.load(q_ptr + q_base + rows[:, None] * (stride_qs * STRIDE_UNIT) + offs_d[None, :],
                     mask=row_exists[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
    _, high, _, _, row_low, row_high = key_range(
        start_m, position, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M, HAS_LEFT, HAS_RIGHT
    )
    # each holds the nearest key of some row
    first_seed = first_retained_tile(start_m, seqlen_q, seqlen_k, window_right, BLOCK_N, HAS_RIGHT)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    candidate_row = candidates_ptr + ((batch64 * num_heads + head) * num_q_tiles + q_tile_index) * words
    for tile in range(first_seed, tl.cdiv(high, BLOCK_N)):
        start_n = tile * BLOCK_N
        k_tile = load_tile(k_ptr, k_base, batch, kv_head, 0, start_n, seqlen_k, offs_d, stride_ks * STRIDE_UNIT, HEAD_DIM, True, False,
                           BLOCK_N, BLOCK_D)  # fmt: skip
        scores = tl.dot(q_tile, k_tile.T)
        legal = legal_pairs(
            (start_n + tl.arange(0, BLOCK_N))[None, :], position[:, None], in_tile[:, None], row_exists[:, None], seqlen_k,
            k_ptr, 0, window_left, window_right, HAS_LEFT, HAS_RIGHT, False,
        )  # fmt: skip
        scores = tl.where(legal, scores * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)
        row_max = new_max
        set_bit(candidate_row, tile, start_m >= 0)

    mean = tl.load(mean_ptr + (batch * num_kv_heads + kv_head) * HEAD_DIM + offs_d, mask=offs_d < HEAD_DIM, other=0.0)
    scale, inverse, of_mean, kept_norm, lost_norm = _row_norms(q_tile, mean)
    threshold = log2_threshold(row_high - row_low, tau)
    limit = limit_of(row_max + tl.log2(row_sum), threshold, row_exists, FORWARD_SLACK)
    needed = (limit - (1.0 + tl.abs(limit)) * BOUND_ROUNDING) / scale_log2 - of_mean
    below_score = (threshold - (1.0 + tl.abs(threshold)) * BOUND_ROUNDING) / scale_log2 - tl.abs(
        of_mean
    ) * BOUND_ROUNDING
    numbers = rows_ptr + (batch64 * num_heads + head) * ROW_NUMBERS * seqlen_q + offs_m
    tl.store(numbers, inverse, mask=row_exists)
    tl.store(numbers + seqlen_q, needed / scale, mask=row_exists)
    tl.store(numbers + 2 * seqlen_q, lost_norm * (1.0 + BOUND_ROUNDING) / scale, mask=row_exists)
    tl.store(numbers + 3 * seqlen_q, (kept_norm + lost_norm) * (1.0 + BOUND_ROUNDING) / scale, mask=row_exists)
    tl.store(numbers + 4 * seqlen_q, below_score / scale, mask=row_exists)

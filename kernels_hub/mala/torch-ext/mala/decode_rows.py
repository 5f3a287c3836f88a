# SPDX-License-Identifier: Apache-2.0
"""A decode tile's rows: a few new tokens of all query heads that share a KV head, token by token; and where its keys lie.

A KV head is read once for the whole group, and its rows vote on a tile together. Rows that fill the tile up to a power of two do not
exist: they see no key and never vote.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .backward_support import sequence_bounds
from .rule import log2_threshold

# fmt: off
RUNTIME_VALUES = [
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
    "stride_tables", "q_begin", "q_end", "k_begin", "k_end", "total_q", "num_q_tiles", "num_k_tiles", "num_kv_heads", "num_splits",
    "window_left", "window_right", "softmax_scale", "softcap_log2", "tau",
]
# fmt: on


@triton.jit
def decode_place(
    group, num_q_tiles, num_kv_heads, bounds_ptr, q_begin, q_end, k_begin, k_end, HAS_BOUNDS: tl.constexpr
):
    """The tile's q_tile, kv_head, sequence, and the sequence's q_begin, k_begin, seqlen_q, seqlen_k."""
    q_tile = group % num_q_tiles
    kv_head = (group // num_q_tiles) % num_kv_heads
    sequence = group // num_q_tiles // num_kv_heads
    q_begin, q_end, k_begin, k_end = sequence_bounds(bounds_ptr, sequence, q_begin, q_end, k_begin, k_end, HAS_BOUNDS)
    return q_tile, kv_head, sequence, q_begin, k_begin, q_end - q_begin, k_end - k_begin


@triton.jit
def decode_rows(q_tile, seqlen_q, seqlen_k, window_left, window_right, tau,
                TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr, HAS_LEFT: tl.constexpr,
                HAS_RIGHT: tl.constexpr):  # fmt: skip
    """Per row: token, exists, first and one past the last visible key, log2(tau / L_q); and the first and one past the last of all."""
    row = tl.arange(0, BLOCK_R)
    token = q_tile * TOKENS + row // GROUP
    exists = (row < TOKENS * GROUP) & (token < seqlen_q)
    position = token + seqlen_k - seqlen_q
    row_low = tl.zeros_like(position)
    row_high = row_low + seqlen_k
    if HAS_LEFT:
        row_low = tl.maximum(position - window_left, 0)
    if HAS_RIGHT:
        row_high = tl.minimum(position + window_right + 1, seqlen_k)
    row_low = tl.where(exists, row_low, seqlen_k)
    row_high = tl.where(exists, row_high, 0)
    threshold_log2 = log2_threshold(row_high - row_low, tau)
    return token, exists, row_low, row_high, threshold_log2, tl.min(row_low, 0), tl.max(row_high, 0)


@triton.jit
def tiles_per_split(num_splits, low, high, BLOCK_N: tl.constexpr):
    """Of ``num_splits`` equal parts of the key tiles that hold keys low to high - 1; the last parts may have fewer."""
    return tl.cdiv(tl.maximum(tl.cdiv(high, BLOCK_N) - low // BLOCK_N, 0), num_splits)


@triton.jit
def split_range(split, num_splits, low, high, BLOCK_N: tl.constexpr):
    """Key tiles begin to end - 1 of one of the ``num_splits`` parts."""
    first = low // BLOCK_N
    per_split = tiles_per_split(num_splits, low, high, BLOCK_N)
    begin = first + split * per_split
    return begin, tl.minimum(begin + per_split, tl.cdiv(high, BLOCK_N))


@triton.jit
def load_queries(q_ptr, batch, head, token, exists, q_begin, stride_qb, stride_qs, stride_qh, HEAD_DIM: tl.constexpr,
                 GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """(BLOCK_R, BLOCK_D) rows of the query heads from ``head`` on."""
    dims = tl.arange(0, BLOCK_D)
    heads = (head + tl.arange(0, BLOCK_R) % GROUP).to(tl.int64)
    rows = q_ptr + batch * stride_qb + (q_begin + token).to(tl.int64) * stride_qs + heads * stride_qh
    return tl.load(rows[:, None] + dims[None, :], mask=exists[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_cached(x_ptr, tables_ptr, stride_tables, batch, kv_head, k_begin, start_n, seqlen_k, stride_b, stride_s, stride_h,
                WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """(BLOCK_N, BLOCK_D) rows of a cache, zero beyond the sequence.

    PAGE 0: (batch, keys, kv_heads, width). Else (pages, PAGE, kv_heads, width), and a row of the tables lists a sequence's pages.
    """
    keys = start_n + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    exists = keys < seqlen_k
    keys += k_begin
    if PAGE > 0:
        page = tl.load(tables_ptr + batch * stride_tables + keys // PAGE, mask=exists, other=-1).to(tl.int64)
        exists &= page >= 0
        rows = page * stride_b + (keys % PAGE).to(tl.int64) * stride_s
    else:
        rows = batch * stride_b + keys.to(tl.int64) * stride_s
    pointers = x_ptr + kv_head.to(tl.int64) * stride_h + rows[:, None] + dims[None, :]
    return tl.load(pointers, mask=exists[:, None] & (dims < WIDTH)[None, :], other=0.0)


@triton.jit
def decode_scores(q, k, start_n, row_low, row_high, softmax_scale, softcap_log2, LOG2_E: tl.constexpr, BLOCK_N: tl.constexpr,
                  HAS_SOFTCAP: tl.constexpr, DOT_PRECISION: tl.constexpr):  # fmt: skip
    """(BLOCK_R, BLOCK_N) scores in log2 units, -inf where a row does not see a key."""
    scores = tl.dot(q, k.T, input_precision=DOT_PRECISION) * (softmax_scale * LOG2_E)
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        scores = softcap_log2 * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap_log2)) + 1.0))
    keys = (start_n + tl.arange(0, BLOCK_N))[None, :]
    return tl.where((keys >= row_low[:, None]) & (keys < row_high[:, None]), scores, float("-inf"))

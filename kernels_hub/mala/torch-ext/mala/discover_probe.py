# SPDX-License-Identifier: Apache-2.0
"""A look at a call before it is made: the tiles that a few query tiles of each head retain against their full normalizers.

Two kernels: scores of the sampled rows, split over the keys; then each sample's normalizer and its count. The counts are an estimate
of the whole call's, made to choose between ways that all satisfy the rule. Nothing else depends on them.
"""

from __future__ import annotations

import contextlib
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .query_tile import Settings
from .rule import log2_threshold
from .tile_config import padded_head_dim
from .tile_steps import LOG2_E
from .visibility import Sequences

SAMPLES = 2  # query tiles of a head: the last before the middle, and the last
KEYS_OF_A_PROGRAM = 1024
TILES_AT_ONCE = 16

# fmt: off
SCORES_RUNTIME = [
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "q_begin", "seqlen_q", "seqlen_k", "num_k_tiles",
    "num_splits", "tiles_of_a_program", "num_heads", "num_kv_groups", "window_left", "window_right", "scale_log2",
]
COUNT_RUNTIME = [
    "seqlen_q", "seqlen_k", "num_k_tiles", "num_splits", "num_heads", "num_kv_groups", "window_left", "window_right", "tau",
]
# fmt: on


@triton.jit
def sampled_tile(sample, seqlen_q, SAMPLES: tl.constexpr, BLOCK_M: tl.constexpr):
    """First row of a sampled query tile: a whole one wherever there is one."""
    end = tl.cdiv(seqlen_q * (sample + 1), SAMPLES)
    return tl.maximum(end - BLOCK_M, 0) // BLOCK_M * BLOCK_M


@triton.jit(do_not_specialize=SCORES_RUNTIME)
def sample_scores_kernel(
    q_ptr, k_ptr, maxima_ptr, normalizers_ptr, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, q_begin, seqlen_q,
    seqlen_k, num_k_tiles, num_splits, tiles_of_a_program, num_heads, num_kv_groups, window_left, window_right, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    SAMPLES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """One part of the keys for one sampled tile: each row's maximum in each key tile, and its normalizer over the part (log2)."""
    split = tl.program_id(0)
    unit = tl.program_id(1)  # batch, head, sample
    sample = unit % SAMPLES
    head = (unit // SAMPLES) % num_heads
    batch = (unit // SAMPLES // num_heads).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    rows = sampled_tile(sample, seqlen_q, SAMPLES, BLOCK_M) + offs_m
    position = rows + seqlen_k - seqlen_q
    q_base = (batch * stride_qb + head.to(tl.int64) * stride_qh) * STRIDE_UNIT
    k_base = (batch * stride_kb + (head // num_kv_groups).to(tl.int64) * stride_kh) * STRIDE_UNIT
    q_rows = q_ptr + q_base + (q_begin + rows).to(tl.int64)[:, None] * (stride_qs * STRIDE_UNIT)
    in_head = offs_d < HEAD_DIM
    q_tile = tl.load(q_rows + offs_d[None, :], mask=(rows < seqlen_q)[:, None] & in_head[None, :], other=0.0)
    maxima = maxima_ptr + unit.to(tl.int64) * num_k_tiles * BLOCK_M
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    first = split * tiles_of_a_program
    for tile in tl.range(first, tl.minimum(first + tiles_of_a_program, num_k_tiles)):
        keys = tile * BLOCK_N + offs_n
        k_rows = k_ptr + k_base + keys.to(tl.int64)[:, None] * (stride_ks * STRIDE_UNIT)
        k_tile = tl.load(k_rows + offs_d[None, :], mask=(keys < seqlen_k)[:, None] & in_head[None, :], other=0.0)
        legal = (rows < seqlen_q)[:, None] & (keys < seqlen_k)[None, :]
        if HAS_LEFT:
            legal = legal & (keys[None, :] >= position[:, None] - window_left)
        if HAS_RIGHT:
            legal = legal & (keys[None, :] <= position[:, None] + window_right)
        scores = tl.where(legal, tl.dot(q_tile, k_tile.T) * scale_log2, float("-inf"))
        tile_max = tl.max(scores, 1)
        tl.store(maxima + tile * BLOCK_M + offs_m, tile_max)
        new_max = tl.maximum(row_max, tile_max)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)
        row_max = new_max
    tl.store(normalizers_ptr + (unit * num_splits + split) * BLOCK_M + offs_m, row_max + tl.log2(row_sum))


@triton.jit(do_not_specialize=COUNT_RUNTIME)
def count_retained_kernel(
    maxima_ptr, normalizers_ptr, counts_ptr, seqlen_q, seqlen_k, num_k_tiles, num_splits, num_heads, num_kv_groups, window_left,
    window_right, tau,
    BLOCK_M: tl.constexpr, TILES: tl.constexpr, SAMPLES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """One sampled tile: adds its retained and its visible key tiles to (num_kv_heads, 2) counts."""
    unit = tl.program_id(0)
    head = (unit // SAMPLES) % num_heads
    offs_m = tl.arange(0, BLOCK_M)
    offs_t = tl.arange(0, TILES)
    rows = sampled_tile(unit % SAMPLES, seqlen_q, SAMPLES, BLOCK_M) + offs_m
    position = rows + seqlen_k - seqlen_q
    low = tl.zeros([BLOCK_M], tl.int32)
    high = low + seqlen_k
    if HAS_LEFT:
        low = tl.maximum(position - window_left, 0)
    if HAS_RIGHT:
        high = tl.minimum(position + window_right + 1, seqlen_k)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(0, num_splits, TILES):
        splits = start + offs_t
        parts = tl.load(
            normalizers_ptr + (unit * num_splits + splits)[:, None] * BLOCK_M + offs_m[None, :],
            mask=(splits < num_splits)[:, None],
            other=float("-inf"),
        )
        new = tl.maximum(largest, tl.max(parts, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(largest - shift) + tl.sum(tl.exp2(parts - shift[None, :]), 0)
        largest = new
    limit = largest + tl.log2(total) + log2_threshold(high - low, tau)
    maxima = maxima_ptr + unit.to(tl.int64) * num_k_tiles * BLOCK_M
    retained = tl.zeros([TILES], tl.int32)
    visible = tl.zeros([TILES], tl.int32)
    for start in tl.range(0, num_k_tiles, TILES):
        tiles = start + offs_t
        of_rows = tl.load(
            maxima + tiles[:, None] * BLOCK_M + offs_m[None, :],
            mask=(tiles < num_k_tiles)[:, None],
            other=float("-inf"),
        )
        constrains = of_rows != float("-inf")
        visible += tl.max(constrains.to(tl.int32), 1)
        retained += tl.max((constrains & ~(of_rows < limit[None, :])).to(tl.int32), 1)
    counts = counts_ptr + (head // num_kv_groups) * 2
    tl.atomic_add(counts, tl.sum(retained, 0), sem="relaxed")
    tl.atomic_add(counts + 1, tl.sum(visible, 0), sem="relaxed")


def sampled_counts(q: Tensor, k: Tensor, settings: Settings, sequences: Sequences) -> Tensor:
    """int32 (num_kv_heads, 2) on the device: retained and visible key tiles of the samples of a KV head's query heads.

    q (batch, seqlen_q, num_heads, head_dim) and k share their sequences' common bounds; masks, sinks and softcap are not looked at.
    """
    batch, _, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    num_kv_groups = num_heads // num_kv_heads
    block_m, block_n = settings.tile
    q_begin, q_end, _, seqlen_k = sequences.common
    num_k_tiles = math.ceil(seqlen_k / block_n)
    tiles_of_a_program = max(KEYS_OF_A_PROGRAM // block_n, 1)
    num_splits = math.ceil(num_k_tiles / tiles_of_a_program)
    units = batch * num_heads * SAMPLES
    counts = torch.zeros(num_kv_heads, 2, dtype=torch.int32, device=q.device)
    maxima = torch.empty(units, num_k_tiles, block_m, dtype=torch.float32, device=q.device)
    normalizers = torch.empty(units, num_splits, block_m, dtype=torch.float32, device=q.device)
    left, right = settings.window
    unit = 8 if all(stride % 8 == 0 for x in (q, k) for stride in x.stride()[:3]) else 1
    strides = [stride // unit for x in (q, k) for stride in x.stride()[:3]]
    seqlen_q = q_end - q_begin
    sides = {"SAMPLES": SAMPLES, "HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0}
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        sample_scores_kernel[(num_splits, units)](
            q, k, maxima, normalizers, *strides, q_begin, seqlen_q, seqlen_k, num_k_tiles, num_splits, tiles_of_a_program,
            num_heads, num_kv_groups, left, right, settings.softmax_scale * LOG2_E.value, HEAD_DIM=head_dim, BLOCK_M=block_m,
            BLOCK_N=block_n, BLOCK_D=padded_head_dim(head_dim), STRIDE_UNIT=unit, **sides, num_warps=4, num_stages=2,
        )  # fmt: skip
        count_retained_kernel[(units,)](
            maxima, normalizers, counts, seqlen_q, seqlen_k, num_k_tiles, num_splits, num_heads, num_kv_groups, left, right,
            settings.tau, BLOCK_M=block_m, TILES=TILES_AT_ONCE, **sides, num_warps=4,
        )  # fmt: skip
    return counts

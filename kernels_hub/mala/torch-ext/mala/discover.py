# SPDX-License-Identifier: Apache-2.0
"""Discovery in INT8: which tiles may be retained, found at a fraction of the cost of exact scores, and certified.

``discover_bounds.py`` prepares keys and rows; here query rows are quantised in registers and pass over the INT8 keys. A tile whose
bound stays below the limit in every row would be skipped by the exact test too; all others are candidates, one bit each as in
``support``. The forward tests the candidates exactly in the rule's order: out, lse and the retained tiles are those of a search
through all tiles. Masks are not looked at: a key that is not visible can only add candidates.
"""

from __future__ import annotations

import contextlib
import math
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blockwise import Settings
from .discover_bounds import (
    KEY_NUMBERS,
    ROW_NUMBERS,
    RUNTIME_VALUES,
    bound_rows_kernel,
    first_retained_tile,
    quantize_keys_kernel,
)
from .program_order import longest_first, units_at_once
from .support_bits import empty_support
from .tile_config import DISCOVERY, DiscoveryConfig, padded_head_dim
from .tile_steps import LOG2_E
from .tma import HAS_GLUON_FOR_HOPPER, nvidia_major
from .visibility import Sequences


@triton.jit
def _either(a, b):
    return a | b


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def discover_kernel(
    q_ptr, rows_ptr, quantized_ptr, norms_ptr, candidates_ptr, stride_qb, stride_qs, stride_qh,
    q_begin, seqlen_q, seqlen_k, num_q_tiles, num_k_tiles, units_at_once, num_heads, num_kv_groups, words, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    GROUP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """GROUP neighbouring query tiles of one head: a bit for each key tile before their first ones that may be retained."""
    num_groups = tl.cdiv(seqlen_q, GROUP * BLOCK_M)
    place, unit = longest_first(num_groups, units_at_once)
    q_tile_index = (num_groups - 1 - place) * GROUP  # late rows see the most keys
    head = unit % num_heads
    batch = unit // num_heads
    kv_head = head // num_kv_groups
    start_m = q_tile_index * BLOCK_M
    offs_m = start_m + tl.arange(0, GROUP * BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row_exists = offs_m < seqlen_q
    batch64 = batch.to(tl.int64)
    q_base = (batch64 * stride_qb + head.to(tl.int64) * stride_qh) * STRIDE_UNIT
    q_rows = q_ptr + q_base + (q_begin + offs_m).to(tl.int64)[:, None] * (stride_qs * STRIDE_UNIT)
    q_tile = tl.load(q_rows + offs_d[None, :], mask=row_exists[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    numbers = rows_ptr + (batch64 * num_heads + head) * ROW_NUMBERS * seqlen_q + offs_m
    inverse = tl.load(numbers, mask=row_exists, other=1.0)
    needed = tl.load(numbers + seqlen_q, mask=row_exists, other=float("inf"))
    per_kept = tl.load(numbers + 2 * seqlen_q, mask=row_exists, other=0.0)
    per_lost = tl.load(numbers + 3 * seqlen_q, mask=row_exists, other=0.0)
    below_score = tl.load(numbers + 4 * seqlen_q, mask=row_exists, other=0.0)
    q_int8 = tl.floor(q_tile.to(tl.float32) * inverse[:, None] + 0.5).to(tl.int8)

    first = 0
    if HAS_LEFT:
        first = tl.maximum(start_m + seqlen_k - seqlen_q - window_left, 0) // BLOCK_N
    last_start = tl.minimum(start_m + (GROUP - 1) * BLOCK_M, (seqlen_q - 1) // BLOCK_M * BLOCK_M)
    last = first_retained_tile(last_start, seqlen_q, seqlen_k, window_right, BLOCK_N, HAS_RIGHT)
    # of each row's own query tile, whose last keys the first rows of it do not see
    own_last = first_retained_tile(offs_m // BLOCK_M * BLOCK_M, seqlen_q, seqlen_k, window_right, BLOCK_N, HAS_RIGHT)
    q_tiles = q_tile_index + tl.arange(0, GROUP)
    candidate_rows = candidates_ptr + ((batch64 * num_heads + head) * num_q_tiles + q_tiles) * words
    kv_tiles = (batch64 * (num_heads // num_kv_groups) + kv_head) * num_k_tiles
    key_rows = tl.arange(0, BLOCK_N)
    found = tl.zeros([GROUP * BLOCK_M], tl.int32)
    for place in tl.range(0, last - first):
        tile = last - 1 - place  # in the rule's order: a tile can raise the limit of those after it
        k_tile = tl.load(quantized_ptr + ((kv_tiles + tile) * BLOCK_N + key_rows)[:, None] * BLOCK_D + offs_d[None, :])
        norms = norms_ptr + (kv_tiles + tile) * KEY_NUMBERS
        score = tl.max(tl.dot(q_int8, k_tile.T), 1).to(tl.float32) * tl.load(norms)
        error = per_kept * tl.load(norms + 1) + per_lost * tl.load(norms + 2)
        found |= tl.where(score + error < needed, 0, 1) << (tile % 32)  # a NaN is a candidate
        needed = tl.where(tile < own_last, tl.maximum(needed, score - error + below_score), needed)
        if (tile % 32 == 0) | (tile == first):
            of_tiles = tl.reduce(tl.reshape(found, [GROUP, BLOCK_M]), 1, _either)
            tl.atomic_or(candidate_rows + tile // 32, of_tiles, mask=q_tiles < num_q_tiles, sem="relaxed")
            found = tl.zeros([GROUP * BLOCK_M], tl.int32)


def launch_discover(
    q: Tensor,
    k: Tensor,
    settings: Settings,
    sequences: Sequences,
    config: DiscoveryConfig = DISCOVERY,
    use_hopper: Optional[bool] = None,
) -> Tensor:
    """Candidates, int32 (batch, num_heads, q_tiles, words), of q (batch, seqlen_q, num_heads, head_dim) and k.

    ``config`` and ``use_hopper`` override the shipped launch shape and the choice of the kernel, for measurements and tests.
    """
    batch, _, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    num_kv_groups = num_heads // num_kv_heads
    block_m, block_n = settings.tile
    block_d = padded_head_dim(head_dim)
    num_q_tiles, num_k_tiles = sequences.tile_grid(settings.tile)
    q_begin, q_end, _, seqlen_k = sequences.common
    seqlen_q = q_end - q_begin
    q_tiles = math.ceil(seqlen_q / block_m)
    candidates = empty_support(batch, num_heads, (num_q_tiles, num_k_tiles), q.device)
    if not candidates.numel() or not q_tiles:
        return candidates
    words = candidates.shape[-1]
    mean = k.mean(1, dtype=torch.float32)  # (batch, num_kv_heads, head_dim)
    quantized = torch.empty(batch, num_kv_heads, num_k_tiles * block_n, block_d, dtype=torch.int8, device=q.device)
    norms = torch.empty(batch, num_kv_heads, num_k_tiles, KEY_NUMBERS.value, dtype=torch.float32, device=q.device)
    rows = torch.empty(batch, num_heads, ROW_NUMBERS.value, seqlen_q, dtype=torch.float32, device=q.device)
    left, right = settings.window
    unit = 8 if all(stride % 8 == 0 for x in (q, k) for stride in x.stride()[:3]) else 1
    q_strides, k_strides = ([stride // unit for stride in x.stride()[:3]] for x in (q, k))
    blocks = {"HEAD_DIM": head_dim, "BLOCK_N": block_n, "BLOCK_D": block_d, "STRIDE_UNIT": unit}
    sides = {"HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0}
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        quantize_keys_kernel[(num_k_tiles, num_kv_heads, batch)](
            k, mean, quantized, norms, *k_strides, seqlen_k, num_k_tiles, num_kv_heads, **blocks, num_warps=8,
        )  # fmt: skip
        bound_rows_kernel[(q_tiles * num_heads * batch,)](
            q, k, mean, rows, candidates, *q_strides, *k_strides, q_begin, seqlen_q, seqlen_k, num_q_tiles,
            num_heads, num_kv_groups, words, left, right, settings.softmax_scale * LOG2_E.value, settings.tau,
            BLOCK_M=block_m, **blocks, **sides, num_warps=4, num_stages=1,  # one or two tiles: small programs, and many of them
        )  # fmt: skip
        if use_hopper is None and HAS_GLUON_FOR_HOPPER and nvidia_major(q.device) == 9:
            from . import discover_hopper

            use_hopper = discover_hopper.supports(q, settings.tile)
        if use_hopper:
            from .discover_hopper import launch_discover_hopper

            launch_discover_hopper(q, rows, quantized, norms, candidates, settings, sequences)
            return candidates
        group = max(config.rows // block_m, 1)
        discover_kernel[(math.ceil(q_tiles / group) * num_heads * batch,)](
            q, rows, quantized, norms, candidates, *q_strides, q_begin, seqlen_q, seqlen_k, num_q_tiles, num_k_tiles,
            units_at_once(num_heads * batch, num_kv_groups, num_k_tiles * block_n * block_d, q.device), num_heads, num_kv_groups,
            words, left, right, BLOCK_M=block_m, GROUP=group, **blocks, **sides,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return candidates

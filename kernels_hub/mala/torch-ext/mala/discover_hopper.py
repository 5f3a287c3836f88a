# SPDX-License-Identifier: Apache-2.0
"""INT8 discovery on Hopper: three query tiles per program, one warpgroup each, sharing every key tile.

As in ``forward_hopper.py`` one more warp brings key tiles through a ring of STAGES buffers. Nothing here asks for a vote: each row
keeps one bit per key tile in a register, and rows are put together once in 32 tiles. Queries stay in registers; a warpgroup has one
product at a time, which runs while the other two judge theirs.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .blockwise import Settings
from .discover_bounds import KEY_NUMBERS, ROW_NUMBERS, RUNTIME_VALUES, first_retained_tile
from .hopper_steps import release
from .program_order import longest_first, units_at_once
from .tile_config import padded_head_dim
from .visibility import Sequences

ROWS_PER_WARPGROUP = 64  # of a Hopper matrix product
WARPGROUPS = gl.constexpr(3)
STAGES = 8
MAX_KEYS = 128  # of a tile: this Triton compiles no INT8 product with 256
MAX_SHARED_BYTES = 227 * 1024


@gluon.jit
def _either(a, b):
    """Bits of both, for a reduction."""
    return a | b


@gluon.jit
def _load_keys(k_desc, k_ring, k_ready, k_free, first_row, first, last, STAGES: gl.constexpr, BLOCK_N: gl.constexpr):
    """The loading warp: key tiles last - 1 down to first, each into the next ring buffer once all warpgroups are done with it."""
    for step in range(last - first):
        stage = step % STAGES
        mbarrier.wait(k_free.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
        row = first_row + (last - 1 - step) * BLOCK_N
        tma.async_copy_global_to_shared(k_desc, [row, 0], k_ready.index(stage), k_ring.index(stage))


@gluon.jit
def _start_products(q_tile, k_ring, k_ready, zeros, step, STAGES: gl.constexpr):
    """Start the INT8 product with the ``step``-th key tile."""
    stage = step % STAGES
    mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
    return warpgroup_mma(q_tile, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _load_rows(q_ptr, rows_ptr, stride_qs, start_m, q_begin, seqlen_q, row_layout: gl.constexpr, HEAD_DIM: gl.constexpr,
                BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STRIDE_UNIT: gl.constexpr):  # fmt: skip
    """A query tile in INT8, and its rows' numbers in ``discover_bounds``: needed, per_kept, per_lost, below_score."""
    threads: gl.constexpr = BLOCK_D // 8
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])
    load_m = start_m + gl.arange(0, BLOCK_M, gl.SliceLayout(1, load_layout))
    load_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, load_layout))
    mask = (load_m < seqlen_q)[:, None] & (load_d < HEAD_DIM)[None, :]
    q_rows = (q_begin + load_m).to(gl.int64)
    q = gl.load(q_ptr + q_rows[:, None] * (stride_qs * STRIDE_UNIT) + load_d[None, :], mask=mask, other=0.0).to(
        gl.float32
    )
    inverse = gl.load(rows_ptr + load_m, mask=load_m < seqlen_q, other=1.0)
    q_int8 = gl.floor(q * inverse[:, None] + 0.5).to(gl.int8)

    offs_m = start_m + gl.arange(0, BLOCK_M, row_layout)
    row_exists = offs_m < seqlen_q
    needed = gl.load(rows_ptr + seqlen_q + offs_m, mask=row_exists, other=float("inf"))
    per_kept = gl.load(rows_ptr + 2 * seqlen_q + offs_m, mask=row_exists, other=0.0)
    per_lost = gl.load(rows_ptr + 3 * seqlen_q + offs_m, mask=row_exists, other=0.0)
    below_score = gl.load(rows_ptr + 4 * seqlen_q + offs_m, mask=row_exists, other=0.0)
    return q_int8, needed, per_kept, per_lost, below_score


@gluon.jit
def _discover_rows(warpgroup: gl.constexpr, q_ptr, rows_ptr, norms_ptr, candidates_ptr, words, k_ring, k_ready, k_free, stride_qs,
                   first_q_tile, first, last, own_last, q_begin, seqlen_q, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
                   BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STRIDE_UNIT: gl.constexpr, STAGES: gl.constexpr,
                   KEY_NUMBERS: gl.constexpr):  # fmt: skip
    """One warpgroup: its query tile against key tiles last - 1 down to first; ``candidates_ptr``: words of the program's first.

    The rows see all of the tiles before ``own_last``.
    """
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    start_m = (first_q_tile + warpgroup) * BLOCK_M
    q_int8, needed, per_kept, per_lost, below_score = _load_rows(
        q_ptr, rows_ptr, stride_qs, start_m, q_begin, seqlen_q, row_layout, HEAD_DIM, BLOCK_M, BLOCK_D, STRIDE_UNIT)  # fmt: skip
    q_tile = gl.convert_layout(q_int8, gl.DotOperandLayout(0, score_layout, 4))
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.int32, score_layout)
    found = gl.zeros([BLOCK_M], gl.int32, row_layout)
    for step in range(last - first):
        tile = last - 1 - step
        products = _start_products(q_tile, k_ring, k_ready, zeros, step, STAGES)
        norms = norms_ptr + tile * KEY_NUMBERS
        k_scale = gl.load(norms)
        error = per_kept * gl.load(norms + 1) + per_lost * gl.load(norms + 2)
        products = warpgroup_mma_wait(0, deps=[products])
        mbarrier.arrive(k_free.index(step % STAGES), count=1)
        score = gl.max(products, 1).to(gl.float32) * k_scale
        found |= gl.where(score + error < needed, 0, 1) << (tile % 32)  # a NaN is a candidate
        if tile < own_last:
            needed = gl.maximum(needed, score - error + below_score)
        if (tile % 32 == 0) | (tile == first):
            own_words = candidates_ptr + warpgroup * words
            gl.atomic_or(own_words + tile // 32, gl.reduce(found, 0, _either), mask=start_m < seqlen_q, sem="relaxed")
            found = gl.zeros([BLOCK_M], gl.int32, row_layout)


@gluon.jit(do_not_specialize=RUNTIME_VALUES)
def discover_hopper_kernel(
    q_ptr, k_desc, rows_ptr, norms_ptr, candidates_ptr, stride_qb, stride_qs, stride_qh,
    q_begin, seqlen_q, seqlen_k, num_q_tiles, num_k_tiles, units_at_once, num_heads, num_kv_groups, words, window_left, window_right,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STRIDE_UNIT: gl.constexpr,
    STAGES: gl.constexpr, ROW_NUMBERS: gl.constexpr, KEY_NUMBERS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Three neighbouring query tiles of one head."""
    num_groups = gl.cdiv(seqlen_q, WARPGROUPS * BLOCK_M)
    place, unit = longest_first(num_groups, units_at_once)
    first_q_tile = (num_groups - 1 - place) * WARPGROUPS  # late rows see the most keys
    head = unit % num_heads
    batch = unit // num_heads
    num_kv_heads = num_heads // num_kv_groups
    kv_tiles = (batch * num_kv_heads + head // num_kv_groups) * num_k_tiles
    start_m = first_q_tile * BLOCK_M
    first = 0
    if HAS_LEFT:
        first = gl.maximum(start_m + seqlen_k - seqlen_q - window_left, 0) // BLOCK_N
    last_start = gl.minimum(start_m + (WARPGROUPS - 1) * BLOCK_M, (seqlen_q - 1) // BLOCK_M * BLOCK_M)
    last = first_retained_tile(last_start, seqlen_q, seqlen_k, window_right, BLOCK_N, HAS_RIGHT)
    last = gl.maximum(last, first)
    own_latest = first_retained_tile(start_m + 2 * BLOCK_M, seqlen_q, seqlen_k, window_right, BLOCK_N, HAS_RIGHT)
    own_middle = first_retained_tile(start_m + BLOCK_M, seqlen_q, seqlen_k, window_right, BLOCK_N, HAS_RIGHT)
    own_earliest = first_retained_tile(start_m, seqlen_q, seqlen_k, window_right, BLOCK_N, HAS_RIGHT)
    batch64 = batch.to(gl.int64)
    head_index = batch64 * num_heads + head
    q_head = q_ptr + (batch64 * stride_qb + head.to(gl.int64) * stride_qh) * STRIDE_UNIT
    head_rows = rows_ptr + head_index * ROW_NUMBERS * seqlen_q
    head_norms = norms_ptr + kv_tiles.to(gl.int64) * KEY_NUMBERS
    head_words = candidates_ptr + (head_index * num_q_tiles + first_q_tile) * words

    k_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_D], k_desc.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=WARPGROUPS)

    latest: gl.constexpr = 2  # the rows that see most keys
    middle: gl.constexpr = 1
    earliest: gl.constexpr = 0
    gl.warp_specialize([
        (_discover_rows, (latest, q_head, head_rows, head_norms, head_words, words, k_ring, k_ready, k_free, stride_qs, first_q_tile,
                          first, last, own_latest, q_begin, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, STRIDE_UNIT, STAGES,
                          KEY_NUMBERS)),
        (_discover_rows, (middle, q_head, head_rows, head_norms, head_words, words, k_ring, k_ready, k_free, stride_qs, first_q_tile,
                          first, last, own_middle, q_begin, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, STRIDE_UNIT, STAGES,
                          KEY_NUMBERS)),
        (_discover_rows, (earliest, q_head, head_rows, head_norms, head_words, words, k_ring, k_ready, k_free, stride_qs, first_q_tile,
                          first, last, own_earliest, q_begin, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, STRIDE_UNIT, STAGES,
                          KEY_NUMBERS)),
        (_load_keys, (k_desc, k_ring, k_ready, k_free, kv_tiles * BLOCK_N, first, last, STAGES, BLOCK_N)),
    ], [4, 4, 1], [160, 160, 24])  # fmt: skip
    release(k_ready, STAGES)
    release(k_free, STAGES)


@cache
def _key_layout(width: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, width), element_bitwidth=8, rank=2)


def supports(q: Tensor, tile: tuple[int, int]) -> bool:
    """Does this kernel cover query tiles of such rows?"""
    block_d = padded_head_dim(q.shape[-1])
    shared = STAGES * tile[1] * block_d + 1024
    return tile[0] == ROWS_PER_WARPGROUP and 32 <= tile[1] <= MAX_KEYS and shared <= MAX_SHARED_BYTES


def launch_discover_hopper(
    q: Tensor,
    rows: Tensor,
    quantized: Tensor,
    norms: Tensor,
    candidates: Tensor,
    settings: Settings,
    sequences: Sequences,
) -> None:
    """Add to ``candidates`` what :func:`discover.launch_discover` prepared ``rows``, ``quantized`` and ``norms`` for."""
    batch, _, num_heads, head_dim = q.shape
    num_kv_heads, num_k_tiles = norms.shape[1:3]
    block_m, block_n = settings.tile
    block_d = quantized.shape[-1]
    keys = quantized.view(-1, block_d)
    q_begin, q_end, _, seqlen_k = sequences.common
    seqlen_q = q_end - q_begin
    left, right = settings.window
    unit = 8 if all(stride % 8 == 0 for stride in q.stride()[:3]) else 1
    num_groups = math.ceil(seqlen_q / (WARPGROUPS.value * block_m))
    with torch.cuda.device(q.device):
        discover_hopper_kernel[(num_groups * num_heads * batch,)](
            q, TensorDescriptor(keys, list(keys.shape), [block_d, 1], [block_n, block_d], _key_layout(block_d)),
            rows, norms, candidates, *(stride // unit for stride in q.stride()[:3]),
            q_begin, seqlen_q, seqlen_k, *candidates.shape[2:3], num_k_tiles,
            units_at_once(num_heads * batch, num_heads // num_kv_heads, num_k_tiles * block_n * block_d, q.device),
            num_heads, num_heads // num_kv_heads, candidates.shape[-1], left, right,
            HEAD_DIM=head_dim, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, STRIDE_UNIT=unit, STAGES=STAGES,
            ROW_NUMBERS=ROW_NUMBERS.value, KEY_NUMBERS=KEY_NUMBERS.value, HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0,
            num_warps=4,
        )  # fmt: skip

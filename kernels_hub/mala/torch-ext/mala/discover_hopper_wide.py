# SPDX-License-Identifier: Apache-2.0
"""INT8 discovery on Hopper with three query tiles per program, one warpgroup each: a third fewer reads of the keys than with two.

Otherwise as ``discover_hopper.py``, whose passes over the keys are probably bound by the L2 cache (docs/performance.md). Queries
stay in registers; a warpgroup has one product at a time, which runs while the other two judge theirs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from .discover_bounds import RUNTIME_VALUES, first_retained_tile
from .discover_hopper import either, load_keys, load_rows, reaches, start_products

WARPGROUPS = gl.constexpr(3)


@gluon.jit
def _discover_rows(warpgroup: gl.constexpr, q_ptr, rows_ptr, norms_ptr, candidates_ptr, words, k_ring, k_ready, k_free, stride_qs,
                   first_q_tile, first, last, q_begin, seqlen_q, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
                   BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STRIDE_UNIT: gl.constexpr, STAGES: gl.constexpr,
                   KEY_NUMBERS: gl.constexpr):  # fmt: skip
    """One warpgroup: its query tile against key tiles first to last - 1; ``candidates_ptr``: words of the program's first."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    start_m = (first_q_tile + warpgroup) * BLOCK_M
    q_int8, needed, per_kept, per_lost, per_norm = load_rows(
        q_ptr, rows_ptr, stride_qs, start_m, q_begin, seqlen_q, row_layout, HEAD_DIM, BLOCK_M, BLOCK_D, STRIDE_UNIT)  # fmt: skip
    q_tile = gl.convert_layout(q_int8, gl.DotOperandLayout(0, score_layout, 4))
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.int32, score_layout)
    found = gl.zeros([BLOCK_M], gl.int32, row_layout)
    for tile in range(first, last):
        step = tile - first
        products = start_products(q_tile, k_ring, k_ready, zeros, step, STAGES)
        products = warpgroup_mma_wait(0, deps=[products])
        mbarrier.arrive(k_free.index(step % STAGES), count=1)
        found |= reaches(products, norms_ptr, tile, needed, per_kept, per_lost, per_norm, KEY_NUMBERS) << (tile % 32)
        if (tile % 32 == 31) | (tile == last - 1):
            own_words = candidates_ptr + warpgroup * words
            gl.atomic_or(own_words + tile // 32, gl.reduce(found, 0, either), mask=start_m < seqlen_q, sem="relaxed")
            found = gl.zeros([BLOCK_M], gl.int32, row_layout)


@gluon.jit(do_not_specialize=RUNTIME_VALUES)
def discover_hopper_wide_kernel(
    q_ptr, k_desc, rows_ptr, norms_ptr, candidates_ptr, stride_qb, stride_qs, stride_qh,
    q_begin, seqlen_q, seqlen_k, num_q_tiles, num_k_tiles, num_heads, num_kv_groups, words, window_left, window_right,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STRIDE_UNIT: gl.constexpr,
    STAGES: gl.constexpr, ROW_NUMBERS: gl.constexpr, KEY_NUMBERS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Three neighbouring query tiles of one head."""
    program = gl.program_id(0)
    num_groups = gl.cdiv(seqlen_q, WARPGROUPS * BLOCK_M)
    first_q_tile = (num_groups - 1 - program % num_groups) * WARPGROUPS  # the longest rows first
    head = (program // num_groups) % num_heads
    batch = program // num_groups // num_heads
    num_kv_heads = num_heads // num_kv_groups
    kv_tiles = (batch * num_kv_heads + head // num_kv_groups) * num_k_tiles
    start_m = first_q_tile * BLOCK_M
    first = 0
    if HAS_LEFT:
        first = gl.maximum(start_m + seqlen_k - seqlen_q - window_left, 0) // BLOCK_N
    last_start = gl.minimum(start_m + (WARPGROUPS - 1) * BLOCK_M, (seqlen_q - 1) // BLOCK_M * BLOCK_M)
    last = first_retained_tile(last_start, seqlen_q, seqlen_k, window_right, BLOCK_N, HAS_RIGHT)
    last = gl.maximum(last, first)
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
                          first, last, q_begin, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, STRIDE_UNIT, STAGES, KEY_NUMBERS)),
        (_discover_rows, (middle, q_head, head_rows, head_norms, head_words, words, k_ring, k_ready, k_free, stride_qs, first_q_tile,
                          first, last, q_begin, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, STRIDE_UNIT, STAGES, KEY_NUMBERS)),
        (_discover_rows, (earliest, q_head, head_rows, head_norms, head_words, words, k_ring, k_ready, k_free, stride_qs, first_q_tile,
                          first, last, q_begin, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, STRIDE_UNIT, STAGES, KEY_NUMBERS)),
        (load_keys, (k_desc, k_ring, k_ready, k_free, kv_tiles * BLOCK_N, first, last, STAGES, BLOCK_N)),
    ], [4, 4, 1], [160, 160, 24])  # fmt: skip

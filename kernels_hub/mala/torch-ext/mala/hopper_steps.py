# SPDX-License-Identifier: Apache-2.0
"""Steps of the Hopper forward: tiles into shared memory, a score product under way, scores with their row maximum."""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .rule import largest_of_rows, reaches_limit

LOG2_E = gl.constexpr(math.log2(math.e))


@gluon.jit
def release(barriers, COUNT: gl.constexpr):
    """End ``COUNT`` barriers, once all warpgroups are done.

    Not for tidiness: a barrier that nobody names after the warpgroups start counts as dead, and Triton lays what it hands them on its
    memory, though it was never invalidated, which PTX wants. Alone on a GPU that went well; where processes took turns on one, calls
    hung or wrote to addresses that were none (results/shared_gpu_h200.json).
    """
    for i in gl.static_range(COUNT):
        mbarrier.invalidate(barriers.index(i))


@gluon.jit
def load_tiles(
    k_desc, v_desc, k_ring, v_buffers, k_ready, k_free, v_ready, v_free, batch, kv_head, first, last, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, CAN_SKIP: gl.constexpr,
):  # fmt: skip
    """The loading warp: key tiles last - 1 down to first, each into the next ring buffer once all warpgroups are done with it.

    Values too where none can be skipped (CAN_SKIP False): both warpgroups read the same.
    """
    for tile in range(last - first):
        stage = tile % STAGES
        row = (last - 1 - tile) * BLOCK_N
        mbarrier.wait(k_free.index(stage), ((tile // STAGES) & 1) ^ 1)
        mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [batch, kv_head, row, 0], k_ready.index(stage), k_ring.index(stage))
        if not CAN_SKIP:
            mbarrier.wait(v_free.index(tile % 2), ((tile // 2) & 1) ^ 1)
            mbarrier.expect(v_ready.index(tile % 2), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [batch, kv_head, row, 0], v_ready.index(tile % 2), v_buffers.index(tile % 2)
            )


@gluon.jit
def start_scores(q_tile, k_ring, k_ready, zeros, tile, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
                 k_layout: gl.constexpr):  # fmt: skip
    """Start the (BLOCK_M, BLOCK_N) product of the ``tile``-th visited key tile."""
    stage = tile % STAGES
    mbarrier.wait(k_ready.index(stage), (tile // STAGES) & 1)
    k_tile = k_ring.index(stage)._reinterpret(k_ring.dtype, [BLOCK_N, BLOCK_D], k_layout)
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def is_any(rows):
    """As in ``rule.py``, whose form suits compute capability 10.0 and has no layout here."""
    every: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    return gl.max(gl.convert_layout(rows.to(gl.int32), every), 0) > 0


@gluon.jit
def is_tile_retained(tile_max, limit_log2):
    """True if some constraining row reaches its limit."""
    return is_any(reaches_limit(tile_max, limit_log2))


@gluon.jit
def judge(product, running: gl.constexpr, index, tile, k_free, sight, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
          HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr):  # fmt: skip
    """Scores with softcap and mask applied, and their row maximum, once their product has ended.

    ``running``: products begun after it, which need not end. The ``tile``-th visited key tile, ``index``, is then free for others.
    ``sight``: what the rows see, (offs_n, position, row_exists, seqlen_k, whole_low, whole_high, window_left, window_right, scale_log2,
    softcap_log2); keys from whole_low to whole_high - 1 are seen by all rows.
    """
    (
        offs_n, position, row_exists, seqlen_k, whole_low, whole_high, window_left, window_right, scale_log2, softcap_log2,
    ) = sight  # fmt: skip
    scores = warpgroup_mma_wait(running, deps=[product])
    mbarrier.arrive(k_free.index(tile % STAGES), count=1)
    start_n = index * BLOCK_N
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        scores = softcap_log2 * (1.0 - 2.0 / (gl.exp2(scores * (2.0 * LOG2_E * scale_log2 / softcap_log2)) + 1.0))
    if (start_n < whole_low) | (start_n + BLOCK_N > whole_high):
        keys = start_n + offs_n
        legal = (keys < seqlen_k)[None, :] & row_exists[:, None]
        if HAS_LEFT:
            legal &= keys[None, :] >= position[:, None] - window_left
        if HAS_RIGHT:
            legal &= keys[None, :] <= position[:, None] + window_right
        scores = gl.where(legal, scores, float("-inf"))
    return scores, largest_of_rows(scores)

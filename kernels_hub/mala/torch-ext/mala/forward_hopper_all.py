# SPDX-License-Identifier: Apache-2.0
"""The Hopper forward where no tile can be skipped (tau = 0): no vote, and no wait for values.

Both warpgroups read the same value tiles, which the loading warp brings ahead of time. The product of a tile's probabilities with its
values runs while the next tile's scores become probabilities: p waits in registers, and there is one set of scores at a time. (Two
sets, the next product running ahead, left the assembler no order but one product after the other.)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper_steps import judge, start_scores
from .rule import online_softmax_step


@gluon.jit
def _pass_by(k_ready, k_free, v_ready, v_free, begin, end, STAGES: gl.constexpr):
    """Tiles of the other warpgroup alone: visited, not read."""
    for tile in range(begin, end):
        mbarrier.wait(k_ready.index(tile % STAGES), (tile // STAGES) & 1)
        mbarrier.arrive(k_free.index(tile % STAGES), count=1)
        mbarrier.wait(v_ready.index(tile % 2), (tile // 2) & 1)
        mbarrier.arrive(v_free.index(tile % 2), count=1)


@gluon.jit
def _weights(product, running: gl.constexpr, tile, last, k_free, sight, row_max, row_sum, acc, dtype: gl.constexpr,
             STAGES: gl.constexpr, BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
             HAS_SOFTCAP: gl.constexpr):  # fmt: skip
    """The softmax step of a visited tile, as in ``tile_steps.py``: p as an operand, the decay of acc's rows, row_max, row_sum."""
    acc_layout: gl.constexpr = acc.type.layout
    _, _, _, _, _, _, _, _, to_log2, _ = sight
    if HAS_SOFTCAP:
        to_log2 = 1.0
    scores, tile_max = judge(
        product, running, last - 1 - tile, tile, k_free, sight, STAGES, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP
    )
    p, decay, row_max, row_sum = online_softmax_step(scores, to_log2, tile_max, row_max, row_sum, True)
    p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc_layout, 2))
    return p, gl.convert_layout(decay, gl.SliceLayout(1, acc_layout))[:, None], row_max, row_sum


@gluon.jit
def _start_product(
    p, tile, v_buffers, v_ready, acc, BLOCK_N: gl.constexpr, BLOCK_DV: gl.constexpr, v_layout: gl.constexpr
):
    """The product of a visited tile's weights with its values, under way."""
    mbarrier.wait(v_ready.index(tile % 2), (tile // 2) & 1)
    v_tile = v_buffers.index(tile % 2)._reinterpret(v_buffers.dtype, [BLOCK_N, BLOCK_DV], v_layout)
    return warpgroup_mma(p, v_tile, acc, is_async=True)


@gluon.jit
def attend_all_tiles(
    q_tile, k_ring, v_buffers, k_ready, k_free, v_ready, v_free, first, last, low, high, sight, row_max, row_sum, acc,
    zeros, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    k_layout: gl.constexpr, v_layout: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """row_max, row_sum, acc after key tiles last - 1 down to first, of which this warpgroup's rows see keys low to high - 1."""
    count = last - first
    begin = gl.minimum(gl.maximum(last - gl.cdiv(gl.maximum(high, 0), BLOCK_N), 0), count)
    end = gl.maximum(gl.minimum(last - low // BLOCK_N, count), begin)
    _pass_by(k_ready, k_free, v_ready, v_free, 0, begin, STAGES)
    if begin < end:
        scores = start_scores(q_tile, k_ring, k_ready, zeros, begin, STAGES, BLOCK_N, BLOCK_D, k_layout)
        p, decay, row_max, row_sum = _weights(
            scores, 0, begin, last, k_free, sight, row_max, row_sum, acc, v_buffers.dtype, STAGES, BLOCK_N, HAS_LEFT, HAS_RIGHT,
            HAS_SOFTCAP)  # fmt: skip
        for tile in range(begin + 1, end):
            scores = start_scores(q_tile, k_ring, k_ready, zeros, tile, STAGES, BLOCK_N, BLOCK_D, k_layout)
            product = _start_product(p, tile - 1, v_buffers, v_ready, acc, BLOCK_N, BLOCK_DV, v_layout)
            next_p, decay, row_max, row_sum = _weights(
                scores, 1, tile, last, k_free, sight, row_max, row_sum, acc, v_buffers.dtype, STAGES, BLOCK_N, HAS_LEFT, HAS_RIGHT,
                HAS_SOFTCAP)  # fmt: skip
            acc, p = warpgroup_mma_wait(0, deps=[product, p])
            mbarrier.arrive(v_free.index((tile - 1) % 2), count=1)
            acc *= decay
            p = next_p
        product = _start_product(p, end - 1, v_buffers, v_ready, acc, BLOCK_N, BLOCK_DV, v_layout)
        acc, p = warpgroup_mma_wait(0, deps=[product, p])
        mbarrier.arrive(v_free.index((end - 1) % 2), count=1)
    _pass_by(k_ready, k_free, v_ready, v_free, end, count, STAGES)
    return row_max, row_sum, acc

# SPDX-License-Identifier: Apache-2.0
"""What a warpgroup of the Hopper forward does with a scored tile: the rule's step, and the values of what is retained."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .hopper_steps import is_any, is_tile_retained
from .rule import FORWARD_SLACK, limit_of, online_softmax_step
from .support import set_bit


@gluon.jit
def allocate(scores, tile_max, index, v_loads, row_max, row_sum, acc, limit, omitted, sight, values, q_tile_exists, tiles_base,
             support_base, threshold_log2, BLOCK_N: gl.constexpr, BLOCK_DV: gl.constexpr, v_layout: gl.constexpr,
             HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, RETURN_WORK: gl.constexpr,
             SAVE_SUPPORT: gl.constexpr):  # fmt: skip
    """The rule's step for one scored tile, as in ``tile_steps.py``; ``sight`` as in ``hopper_steps.judge``."""
    _, position, row_exists, seqlen_k, _, _, window_left, window_right, scale_log2, _ = sight
    v_desc, v_smem, v_ready, batch, kv_head = values
    acc_layout: gl.constexpr = acc.type.layout
    start_n = index * BLOCK_N
    to_log2 = scale_log2
    if HAS_SOFTCAP:
        to_log2 = 1.0
    retained = is_tile_retained(tile_max * to_log2, limit)
    if RETURN_WORK:
        visible = is_any(tile_max != float("-inf"))
        code = (1 + retained.to(gl.int32)) * visible.to(gl.int32)
        gl.store(tiles_base + index, code.to(gl.int8), mask=q_tile_exists)
    if retained:
        mbarrier.expect(v_ready, v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [batch, kv_head, index * BLOCK_N, 0], v_ready, v_smem)
        p, decay, row_max, row_sum = online_softmax_step(scores, to_log2, tile_max, row_max, row_sum, True)
        limit = limit_of(row_max * to_log2 + gl.log2(row_sum), threshold_log2, row_exists, FORWARD_SLACK)
        p = gl.convert_layout(p.to(v_desc.dtype), gl.DotOperandLayout(0, acc_layout, 2))
        acc *= gl.convert_layout(decay, gl.SliceLayout(1, acc_layout))[:, None]
        mbarrier.wait(v_ready, v_loads & 1)
        v_tile = v_smem._reinterpret(v_desc.dtype, [BLOCK_N, BLOCK_DV], v_layout)
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, v_tile, acc, is_async=True)])
        v_loads += 1
        if SAVE_SUPPORT:
            set_bit(support_base, index, q_tile_exists)
        if RETURN_WORK:
            omitted *= decay
    elif RETURN_WORK:
        low = gl.zeros_like(position)
        high = low + seqlen_k
        if HAS_LEFT:
            low = gl.maximum(low, position - window_left)
        if HAS_RIGHT:
            high = gl.minimum(high, position + window_right + 1)
        inside = gl.minimum(high, start_n + BLOCK_N) - gl.maximum(low, start_n)
        contribution = gl.exp2((tile_max - gl.where(row_max == float("-inf"), 0.0, row_max)) * to_log2)
        omitted += gl.where(inside > 0, inside * contribution, 0.0)
    return v_loads, row_max, row_sum, acc, limit, omitted

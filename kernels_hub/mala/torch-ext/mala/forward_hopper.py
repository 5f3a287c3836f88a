# SPDX-License-Identifier: Apache-2.0
"""The fused forward on Hopper: three query tiles per program, or two, one warpgroup each, sharing every key tile.

In portable Triton all warps of a program wait for a score product, judge it and vote together, and the tensor cores idle
meanwhile. Here each warpgroup owns a query tile of BLOCK_M rows and votes alone: while one judges, another's product runs. One more
warp brings key tiles through a ring of STAGES buffers; a value tile is fetched by the warpgroup that retains it. Two warpgroups have
registers for two key tiles at a time, and one vote settles both where both are skipped. There are two where three do not fit, and
with CAN_SKIP False, where nothing votes (``forward_hopper_all.py``).
Same tiles, same order and same rule functions as ``forward_kernel.py``, hence the same retained set.

``forward_hopper_launch.py`` says which calls it covers; the portable kernel takes all others.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .forward_hopper_all import attend_all_tiles
from .hopper_allocate import allocate
from .hopper_steps import LOG2_E, is_any, judge, load_tiles, release, start_scores
from .program_order import longest_first
from .rule import log2_threshold, reaches_limit

LN_2 = gl.constexpr(math.log(2.0))
# fmt: off
RUNTIME_VALUES = [
    "stride_lb", "stride_lh", "stride_tb", "stride_th", "stride_tm",
    "support_rows", "support_words",
    "q_begin", "seqlen_q", "seqlen_k", "num_q_tiles", "units_at_once", "num_heads", "num_kv_groups", "window_left", "window_right",
    "scale_log2", "softcap_log2", "tau",
]
# fmt: on


@gluon.jit
def _attend_rows(warpgroup: gl.constexpr, arguments,
                 BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, STAGES: gl.constexpr,
                 HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
                 RETURN_WORK: gl.constexpr, SAVE_SUPPORT: gl.constexpr, CAN_SKIP: gl.constexpr, WARPGROUPS: gl.constexpr):  # fmt: skip
    """One warpgroup: one query tile of BLOCK_M rows against key tiles last - 1 down to first."""
    (
        q_desc, k_ring, v_desc, out_desc, lse_ptr, sinks_ptr, tiles_ptr, certificate_ptr, support_ptr,
        q_and_out, v_buffers, q_ready, k_ready, k_free, v_ready, v_free,
        stride_lb, stride_lh, stride_tb, stride_th, stride_tm, support_rows, support_words,
        batch, head, kv_head, first_q_tile, first, last, q_begin, seqlen_q, seqlen_k, num_q_tiles, num_heads,
        window_left, window_right, scale_log2, softcap_log2, tau,
    ) = arguments  # fmt: skip
    dtype: gl.constexpr = k_ring.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_DV], dtype)

    q_tile_index = first_q_tile + warpgroup
    start_m = q_tile_index * BLOCK_M
    q_smem = q_and_out.index(warpgroup)._reinterpret(dtype, [1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    mbarrier.expect(q_ready.index(warpgroup), q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [batch, head, q_begin + start_m, 0], q_ready.index(warpgroup), q_smem)

    offs_m = start_m + gl.arange(0, BLOCK_M, row_layout)
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, score_layout))
    row_exists = offs_m < seqlen_q
    position = offs_m + seqlen_k - seqlen_q  # the key a row is aligned with
    whole_low = 0
    whole_high = seqlen_k
    row_low = gl.zeros_like(position)
    row_high = row_low + seqlen_k
    if HAS_LEFT:
        last_position = gl.minimum(start_m + BLOCK_M, seqlen_q) - 1 + seqlen_k - seqlen_q
        whole_low = gl.maximum(last_position - window_left, 0)
        row_low = gl.maximum(position - window_left, 0)
    if HAS_RIGHT:
        whole_high = gl.minimum(start_m + seqlen_k - seqlen_q + window_right + 1, seqlen_k)
        row_high = gl.minimum(position + window_right + 1, seqlen_k)
    threshold_log2 = log2_threshold(row_high - row_low, tau)

    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, row_layout)
    row_sum = gl.zeros([BLOCK_M], gl.float32, row_layout)
    omitted = gl.zeros([BLOCK_M], gl.float32, row_layout)
    limit = gl.where(row_exists, float("-inf"), float("inf"))
    acc = gl.zeros([BLOCK_M, BLOCK_DV], gl.float32, acc_layout)
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, score_layout)
    v_loads = 0
    head64 = head.to(gl.int64)
    batch64 = batch.to(gl.int64)
    tiles_base = tiles_ptr
    if RETURN_WORK:
        tiles_base = tiles_ptr + batch64 * stride_tb + head64 * stride_th + q_tile_index.to(gl.int64) * stride_tm

    support_base = support_ptr
    if SAVE_SUPPORT:
        support_base += ((batch64 * num_heads + head) * support_rows + q_tile_index) * support_words
    q_tile_exists = q_tile_index < num_q_tiles

    mbarrier.wait(q_ready.index(warpgroup), 0)
    q_tile = q_smem._reinterpret(dtype, [BLOCK_M, BLOCK_D], q_layout)
    sight = (
        offs_n, position, row_exists, seqlen_k, whole_low, whole_high, window_left, window_right, scale_log2, softcap_log2,
    )  # fmt: skip
    to_log2 = scale_log2
    if HAS_SOFTCAP:
        to_log2 = 1.0
    if CAN_SKIP:
        values = v_desc, v_buffers.index(warpgroup), v_ready.index(warpgroup), batch, kv_head
        count = last - first
        alone = count
        if WARPGROUPS == 2:  # three have registers for one tile at a time
            alone = count % 2
        for tile in range(alone):
            near = start_scores(q_tile, k_ring, k_ready, zeros, tile, STAGES, BLOCK_N, BLOCK_D, k_layout)
            index = last - 1 - tile
            near, near_max = judge(
                near, 0, index, tile, k_free, sight, STAGES, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP
            )
            v_loads, row_max, row_sum, acc, limit, omitted = allocate(
                near, near_max, index, v_loads, row_max, row_sum, acc, limit, omitted, sight, values, q_tile_exists, tiles_base,
                support_base, threshold_log2, BLOCK_N, BLOCK_DV, v_layout, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, RETURN_WORK,
                SAVE_SUPPORT)  # fmt: skip
        if WARPGROUPS == 2:
            for tile in range(alone, count, 2):
                near = start_scores(q_tile, k_ring, k_ready, zeros, tile, STAGES, BLOCK_N, BLOCK_D, k_layout)
                far = start_scores(q_tile, k_ring, k_ready, zeros, tile + 1, STAGES, BLOCK_N, BLOCK_D, k_layout)
                index = last - 1 - tile
                far_index = last - 1 - (tile + 1)
                near, near_max = judge(
                    near, 1, index, tile, k_free, sight, STAGES, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP
                )
                far, far_max = judge(
                    far, 0, far_index, tile + 1, k_free, sight, STAGES, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP
                )
                # where both are skipped the limit stands still between them, so one vote settles both
                if (
                    is_any(reaches_limit(near_max * to_log2, limit) | reaches_limit(far_max * to_log2, limit))
                    | RETURN_WORK
                ):
                    v_loads, row_max, row_sum, acc, limit, omitted = allocate(
                        near, near_max, index, v_loads, row_max, row_sum, acc, limit, omitted, sight, values, q_tile_exists, tiles_base,
                        support_base, threshold_log2, BLOCK_N, BLOCK_DV, v_layout, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, RETURN_WORK,
                        SAVE_SUPPORT)  # fmt: skip
                    v_loads, row_max, row_sum, acc, limit, omitted = allocate(
                        far, far_max, far_index, v_loads, row_max, row_sum, acc, limit, omitted, sight, values, q_tile_exists,
                        tiles_base, support_base, threshold_log2, BLOCK_N, BLOCK_DV, v_layout, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
                        RETURN_WORK, SAVE_SUPPORT)  # fmt: skip
    else:
        row_max, row_sum, acc = attend_all_tiles(
            q_tile, k_ring, v_buffers, k_ready, k_free, v_ready, v_free, first, last, gl.min(row_low, 0), gl.max(row_high, 0), sight,
            row_max, row_sum, acc, zeros, STAGES, BLOCK_N, BLOCK_D, BLOCK_DV, k_layout, v_layout, HAS_LEFT, HAS_RIGHT,
            HAS_SOFTCAP)  # fmt: skip

    row_max *= to_log2
    if HAS_SINKS:  # joins the normalizer after the last tile
        sink_log2 = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
        new_max = gl.maximum(row_max, sink_log2)
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        decay = gl.exp2(row_max - shift)
        row_sum = row_sum * decay + gl.exp2(sink_log2 - shift)
        acc *= gl.convert_layout(decay, gl.SliceLayout(1, acc_layout))[:, None]
        omitted *= decay
        row_max = new_max
    inverse = gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    lse = (row_max + gl.log2(row_sum)) * LN_2
    rows = (q_begin + offs_m).to(gl.int64)
    row_base = batch64 * stride_lb + head64 * stride_lh
    gl.store(lse_ptr + row_base + rows, lse, mask=row_exists)
    if RETURN_WORK:
        gl.store(certificate_ptr + row_base + rows, omitted * inverse, mask=row_exists)
    acc *= gl.convert_layout(inverse, gl.SliceLayout(1, acc_layout))[:, None]
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_DV], dtype)
    out_smem = q_and_out.index(warpgroup)  # q's last product has ended
    out_smem._reinterpret(dtype, [BLOCK_M, BLOCK_DV], out_layout).store(acc.to(dtype))
    fence_async_shared()
    out_smem = out_smem._reinterpret(dtype, [1, 1, BLOCK_M, BLOCK_DV], out_desc.layout)
    tma.async_copy_shared_to_global(out_desc, [batch, head, q_begin + start_m, 0], out_smem)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=RUNTIME_VALUES)
def mala_forward_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, tiles_ptr, certificate_ptr, support_ptr,
    stride_lb, stride_lh, stride_tb, stride_th, stride_tm, support_rows, support_words,
    q_begin, seqlen_q, seqlen_k, num_q_tiles, units_at_once, num_heads, num_kv_groups, window_left, window_right,
    scale_log2, softcap_log2, tau,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
    RETURN_WORK: gl.constexpr, SAVE_SUPPORT: gl.constexpr, CAN_SKIP: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """WARPGROUPS neighbouring query tiles of one head; seqlen_q counts rows from q_begin, the first row that sees a key."""
    num_groups = gl.cdiv(num_q_tiles, WARPGROUPS)
    place, unit = longest_first(num_groups, units_at_once)
    first_q_tile = (num_groups - 1 - place) * WARPGROUPS  # late rows see the most keys
    head = unit % num_heads
    batch = unit // num_heads
    kv_head = head // num_kv_groups
    start_m = first_q_tile * BLOCK_M
    low = 0
    high = seqlen_k
    if HAS_LEFT:
        low = gl.maximum(start_m + seqlen_k - seqlen_q - window_left, 0)
    if HAS_RIGHT:
        last_position = gl.minimum(start_m + WARPGROUPS * BLOCK_M, seqlen_q) - 1 + seqlen_k - seqlen_q
        high = gl.minimum(last_position + window_right + 1, seqlen_k)
    first = low // BLOCK_N
    last = gl.cdiv(gl.maximum(high, 0), BLOCK_N)

    dtype: gl.constexpr = k_desc.dtype
    # a query tile's memory takes its output in the end
    q_is_wider: gl.constexpr = BLOCK_D > BLOCK_DV
    widest: gl.constexpr = BLOCK_D if q_is_wider else BLOCK_DV
    widest_layout: gl.constexpr = q_desc.layout if q_is_wider else out_desc.layout
    q_and_out = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, BLOCK_M, widest], widest_layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=WARPGROUPS)
    for warpgroup in gl.static_range(WARPGROUPS):
        mbarrier.init(q_ready.index(warpgroup), count=1)
        mbarrier.init(v_ready.index(warpgroup), count=1)
        mbarrier.init(v_free.index(warpgroup), count=WARPGROUPS)

    arguments = (
        q_desc, k_ring, v_desc, out_desc, lse_ptr, sinks_ptr, tiles_ptr, certificate_ptr, support_ptr,
        q_and_out, v_buffers, q_ready, k_ready, k_free, v_ready, v_free,
        stride_lb, stride_lh, stride_tb, stride_th, stride_tm, support_rows, support_words,
        batch, head, kv_head, first_q_tile, first, last, q_begin, seqlen_q, seqlen_k, num_q_tiles, num_heads,
        window_left, window_right, scale_log2, softcap_log2, tau,
    )  # fmt: skip
    earliest: gl.constexpr = 0
    middle: gl.constexpr = 1
    latest: gl.constexpr = 2
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (_attend_rows, (middle, arguments,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_SINKS, RETURN_WORK, SAVE_SUPPORT,
                CAN_SKIP, WARPGROUPS)),
            (_attend_rows, (earliest, arguments,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_SINKS, RETURN_WORK, SAVE_SUPPORT,
                CAN_SKIP, WARPGROUPS)),
            (load_tiles, (k_desc, v_desc, k_ring, v_buffers, k_ready, k_free, v_ready, v_free, batch, kv_head, first, last,
                STAGES, BLOCK_N, CAN_SKIP)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend_rows, (latest, arguments,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_SINKS, RETURN_WORK, SAVE_SUPPORT,
                CAN_SKIP, WARPGROUPS)),
            (_attend_rows, (middle, arguments,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_SINKS, RETURN_WORK, SAVE_SUPPORT,
                CAN_SKIP, WARPGROUPS)),
            (_attend_rows, (earliest, arguments,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_SINKS, RETURN_WORK, SAVE_SUPPORT,
                CAN_SKIP, WARPGROUPS)),
            (load_tiles, (k_desc, v_desc, k_ring, v_buffers, k_ready, k_free, v_ready, v_free, batch, kv_head, first, last,
                STAGES, BLOCK_N, CAN_SKIP)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
    release(k_ready, STAGES)
    release(k_free, STAGES)
    release(q_ready, WARPGROUPS)
    release(v_ready, WARPGROUPS)
    release(v_free, WARPGROUPS)

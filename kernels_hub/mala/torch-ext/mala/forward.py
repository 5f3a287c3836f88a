# SPDX-License-Identifier: Apache-2.0
"""The fused forward kernel: every legal tile is scored; softmax, V load and PV run only where the rule retains the tile.

Key tiles are visited from the diagonal toward earlier keys, because nearby keys carry most mass and raise the normalizer early.
A query tile's key range falls into whole tiles (every pair legal) and edge tiles (diagonal, window edge, end of the keys), which
alone pay for masking.
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
from .descriptors import descriptor
from .discover import launch_discover
from .discover_choice import choose_discovery
from .rule import log2_threshold
from .support_bits import empty_support
from .tile_config import TileConfig, padded_head_dim, tile_config
from .tile_loops import visit_tiles, walk_tiles
from .tile_steps import LOG2_E, key_range
from .tma import HAS_GLUON_FOR_HOPPER, has_tma, nvidia_major
from .visibility import Sequences, visible_keys_under_mask

LN_2 = tl.constexpr(math.log(2.0))
SMALLEST_BLOCK = 16  # of a matrix product
# values that differ from call to call; none of them may cost a recompile
# fmt: off
RUNTIME_VALUES = [
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
    "stride_ob", "stride_os", "stride_oh", "stride_lb", "stride_lh", "stride_mb", "stride_mh", "stride_ms", "stride_nb",
    "stride_nh", "stride_tb", "stride_th", "stride_tm", "support_rows", "support_words", "q_begin", "q_end", "k_begin", "k_end",
    "num_q_tiles", "num_heads", "num_kv_groups", "window_left", "window_right", "scale_log2", "softcap_log2", "tau",
]
# fmt: on


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def mala_forward_kernel(
    q_ptr, k, v, out_ptr, lse_ptr, sinks_ptr, mask_ptr, visible_ptr, tiles_ptr, certificate_ptr, support_ptr, walked_ptr, bounds_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    stride_lb, stride_lh, stride_mb, stride_mh, stride_ms, stride_nb, stride_nh, stride_tb, stride_th, stride_tm,
    support_rows, support_words, q_begin, q_end, k_begin, k_end, num_q_tiles, num_heads, num_kv_groups,
    window_left, window_right, scale_log2, softcap_log2, tau,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, STRIDE_UNIT: tl.constexpr, USE_TMA: tl.constexpr, IS_PACKED: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    RETURN_WORK: tl.constexpr, SAVE_SUPPORT: tl.constexpr, IS_WALK: tl.constexpr, IS_SUPPORT: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):  # fmt: skip
    """One query tile of one head. q, k, v, out strides count STRIDE_UNIT elements, so that their divisibility needs no recompile."""
    program = tl.program_id(0)
    q_tile_index = num_q_tiles - 1 - program % num_q_tiles  # the longest rows first
    head = (program // num_q_tiles) % num_heads
    sequence = program // num_q_tiles // num_heads
    kv_head = head // num_kv_groups
    if HAS_BOUNDS:
        q_begin = tl.load(bounds_ptr + sequence * 4)
        q_end = tl.load(bounds_ptr + sequence * 4 + 1)
        k_begin = tl.load(bounds_ptr + sequence * 4 + 2)
        k_end = tl.load(bounds_ptr + sequence * 4 + 3)
    seqlen_q = q_end - q_begin
    seqlen_k = k_end - k_begin
    start_m = q_tile_index * BLOCK_M
    if start_m >= seqlen_q:
        return
    batch = 0 if IS_PACKED else sequence

    offs_m = start_m + tl.arange(0, BLOCK_M)
    row_exists = offs_m < seqlen_q
    rows = (q_begin + offs_m).to(tl.int64)
    position = offs_m + seqlen_k - seqlen_q  # the key a row is aligned with

    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    batch64 = tl.cast(batch, tl.int64)
    head64 = tl.cast(head, tl.int64)
    kv_head64 = tl.cast(kv_head, tl.int64)
    q_base = (batch64 * stride_qb + head64 * stride_qh) * STRIDE_UNIT
    k_base = (batch64 * stride_kb + kv_head64 * stride_kh) * STRIDE_UNIT
    v_base = (batch64 * stride_vb + kv_head64 * stride_vh) * STRIDE_UNIT
    # (BLOCK_M, BLOCK_D)
    q_tile = tl.load(
        q_ptr + q_base + rows[:, None] * (stride_qs * STRIDE_UNIT) + offs_d[None, :],
        mask=row_exists[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )

    low, high, whole_low, whole_high, row_low, row_high = key_range(
        start_m, position, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M, HAS_LEFT, HAS_RIGHT
    )
    visible_keys = row_high - row_low
    if HAS_MASK:
        visible_base = visible_ptr + batch64 * stride_nb + head64 * stride_nh
        visible_keys = tl.load(visible_base + rows, mask=row_exists, other=1)
    threshold_log2 = log2_threshold(visible_keys, tau)

    # key tiles [first, edge_low) and [edge_high, last) need masking, [edge_low, edge_high) do not
    first = low // BLOCK_N
    last = tl.cdiv(high, BLOCK_N)
    edge_high = tl.maximum(tl.minimum(whole_high // BLOCK_N, last), first)
    edge_low = tl.minimum(tl.maximum(tl.cdiv(whole_low, BLOCK_N), first), edge_high)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    limit = tl.where(row_exists, float("-inf"), float("inf"))
    omitted = tl.zeros([BLOCK_M], tl.float32)
    mask_base = head64
    if HAS_MASK:
        mask_base = (
            mask_ptr + batch64 * stride_mb + head64 * stride_mh + tl.cast(q_begin + start_m, tl.int64) * stride_ms
        )
        edge_high = first
        edge_low = first
    tiles_base = head64
    if RETURN_WORK:
        tiles_base = (
            tiles_ptr
            + tl.cast(sequence, tl.int64) * stride_tb
            + head64 * stride_th
            + q_tile_index.to(tl.int64) * stride_tm
        )
    support_base = head64
    support_row = (tl.cast(sequence, tl.int64) * num_heads + head) * support_rows + q_tile_index
    if SAVE_SUPPORT:
        support_base = support_ptr + support_row * support_words
    if IS_WALK:
        walked_base = walked_ptr + support_row * support_words
        row_max, row_sum, acc = walk_tiles(
            q_tile, k, v, k_base, v_base, mask_base, stride_ms, walked_base, support_base, support_words, batch, kv_head, k_begin,
            seqlen_k, position, row_exists, threshold_log2, row_max, row_sum, acc, limit, whole_low, whole_high,
            stride_ks * STRIDE_UNIT, stride_vs * STRIDE_UNIT, window_left, window_right, scale_log2, softcap_log2,
            HEAD_DIM, V_HEAD_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, IS_SUPPORT, USE_TMA, HAS_LEFT, HAS_RIGHT, HAS_MASK, HAS_SOFTCAP,
            SAVE_SUPPORT, DOT_PRECISION)  # fmt: skip
    else:
        row_max, row_sum, acc, limit, omitted = visit_tiles(
            q_tile, k, v, k_base, v_base, mask_base, stride_ms, tiles_base, support_base, batch, kv_head, k_begin, seqlen_k, position,
            row_exists, threshold_log2, row_max, row_sum, acc, limit, omitted, edge_high, last, stride_ks * STRIDE_UNIT,
            stride_vs * STRIDE_UNIT, window_left, window_right, scale_log2, softcap_log2, HEAD_DIM, V_HEAD_DIM, BLOCK_N, BLOCK_D,
            BLOCK_DV, True, USE_TMA, HAS_LEFT, HAS_RIGHT, HAS_MASK, HAS_SOFTCAP, RETURN_WORK, SAVE_SUPPORT, DOT_PRECISION)  # fmt: skip
    if not HAS_MASK and not IS_WALK:
        row_max, row_sum, acc, limit, omitted = visit_tiles(
            q_tile, k, v, k_base, v_base, mask_base, stride_ms, tiles_base, support_base, batch, kv_head, k_begin, seqlen_k, position,
            row_exists, threshold_log2, row_max, row_sum, acc, limit, omitted, edge_low, edge_high, stride_ks * STRIDE_UNIT,
            stride_vs * STRIDE_UNIT, window_left, window_right, scale_log2, softcap_log2, HEAD_DIM, V_HEAD_DIM, BLOCK_N,
            BLOCK_D, BLOCK_DV, False, USE_TMA, HAS_LEFT, HAS_RIGHT, HAS_MASK, HAS_SOFTCAP, RETURN_WORK, SAVE_SUPPORT,
            DOT_PRECISION)  # fmt: skip
        if HAS_LEFT:
            row_max, row_sum, acc, limit, omitted = visit_tiles(
                q_tile, k, v, k_base, v_base, mask_base, stride_ms, tiles_base, support_base, batch, kv_head, k_begin, seqlen_k,
                position, row_exists, threshold_log2, row_max, row_sum, acc, limit, omitted, first, edge_low, stride_ks * STRIDE_UNIT,
                stride_vs * STRIDE_UNIT, window_left, window_right, scale_log2, softcap_log2, HEAD_DIM, V_HEAD_DIM, BLOCK_N,
                BLOCK_D, BLOCK_DV, True, USE_TMA, HAS_LEFT, HAS_RIGHT, HAS_MASK, HAS_SOFTCAP, RETURN_WORK, SAVE_SUPPORT,
                DOT_PRECISION)  # fmt: skip

    if HAS_SINKS:  # joins the normalizer after the last tile
        sink_log2 = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        new_max = tl.maximum(row_max, sink_log2)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.exp2(sink_log2 - shift)
        acc *= decay[:, None]
        omitted *= decay
        row_max = new_max
    is_empty = row_sum == 0.0
    inverse = tl.where(is_empty, 0.0, 1.0 / row_sum)
    lse = (row_max + tl.log2(row_sum)) * LN_2
    out_base = (batch64 * stride_ob + head64 * stride_oh) * STRIDE_UNIT
    tl.store(
        out_ptr + out_base + rows[:, None] * (stride_os * STRIDE_UNIT) + offs_dv[None, :],
        (acc * inverse[:, None]).to(out_ptr.dtype.element_ty),
        mask=row_exists[:, None] & (offs_dv < V_HEAD_DIM)[None, :],
    )
    row_base = batch64 * stride_lb + head64 * stride_lh
    tl.store(lse_ptr + row_base + rows, lse, mask=row_exists)
    if RETURN_WORK:
        tl.store(certificate_ptr + row_base + rows, omitted * inverse, mask=row_exists)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settings: Settings,
    sequences: Sequences,
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
    return_work: bool,
    save_support: bool = False,
    support: Optional[Tensor] = None,
    discovery: str = "fused",
    candidates: Optional[Tensor] = None,
    config: Optional[TileConfig] = None,
    use_tma: Optional[bool] = None,
    use_hopper: Optional[bool] = None,
) -> tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """out, lse, tiles, certificate, support; arguments and shapes as :func:`blockwise.forward`, what is not asked for is None.

    ``support``: what an earlier call on the same inputs found. Its tiles are walked and no others scored, with the same bits as result
    (and it is returned). ``candidates``: a superset of the support; its tiles are tested and no others; ``discovery="int8"`` finds them
    first, "auto" where a sample of the rows says that it pays. A call that is to report its work scores all tiles nevertheless.

    ``config``, ``use_tma`` and ``use_hopper`` override the shipped launch shape, the choice of loads and of the kernel, for
    measurements and tests.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    v_head_dim = v.shape[-1]
    if config is None:
        shipped = tile_config(head_dim, v_head_dim, q.dtype, sequences.max_seqlen_q)
        config = shipped.with_tile(settings.tile)
    block_m, block_n = config.tile
    if min(block_m, block_n) < SMALLEST_BLOCK:
        raise ValueError(
            f"a kernel's tile must be at least {SMALLEST_BLOCK} x {SMALLEST_BLOCK}, got {config.tile}; use impl='blockwise'"
        )
    num_q_tiles, num_k_tiles = sequences.tile_grid(config.tile)

    out = torch.empty(batch, seqlen_q, num_heads, v_head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_heads, seqlen_q, dtype=torch.float32, device=q.device)
    tiles = certificate = None
    if return_work:
        tiles = torch.zeros(
            sequences.num_sequences, num_heads, num_q_tiles, num_k_tiles, dtype=torch.int8, device=q.device
        )
        certificate = torch.zeros_like(lse)
    if discovery == "auto" and support is None and not return_work:
        discovery = choose_discovery(q, k, v, settings, sequences)
    if discovery == "int8" and support is None and not return_work:
        candidates = launch_discover(q, k, settings, sequences)
    walked = None if return_work else candidates if support is None else support
    is_known = walked is not None and walked is support
    if not is_known:
        tile_grid = num_q_tiles, num_k_tiles
        support = empty_support(sequences.num_sequences, num_heads, tile_grid, q.device) if save_support else None
    if sequences.bounds is not None or sequences.common[0] > 0:  # rows that see no key are not visited
        out.zero_()
        lse[:] = -math.inf if sinks is None else sinks.float()[:, None]
    if out.numel() == 0 or num_q_tiles == 0:
        return out, lse, tiles, certificate, support

    if walked is not None and use_tma is None:
        # a descriptor reads on into the next sequence, where anything may lie
        use_hopper, use_tma = False, sequences.bounds is None and has_tma(k) and has_tma(v)
    if use_hopper is not False and HAS_GLUON_FOR_HOPPER and nvidia_major(q.device) == 9:
        from . import forward_hopper_launch

        use_hopper = use_hopper or forward_hopper_launch.supports(q, k, v, sequences, mask, config)
    elif use_hopper:
        raise ValueError("the Hopper kernel needs compute capability 9.0 and triton 3.6 or newer")
    if use_hopper:
        forward_hopper_launch.launch_forward_hopper(
            q, k, v, out, lse, tiles, certificate, support, settings, sequences, sinks, config
        )
        return out, lse, tiles, certificate, support
    if use_tma is None:
        use_tma = has_tma(k) and has_tma(v)
    block_d, block_dv = padded_head_dim(head_dim), padded_head_dim(v_head_dim)
    strides = [stride for x in (q, k, v, out) for stride in x.stride()[:3]]
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    mask_strides: tuple[int, ...] = (0, 0, 0)
    visible_strides: tuple[int, ...] = (0, 0)
    visible = None
    if mask is not None:
        visible = visible_keys_under_mask(mask, seqlen_q, settings.window).expand(batch, num_heads, -1)
        mask = (
            (mask if mask.stride(-1) == 1 else mask.contiguous())
            .expand(batch, num_heads, seqlen_q, -1)
            .view(torch.int8)
        )
        mask_strides, visible_strides = mask.stride()[:3], visible.stride()[:2]
    left, right = settings.window
    grid = (num_q_tiles * num_heads * sequences.num_sequences,)
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        mala_forward_kernel[grid](
            q,
            descriptor(k, block_n, block_d) if use_tma else k,
            descriptor(v, block_n, block_dv) if use_tma else v,
            out,
            lse,
            sinks,
            mask,
            visible,
            tiles,
            certificate,
            support,
            walked,
            sequences.bounds,
            *(stride // unit for stride in strides),
            *lse.stride()[:2],
            *mask_strides,
            *visible_strides,
            *((0, 0, 0) if tiles is None else tiles.stride()[:3]),
            num_q_tiles,
            math.ceil(num_k_tiles / 32),
            *sequences.common,
            num_q_tiles,
            num_heads,
            num_heads // k.shape[2],
            left,
            right,
            settings.softmax_scale * LOG2_E.value,
            settings.softcap * LOG2_E.value,
            settings.tau,
            HEAD_DIM=head_dim,
            V_HEAD_DIM=v_head_dim,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            STRIDE_UNIT=unit,
            USE_TMA=use_tma,
            IS_PACKED=sequences.is_packed,
            HAS_BOUNDS=sequences.bounds is not None,
            HAS_LEFT=left >= 0,
            HAS_RIGHT=right >= 0,
            HAS_MASK=mask is not None,
            HAS_SOFTCAP=settings.softcap > 0,
            HAS_SINKS=sinks is not None,
            RETURN_WORK=return_work,
            SAVE_SUPPORT=save_support and not is_known,
            IS_WALK=walked is not None,
            IS_SUPPORT=is_known,
            DOT_PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=config.num_warps if mask is None else max(config.num_warps, 8),  # its tile takes registers
            num_stages=config.num_stages,
        )
    return out, lse, tiles, certificate, support

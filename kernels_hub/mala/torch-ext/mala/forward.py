# SPDX-License-Identifier: Apache-2.0
"""Launches the forward: the portable kernel or Hopper's over all tiles, the portable one over candidates or a support known already."""

from __future__ import annotations

import contextlib
import math
from typing import Optional

import torch
from torch import Tensor

from .descriptors import descriptor
from .discover import launch_discover
from .forward_kernel import mala_forward_kernel
from .launch_cache import CachedKernel, key_of
from .program_order import units_at_once
from .query_tile import Settings
from .support_bits import empty_support
from .tile_config import TileConfig, padded_head_dim, tile_config
from .tile_steps import LOG2_E
from .tma import HAS_GLUON_FOR_HOPPER, has_tma, nvidia_capability, nvidia_major
from .visibility import Sequences, visible_keys_under_mask

SMALLEST_BLOCK = 16  # of a matrix product

FORWARD = CachedKernel(mala_forward_kernel)


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
    first. A call that is to report its work scores all tiles nevertheless.

    ``config``, ``use_tma`` and ``use_hopper`` override the shipped launch shape, the choice of loads and of the kernel, for
    measurements and tests. ValueError for a Hopper kernel that is not there, or that is to walk: it visits all tiles.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    v_head_dim = v.shape[-1]
    if config is None:
        capability = nvidia_capability(q.device)
        shipped = tile_config(head_dim, v_head_dim, q.dtype, sequences.max_seqlen_q, capability)
        config = shipped.with_tile(settings.tile)
    block_m, block_n = config.tile
    if min(block_m, block_n) < SMALLEST_BLOCK:
        raise ValueError(
            f"a kernel's tile must be at least {SMALLEST_BLOCK} x {SMALLEST_BLOCK}, got {config.tile}; use impl='blockwise'"
        )
    num_q_tiles, num_k_tiles = sequences.tile_grid(config.tile)
    if discovery == "int8" and support is None and not return_work:  # before out: its INT8 keys are free again by then
        candidates = launch_discover(q, k, settings, sequences)

    out = torch.empty(batch, seqlen_q, num_heads, v_head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_heads, seqlen_q, dtype=torch.float32, device=q.device)
    tiles = certificate = None
    if return_work:
        tiles = torch.zeros(
            sequences.num_sequences, num_heads, num_q_tiles, num_k_tiles, dtype=torch.int8, device=q.device
        )
        certificate = torch.zeros_like(lse)
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
        use_tma = sequences.bounds is None and has_tma(k) and has_tma(v)
    has_hopper = HAS_GLUON_FOR_HOPPER and nvidia_major(q.device) == 9
    if use_hopper and walked is not None:
        raise ValueError("the Hopper kernel visits all tiles; candidates and a known support are the portable one's")
    if use_hopper and not has_hopper:
        raise ValueError("the Hopper kernel needs compute capability 9.0 and triton 3.6 or newer")
    if use_hopper is not False and has_hopper and walked is None:
        from . import forward_hopper_launch

        use_hopper = use_hopper or forward_hopper_launch.supports(q, k, v, sequences, mask, config)
    if use_hopper:
        forward_hopper_launch.launch_forward_hopper(
            q,
            k,
            v,
            out,
            lse,
            tiles,
            certificate,
            support,
            settings,
            sequences,
            sinks,
            config,
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
    units = num_heads * sequences.num_sequences
    key_bytes = sequences.max_seqlen_k * (head_dim + v_head_dim) * q.element_size()
    grid = (num_q_tiles * units,)
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        runtime = (
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
            units_at_once(units, num_heads // k.shape[2], key_bytes, q.device),
            num_heads,
            num_heads // k.shape[2],
            left,
            right,
            settings.softmax_scale * LOG2_E.value,
            settings.softcap * LOG2_E.value,
            settings.tau,
        )
        constants = {
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": v_head_dim,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
            "STRIDE_UNIT": unit,
            "USE_TMA": use_tma,
            "IS_PACKED": sequences.is_packed,
            "HAS_BOUNDS": sequences.bounds is not None,
            "HAS_LEFT": left >= 0,
            "HAS_RIGHT": right >= 0,
            "HAS_MASK": mask is not None,
            "HAS_SOFTCAP": settings.softcap > 0,
            "HAS_SINKS": sinks is not None,
            "RETURN_WORK": return_work,
            "SAVE_SUPPORT": save_support and not is_known,
            "IS_WALK": walked is not None,
            "IS_SUPPORT": is_known,
            "DOT_PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
            "num_warps": config.num_warps if mask is None else max(config.num_warps, 8),  # its tile takes registers
            "num_stages": config.num_stages,
        }
        tensors = q, k, v, out, lse, sinks, mask, visible, tiles, certificate, support, walked, sequences.bounds
        FORWARD.launch(grid, key_of(*tensors), {**dict(zip(FORWARD.names, runtime)), **constants})
    return out, lse, tiles, certificate, support

# SPDX-License-Identifier: Apache-2.0
"""Launches the Hopper forward: equal-length sequences in 16-bit precision, without a mask operand."""

from __future__ import annotations

import math
from functools import cache
from typing import Optional

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .forward_hopper import LOG2_E, mala_forward_hopper_kernel
from .launch_cache import CachedKernel, key_of
from .program_order import are_enough_for_three, units_at_once
from .query_tile import Settings
from .tile_config import TileConfig, padded_head_dim
from .tma import by_head_view, has_tma
from .visibility import Sequences

MAX_SHARED_BYTES = 227 * 1024
FORWARD_HOPPER = CachedKernel(mala_forward_hopper_kernel)
ROWS_PER_WARPGROUP = 64  # of a Hopper matrix product
# keys of a tile and v's head_dim together: each takes half as many of a thread's registers, of which three warpgroups have 160
MAX_COLUMNS_OF_THREE = 256
HEAD_DIM_OF_THREE = 64  # where three query tiles were measured for calls that skip nothing


def supports(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, mask: Optional[Tensor], config: TileConfig) -> bool:
    """Does the Hopper kernel cover this call? ``config`` is the launch shape the portable kernel would use."""
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and sequences.bounds is None
        and mask is None
        and config.block_m == ROWS_PER_WARPGROUP
        and config.block_n >= 16
        and all(has_tma(x) for x in (q, k, v))
        and v.shape[-1] * v.element_size() % 16 == 0  # the output's rows, which leave by TMA
        and _shared_bytes(q, v, config, 2) <= MAX_SHARED_BYTES
    )


def _shared_bytes(q: Tensor, v: Tensor, config: TileConfig, stages: int, warpgroups: int = 2) -> int:
    block_d, block_dv = padded_head_dim(q.shape[-1]), padded_head_dim(v.shape[-1])
    # a query tile or its output, and a value tile
    of_warpgroup = config.block_m * max(block_d, block_dv) + config.block_n * block_dv
    elements = warpgroups * of_warpgroup + stages * config.block_n * block_d
    return elements * q.element_size() + 1024


def query_tiles_per_program(q: Tensor, v: Tensor, config: TileConfig, can_skip: bool) -> int:
    """Query tiles per program: two, or three, which read keys a third less often, where they fit.

    Where no tile can be skipped a tile's weights wait in registers, in half the precision of scores, and three are faster only where
    there are many.
    """
    columns = config.block_n + padded_head_dim(v.shape[-1]) + (0 if can_skip else config.block_n // 2)
    has_memory = _shared_bytes(q, v, config, 2, 3) <= MAX_SHARED_BYTES
    is_faster = can_skip or (
        q.shape[3] == v.shape[3] == HEAD_DIM_OF_THREE
        and are_enough_for_three(q.shape[1], config.block_m, q.shape[0] * q.shape[2], q.device)
    )
    return 3 if columns <= MAX_COLUMNS_OF_THREE and has_memory and is_faster else 2


@cache
def _block_layout(width: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, width * 2), element_bitwidth=16, rank=4)


def _descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    shape, strides = by_head_view(x)
    return TensorDescriptor(x, shape, strides, [1, 1, rows, width], _block_layout(width))


def launch_forward_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Optional[Tensor],
    certificate: Optional[Tensor],
    support: Optional[Tensor],
    settings: Settings,
    sequences: Sequences,
    sinks: Optional[Tensor],
    config: TileConfig,
) -> None:
    """Fill out, lse and, where given, tiles, certificate and support; shapes as in ``forward.launch_forward``."""
    block_m, block_n = config.tile
    block_d, block_dv = padded_head_dim(q.shape[-1]), padded_head_dim(v.shape[-1])
    can_skip = settings.tau > 0 or tiles is not None or support is not None
    warpgroups = query_tiles_per_program(q, v, config, can_skip)
    fitting = [n for n in (2, 3, 4) if _shared_bytes(q, v, config, n, warpgroups) <= MAX_SHARED_BYTES]
    stages = max(fitting, default=2)
    q_begin, q_end, _, seqlen_k = sequences.common
    num_q_tiles = math.ceil((q_end - q_begin) / block_m)
    num_heads = q.shape[2]
    left, right = settings.window
    key_bytes = seqlen_k * (q.shape[-1] + v.shape[-1]) * q.element_size()
    with torch.cuda.device(q.device):
        grid = (math.ceil(num_q_tiles / warpgroups) * num_heads * q.shape[0],)
        runtime = (
            _descriptor(q, block_m, block_d),
            _descriptor(k, block_n, block_d),
            _descriptor(v, block_n, block_dv),
            _descriptor(out, block_m, block_dv),
            lse,
            # one that is not there is not read; the kernel's tuples hold no None
            *(lse if x is None else x for x in (sinks, tiles, certificate, support)),
            *lse.stride()[:2],
            *((0, 0, 0) if tiles is None else tiles.stride()[:3]),
            *((0, 0) if support is None else support.shape[2:]),
            q_begin,
            q_end - q_begin,
            seqlen_k,
            num_q_tiles,
            units_at_once(num_heads * q.shape[0], num_heads // k.shape[2], key_bytes, q.device),
            num_heads,
            num_heads // k.shape[2],
            left,
            right,
            settings.softmax_scale * LOG2_E.value,
            settings.softcap * LOG2_E.value,
            settings.tau,
        )
        constants = {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
            "STAGES": stages,
            "HAS_LEFT": left >= 0,
            "HAS_RIGHT": right >= 0,
            "HAS_SOFTCAP": settings.softcap > 0,
            "HAS_SINKS": sinks is not None,
            "RETURN_WORK": tiles is not None,
            "SAVE_SUPPORT": support is not None,
            "CAN_SKIP": can_skip,
            "WARPGROUPS": warpgroups,
            "num_warps": 4,
        }
        key = key_of(q, k, v, out, lse, sinks, tiles, certificate, support)
        FORWARD_HOPPER.launch(grid, key, {**dict(zip(FORWARD_HOPPER.names, runtime)), **constants})

# SPDX-License-Identifier: Apache-2.0
"""Launches the backward: the retained tiles, then the gradients over those tiles alone."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Optional

import torch
from torch import Tensor

from .backward_gradients import DELTA_ROWS, backward_delta_kernel, backward_key_kernel, backward_query_kernel
from .backward_support import backward_support_kernel
from .blockwise import Settings
from .descriptors import descriptor
from .launch_cache import CachedKernel, key_of
from .program_order import units_at_once
from .tile_config import backward_config, padded_head_dim
from .tile_steps import LOG2_E
from .tma import has_tma, nvidia_capability, nvidia_major
from .visibility import Sequences, visible_keys_under_mask

SUPPORT, DELTA, QUERY, KEY = (
    CachedKernel(kernel)
    for kernel in (backward_support_kernel, backward_delta_kernel, backward_query_kernel, backward_key_kernel)
)
MASK_WARPS = 8  # at least, where a mask operand's tile takes registers


def launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    do: Tensor,
    settings: Settings,
    sequences: Sequences,
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
    support: Optional[Tensor] = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
    use_tma: Optional[bool] = None,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[Tensor], Tensor]:
    """dq, dk, dv, dsinks and the support of the backward; arguments and shapes as :func:`blockwise.backward`.

    ``support`` is the forward's: only its tiles are scored again. None scores all of them. Either way a tile counts if it passes
    the test with the final lse, so both give the same bits. ``needs`` says which of dq, (dk and dv), dsinks to compute; the others
    are None. ``use_tma`` overrides the choice of loads.
    """
    batch, total_q, num_heads, head_dim = q.shape
    total_k, num_kv_heads, v_head_dim = v.shape[1:]
    is_ragged = sequences.bounds is not None
    do = do if do.stride(-1) == 1 and 0 not in do.stride() else do.contiguous()
    lse = lse.contiguous()
    block_m, block_n = settings.tile
    major = nvidia_major(q.device)
    config = backward_config(head_dim, v_head_dim, q.dtype, settings.tile, nvidia_capability(q.device))
    num_q_tiles, num_k_tiles = sequences.tile_grid(settings.tile)
    if use_tma is None:
        # a descriptor reads on into the next sequence, where anything may lie
        use_tma = not is_ragged and all(has_tma(x) for x in (q, k, v, do))
    block_d, block_dv = padded_head_dim(head_dim), padded_head_dim(v_head_dim)
    unit = 8 if all(stride % 8 == 0 for x in (q, k, v, out, do) for stride in x.stride()[:3]) else 1

    delta = torch.zeros_like(lse) if is_ragged or sequences.common[0] > 0 else torch.empty_like(lse)
    words_of_keys, words_of_queries = math.ceil(num_k_tiles / 32), math.ceil(num_q_tiles / 32)
    heads = sequences.num_sequences, num_heads
    if support is not None and support.shape != (*heads, num_q_tiles, words_of_keys):
        expected = (*heads, num_q_tiles, words_of_keys)
        raise ValueError(
            f"support must be that of a forward with the same tiles, {expected}, got {tuple(support.shape)}"
        )
    sizes = num_q_tiles * words_of_keys, num_k_tiles * words_of_queries
    both = torch.zeros(math.prod(heads) * sum(sizes), dtype=torch.int32, device=q.device)
    by_query, by_key = both.split([math.prod(heads) * size for size in sizes])
    by_query = by_query.view(*heads, num_q_tiles, words_of_keys)
    make = torch.zeros if is_ragged or sequences.common[0] > 0 or not by_query.numel() else torch.empty
    dq = make(q.shape, dtype=q.dtype, device=q.device) if needs[0] else None
    dk, dv = (make(x.shape, dtype=x.dtype, device=q.device) if needs[1] else None for x in (k, v))
    dsinks = None
    if not by_query.numel() or not q.numel():
        dsinks = torch.zeros_like(sinks) if needs[2] and sinks is not None else None
        return dq, dk, dv, dsinks, by_query

    def strides(name: str, x: Tensor) -> dict[str, int]:
        return dict(zip((f"stride_{name}b", f"stride_{name}s", f"stride_{name}h"), (n // unit for n in x.stride()[:3])))

    q_begin, q_end, k_begin, k_end = sequences.common
    left, right = settings.window
    num_kv_groups = num_heads // num_kv_heads
    row_bytes = (head_dim + v_head_dim) * q.element_size()  # of a key and its value, or of a query and its do
    shared: dict[str, Any] = {
        "lse_ptr": lse,
        "mask_ptr": None,
        "bounds_ptr": sequences.bounds,
        **strides("q", q),
        **strides("k", k),
        "stride_mb": 0,
        "stride_mh": 0,
        "stride_ms": 0,
        "q_begin": q_begin,
        "q_end": q_end,
        "k_begin": k_begin,
        "k_end": k_end,
        "total_q": total_q,
        "num_q_tiles": num_q_tiles,
        "num_k_tiles": num_k_tiles,
        "units_at_once": units_at_once(math.prod(heads), num_kv_groups, sequences.max_seqlen_k * row_bytes, q.device),
        "num_heads": num_heads,
        "num_kv_groups": num_kv_groups,
        "window_left": left,
        "window_right": right,
        "softmax_scale": settings.softmax_scale,
        "softcap_log2": settings.softcap * LOG2_E.value,
        "HEAD_DIM": head_dim,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "STRIDE_UNIT": unit,
        "USE_TMA": use_tma,
        "IS_PACKED": sequences.is_packed,
        "HAS_BOUNDS": is_ragged,
        "HAS_LEFT": left >= 0,
        "HAS_RIGHT": right >= 0,
        "HAS_MASK": mask is not None,
        "HAS_SOFTCAP": settings.softcap > 0,
        "DOT_PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
    visible: dict[str, Any] = {"visible_ptr": None, "stride_nb": 0, "stride_nh": 0}
    if mask is not None:
        counts = visible_keys_under_mask(mask, total_q, settings.window).expand(batch, num_heads, -1)
        visible = {"visible_ptr": counts, "stride_nb": counts.stride(0), "stride_nh": counts.stride(1)}
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        mask = mask.expand(batch, num_heads, total_q, -1).view(torch.int8)
        shared |= dict(zip(("mask_ptr", "stride_mb", "stride_mh", "stride_ms"), (mask, *mask.stride()[:3])))

    of_gradients = {**shared, **strides("v", v), **strides("g", do)}
    of_gradients |= {"delta_ptr": delta, "V_HEAD_DIM": v_head_dim, "BLOCK_DV": block_dv}

    def tiled(x: Tensor, rows: int, width: int):
        return descriptor(x, rows, width) if use_tma else x

    def shape_of(launch) -> dict[str, int]:
        if mask is None:
            return {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        # AMD's compiler does not pipeline the masked kernels
        return {"num_warps": max(launch.num_warps, MASK_WARPS), "num_stages": launch.num_stages if major else 1}

    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        group = config.rows_per_score // block_m if support is None else 1
        scoring = config.score if support is None else config.score_saved
        key = key_of(q, k, v, out, do, lse, sequences.bounds, shared["mask_ptr"], support, by_query, by_key)
        SUPPORT.launch((math.ceil(num_q_tiles / group) * math.prod(heads),), key, {
            "q_ptr": q, "k": tiled(k, block_n, block_d), "saved_ptr": support, "by_query_ptr": by_query, "by_key_ptr": by_key, **shared,
            **visible, "tau": settings.tau, "GROUP": group, "HAS_SAVED": support is not None, **shape_of(scoring),
        })  # fmt: skip
        blocks = math.ceil(sequences.max_seqlen_q / DELTA_ROWS)
        DELTA.launch((blocks * sequences.num_sequences, num_heads), key, {
            "out_ptr": out, "do_ptr": do, "delta_ptr": delta, "bounds_ptr": sequences.bounds, **strides("o", out), **strides("g", do),
            "q_begin": q_begin, "q_end": q_end, "total_q": total_q, "num_blocks": blocks, "num_heads": num_heads,
            "V_HEAD_DIM": v_head_dim, "BLOCK_DV": block_dv, "ROWS": DELTA_ROWS, "STRIDE_UNIT": unit,
            "IS_PACKED": sequences.is_packed, "HAS_BOUNDS": is_ragged, "num_warps": 4,
        })  # fmt: skip
        if dq is not None:
            step = config.query.step
            QUERY.launch((num_q_tiles * math.prod(heads),), key, {
                "q_ptr": q, "k": tiled(k, step, block_d), "v": tiled(v, step, block_dv), "do_ptr": do, "dq_ptr": dq,
                "support_ptr": by_query, **of_gradients, "STEP": step, **shape_of(config.query),
            })  # fmt: skip
        if dk is not None:
            step = config.key.step
            units = num_kv_heads * sequences.num_sequences
            query_bytes = sequences.max_seqlen_q * num_kv_groups * row_bytes
            of_gradients["units_at_once"] = units_at_once(units, 1, query_bytes, q.device)
            KEY.launch((num_k_tiles * block_n // step * units,), key, {
                "q": tiled(q, block_m, block_d), "k_ptr": k, "v_ptr": v, "do": tiled(do, block_m, block_dv), "dk_ptr": dk,
                "dv_ptr": dv, "support_ptr": by_key, **of_gradients, "total_k": total_k, "STEP": step, **shape_of(config.key),
            })  # fmt: skip
    if needs[2] and sinks is not None:
        # d lse / d sink = exp(sink - lse), and the output moves by -out of it
        mass = torch.exp(sinks.float()[:, None] - torch.where(lse != -math.inf, lse, math.inf))
        dsinks = -(mass * delta).sum((0, 2)).to(sinks.dtype)
    return dq, dk, dv, dsinks, by_query

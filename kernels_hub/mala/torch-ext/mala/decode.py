# SPDX-License-Identifier: Apache-2.0
"""Launches a decode: up to 64 new tokens of each sequence over a long cache, its keys split over the GPU.

All query heads of a KV head share a tile, (tokens, BLOCK_N) keys; ``settings.tile`` counts the tokens of one head. Three forms:

- "two_pass": each tile is tested against the full normalizer (``decode_two_pass.py``);
- "int8_two_pass": the same, with bounds of both from an INT8 plane of the keys (``decode_plane.py``);
- "split": each split tests against its own, the paper's form (``decode_split.py``).
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Optional

import torch
from torch import Tensor

from .decode_chain import chain_options
from .decode_combine import SPLITS_AT_ONCE, combine_kernel
from .decode_plane import plane_arguments, score_plane_kernel
from .decode_split import attend_split_kernel
from .decode_two_pass import attend_retained_kernel, score_tiles_kernel
from .key_plane import KeyPlane
from .launch_cache import CachedKernel, key_of
from .program_order import multiprocessors
from .query_tile import Settings
from .tile_config import DecodeLaunch, PlaneLaunch, decode_launch, padded_head_dim, plane_launch
from .tile_steps import LOG2_E
from .tma import nvidia_major
from .visibility import Sequences

SMALLEST_ROWS = 16  # of a matrix product
MAX_ROWS = 128  # of a tile
MAX_ROWS_TO_KEEP = 64  # query rows of a KV head up to which the first pass keeps probabilities for the second
STAGES_OF_TWO = 2  # of a loop that loads keys and values
# row maxima that a program of the second pass looks at together (results/decode_scan_h200.json)
SCANNED = 1024

SCORE_TILES, SCORE_PLANE, ATTEND_RETAINED, ATTEND_SPLIT, COMBINE = (
    CachedKernel(kernel)
    for kernel in (score_tiles_kernel, score_plane_kernel, attend_retained_kernel, attend_split_kernel, combine_kernel)
)


def launch_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settings: Settings,
    sequences: Sequences,
    sinks: Optional[Tensor],
    form: str,
    num_splits: int = 0,
    return_work: bool = False,
    block_table: Optional[Tensor] = None,
    keep_p: Optional[bool] = None,
    launch: Optional[DecodeLaunch] = None,
    key_plane: Optional[KeyPlane] = None,
    first_launch: Optional[PlaneLaunch] = None,
) -> tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
    """out (batch, seqlen_q, num_heads, v_head_dim), lse, and with ``return_work`` tiles and certificate, as ``launch_forward``.

    Args:
        q, k, v: (batch, seqlen, heads, dim); with ``block_table`` int32 (batch, pages) k and v are (pages, page_size, kv_heads, dim).
        form: "two_pass", "split", or with a ``key_plane`` "int8_two_pass".
        num_splits: parts of the keys; 0: as many as fill the GPU.
        keep_p, launch, first_launch (with a ``key_plane``): override what is shipped, for measurements and tests.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = v.shape[-2:]
    tokens, block_n = settings.tile
    group = num_heads // num_kv_heads
    rows = tokens * group
    block_r = max(SMALLEST_ROWS, next_power_of_2(rows))
    if block_r > MAX_ROWS or block_n < SMALLEST_ROWS:
        raise ValueError(
            f"a decode tile holds at most {MAX_ROWS} rows, the tokens of all query heads of a KV head, and at least {SMALLEST_ROWS} "
            f"keys, got {rows} rows x {block_n} keys"
        )
    num_q_tiles, num_k_tiles = sequences.tile_grid(settings.tile)
    groups = num_q_tiles * num_kv_heads * sequences.num_sequences
    is_dense = form == "split" and settings.tau == 0
    launch = decode_launch(head_dim, v_head_dim, q.dtype, is_dense) if launch is None else launch
    out = torch.empty(batch, seqlen_q, num_heads, v_head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_heads, seqlen_q, dtype=torch.float32, device=q.device)
    tiles = certificate = None
    if return_work:
        tiles = torch.zeros(groups, num_k_tiles, dtype=torch.int8, device=q.device)
        certificate = torch.zeros_like(lse)
    if sequences.bounds is not None or sequences.common[0] > 0:  # rows that see no key are not visited
        out.zero_()
        lse[:] = -math.inf if sinks is None else sinks.float()[:, None]
    if not groups or not out.numel():
        return out, lse, _by_head(tiles, sequences, num_kv_heads, num_q_tiles, group), certificate
    major = nvidia_major(q.device)
    first_launch = plane_launch(head_dim, major) if first_launch is None else first_launch
    if num_splits == 0:
        split_by = launch if key_plane is None else first_launch
        filling = splits_that_fill(split_by.programs_per_sm * multiprocessors(q.device), groups)
        num_splits = min(filling, max(1, math.ceil(num_k_tiles / split_by.min_tiles)))
    num_splits = min(num_splits, max(num_k_tiles, 1))
    keep_p = seqlen_q * group <= MAX_ROWS_TO_KEEP if keep_p is None else keep_p

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    unit = 8 if all(stride % 8 == 0 for x in (q, k, v) for stride in x.stride()[:3]) else 1
    acc, state = empty(groups, num_splits, rows, v_head_dim), empty(groups, num_splits, rows, 3)
    q_begin, q_end, k_begin, k_end = sequences.common
    left, right = settings.window
    chain = chain_options(major)
    key = key_of(q, k, v, sinks, sequences.bounds, block_table, *(() if key_plane is None else key_plane.tensors))
    place = {
        "bounds_ptr": sequences.bounds,
        "q_begin": q_begin,
        "q_end": q_end,
        "k_begin": k_begin,
        "k_end": k_end,
        "num_q_tiles": num_q_tiles,
        "num_kv_heads": num_kv_heads,
        "num_splits": num_splits,
        "TOKENS": tokens,
        "GROUP": group,
        "HAS_BOUNDS": sequences.bounds is not None,
        "IS_CHAINED": bool(chain),
    }
    walked = {
        "num_k_tiles": num_k_tiles,
        "window_left": left,
        "window_right": right,
        "tau": float(settings.tau),
        "BLOCK_R": block_r,
        "BLOCK_N": block_n,
        "HAS_LEFT": left >= 0,
        "HAS_RIGHT": right >= 0,
        "num_warps": launch.num_warps,
    }
    values = {"V_HEAD_DIM": v_head_dim, "BLOCK_DV": padded_head_dim(v_head_dim)}
    asked: dict[str, Any] = {
        **place,
        **walked,
        "q_ptr": q,
        **_strides("q", q, unit),
        "softmax_scale": float(settings.softmax_scale),
        "softcap_log2": settings.softcap * LOG2_E.value,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "STRIDE_UNIT": unit,
        "HAS_SOFTCAP": settings.softcap > 0,
        "RETURN_WORK": return_work,
        "num_stages": launch.num_stages,
    }
    scored: dict[str, Any] = {
        **asked,
        "k_ptr": k,
        "tables_ptr": block_table,
        **_strides("k", k, unit),
        "stride_tables": 0 if block_table is None else block_table.stride(0),
        "DOT_PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "PAGE": 0 if block_table is None else k.shape[1],
    }
    attended = {
        "v_ptr": v,
        "acc_ptr": acc,
        "state_ptr": state,
        "tiles_ptr": tiles,
        **_strides("v", v, unit),
        **values,
    }
    summed = {
        "acc_ptr": acc,
        "state_ptr": state,
        "sinks_ptr": sinks,
        "out_ptr": out,
        "lse_ptr": lse,
        "certificate_ptr": certificate,
        "total_q": seqlen_q,
        "HAS_SINKS": sinks is not None,
        "RETURN_WORK": return_work,
    }
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        grid = (groups, num_splits)
        if form == "split":
            ATTEND_SPLIT.launch(grid, key, {**scored, **attended, "CAN_SKIP": return_work or not is_dense})
        else:
            from_plane = key_plane is not None
            keep_p = keep_p and not from_plane
            first_pass = {
                "maxima_ptr": empty(groups, num_k_tiles, rows),
                "sums_ptr": empty(groups, num_k_tiles, rows) if return_work or not from_plane else None,
                "split_max_ptr": empty(groups, num_splits, rows),
                "split_sum_ptr": empty(groups, num_splits, rows),
            }
            bounds: dict[str, Optional[Tensor]] = {"lower_ptr": None, "split_top_ptr": None}
            p = empty(groups, num_k_tiles, rows, block_n, dtype=v.dtype) if keep_p else None
            if key_plane is None:
                SCORE_TILES.launch(grid, key, {**scored, **first_pass, "p_ptr": p, "KEEP_P": keep_p, **chain})
            else:
                bounds = {
                    "lower_ptr": empty(groups, num_k_tiles, rows),
                    "split_top_ptr": empty(groups, num_splits, rows),
                }
                registers = {"maxnreg": first_launch.max_registers} if major else {}
                of_plane = plane_arguments(key_plane, next_power_of_2(rows), block_n, first_launch)
                SCORE_PLANE.launch(grid, key, {**asked, **first_pass, **bounds, **of_plane, **registers, **chain})
                # keys and values of a tile at once: more stages would leave room for fewer programs
                scored["num_stages"] = min(launch.num_stages, STAGES_OF_TWO)
            scan_r = next_power_of_2(rows)
            # of each program: splits to look through, then tiles to attend
            entries = num_splits + math.ceil(num_k_tiles / num_splits)
            weighed = {
                "p_ptr": p,
                "sinks_ptr": sinks,
                "lists_ptr": empty(groups, num_splits, entries, dtype=torch.int32),
                "SCAN_R": scan_r,
                "SCAN_TILES": SCANNED // scan_r,
                "KEEP_P": keep_p,
                "HAS_SINKS": sinks is not None,
                "FROM_PLANE": from_plane,
            }
            ATTEND_RETAINED.launch(grid, key, {**scored, **first_pass, **bounds, **attended, **weighed, **chain})
        COMBINE.launch((groups, rows), key, {**place, **values, **summed, "num_warps": 8, **chain})
    return out, lse, _by_head(tiles, sequences, num_kv_heads, num_q_tiles, group), certificate


def _by_head(
    tiles: Optional[Tensor], sequences: Sequences, num_kv_heads: int, num_q_tiles: int, group: int
) -> Optional[Tensor]:
    """(num_groups, k_tiles) as (num_sequences, num_heads, q_tiles, k_tiles): the heads of a group share their tiles."""
    if tiles is None:
        return None
    return tiles.view(sequences.num_sequences, num_kv_heads, num_q_tiles, tiles.shape[-1]).repeat_interleave(group, 1)


def _strides(name: str, x: Tensor, unit: int) -> dict[str, int]:
    return {f"stride_{name}{axis}": stride // unit for axis, stride in zip("bsh", x.stride()[:3])}


def splits_that_fill(programs: int, groups: int) -> int:
    """Splits of each of ``groups`` that keep at most ``programs`` busy, at least one; above SPLITS_AT_ONCE a multiple of it.

    A few programs beyond what runs at once would take as long as all the others, and so would a few splits beyond those that are read
    at once (results/decode_splits_listed_h200.json).
    """
    at_once = SPLITS_AT_ONCE.value
    splits = programs // groups
    return max(1, splits // at_once * at_once or splits)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number`` >= 1; Triton's own is slow on the host."""
    return 1 << (number - 1).bit_length()

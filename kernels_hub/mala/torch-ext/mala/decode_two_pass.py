# SPDX-License-Identifier: Apache-2.0
"""Two-pass decode: every tile's scores and with them the full normalizer first, then the values of the tiles that matter.

Which they are takes two looks: tiles that reach tau / L_q of the full normalizer are certainly retained, and a tile is skipped if in
each row its largest contribution is below tau / L_q of *their* mass, and not the row's largest. The splits have no say in it.

The first pass leaves a tile's row maxima, row sums and, unless the row's largest score alone excludes it, its probabilities over
exp2(row maximum); the second needs no keys, masks or scores. Where many rows would make these probabilities large (KEEP_P False), the
second pass scores the retained tiles again.

From an INT8 plane (FROM_PLANE; ``decode_plane`` has its first pass) maxima are upper bounds and masses lower bounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_chain import gdc_launch_dependents, gdc_wait
from .decode_combine import store_split
from .decode_retained import (
    full_normalizer,
    list_reaching_splits,
    mass_of_reaching,
    reaching_tiles,
    report_work,
    row_limits,
    tiles_at,
)
from .decode_rows import (
    RUNTIME_VALUES,
    decode_place,
    decode_rows,
    decode_scores,
    load_cached,
    load_queries,
    split_range,
    tiles_per_split,
)
from .rule import BACKWARD_SLACK, FORWARD_SLACK, is_tile_retained, largest_of_rows, limit_of, online_softmax_step
from .tile_steps import LOG2_E

BOUND_SLACK = tl.constexpr(2.0**-14)  # above what long sums in float32 may be off by: a guarantee stands on it
PRUNING_SLACK = tl.constexpr(2.0**-16)  # more than the forward's: what it prunes no later test may want


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def score_tiles_kernel(
    q_ptr, k_ptr, maxima_ptr, sums_ptr, p_ptr, split_max_ptr, split_sum_ptr, bounds_ptr, tables_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_tables,
    q_begin, q_end, k_begin, k_end, num_q_tiles, num_k_tiles, num_kv_heads, num_splits, window_left, window_right,
    softmax_scale, softcap_log2, tau,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, STRIDE_UNIT: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, KEEP_P: tl.constexpr, RETURN_WORK: tl.constexpr,
    DOT_PRECISION: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """One split: row maxima and sums of each tile (num_groups, num_k_tiles, rows), and of the split (num_groups, num_splits, rows)."""
    group = tl.program_id(0)
    q_tile, kv_head, sequence, q_begin, k_begin, seqlen_q, seqlen_k = decode_place(
        group, num_q_tiles, num_kv_heads, bounds_ptr, q_begin, q_end, k_begin, k_end, HAS_BOUNDS
    )
    token, exists, row_low, row_high, threshold_log2, low, high = decode_rows(
        q_tile, seqlen_q, seqlen_k, window_left, window_right, tau, TOKENS, GROUP, BLOCK_R, HAS_LEFT, HAS_RIGHT
    )
    begin, end = split_range(tl.program_id(1), num_splits, low, high, BLOCK_N)
    if IS_CHAINED:
        gdc_wait()  # for whatever wrote q, k and v
    batch = sequence.to(tl.int64)
    q = load_queries(q_ptr, batch, kv_head * GROUP, token, exists, q_begin, stride_qb * STRIDE_UNIT, stride_qs * STRIDE_UNIT,
                     stride_qh * STRIDE_UNIT, HEAD_DIM, GROUP, BLOCK_R, BLOCK_D)  # fmt: skip
    if IS_CHAINED:
        gdc_launch_dependents()
    rows = tl.arange(0, BLOCK_R)
    is_row = rows < TOKENS * GROUP
    row_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_R], tl.float32)
    for tile in tl.range(begin, end):
        k = load_cached(k_ptr, tables_ptr, stride_tables, batch, kv_head, k_begin, tile * BLOCK_N, seqlen_k,
                        stride_kb * STRIDE_UNIT, stride_ks * STRIDE_UNIT, stride_kh * STRIDE_UNIT, HEAD_DIM, BLOCK_N, BLOCK_D,
                        PAGE)  # fmt: skip
        scores = decode_scores(q, k, tile * BLOCK_N, row_low, row_high, softmax_scale, softcap_log2, LOG2_E, BLOCK_N, HAS_SOFTCAP,
                               DOT_PRECISION)  # fmt: skip
        tile_max = largest_of_rows(scores)
        p = tl.exp2(scores - tl.where(tile_max == float("-inf"), 0.0, tile_max)[:, None])
        tile_sum = tl.sum(p, 1)
        new_max = tl.maximum(row_max, tile_max)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tile_sum * tl.exp2(tile_max - shift)
        row_max = new_max
        # the tile of a row's largest score is retained, so the retained mass is at least that one key's
        candidate = is_tile_retained(tile_max, limit_of(row_max, threshold_log2, exists, PRUNING_SLACK))
        if RETURN_WORK:
            candidate = candidate | (tile >= 0)
        else:
            tile_max = tl.where(candidate, tile_max, float("-inf"))
        of_tile = (tl.cast(group, tl.int64) * num_k_tiles + tile) * (TOKENS * GROUP)
        tl.store(maxima_ptr + of_tile + rows, tile_max, mask=is_row)
        if candidate:
            tl.store(sums_ptr + of_tile + rows, tile_sum, mask=is_row)
            if KEEP_P:
                of_keys = (of_tile + rows)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                tl.store(p_ptr + of_keys, p.to(p_ptr.dtype.element_ty), mask=is_row[:, None])
    of_split = (group * num_splits + tl.program_id(1)) * (TOKENS * GROUP) + rows
    tl.store(split_max_ptr + of_split, row_max, mask=is_row)
    tl.store(split_sum_ptr + of_split, row_sum, mask=is_row)


@triton.jit
def _spread(x, BLOCK_R: tl.constexpr, SCAN_R: tl.constexpr):
    """(SCAN_R,) as (BLOCK_R,), zero beyond: few rows are padded to what a matrix product takes."""
    same = tl.arange(0, BLOCK_R)[:, None] == tl.arange(0, SCAN_R)[None, :]
    return tl.sum(tl.where(same, x[None, :], 0.0), 1)


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def attend_retained_kernel(
    q_ptr, k_ptr, v_ptr, maxima_ptr, sums_ptr, p_ptr, lower_ptr, split_max_ptr, split_sum_ptr, split_top_ptr, lists_ptr, sinks_ptr,
    acc_ptr, state_ptr, tiles_ptr, bounds_ptr, tables_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_tables,
    q_begin, q_end, k_begin, k_end, num_q_tiles, num_k_tiles, num_kv_heads, num_splits, window_left, window_right,
    softmax_scale, softcap_log2, tau,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, TOKENS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, SCAN_R: tl.constexpr, SCAN_TILES: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, STRIDE_UNIT: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, KEEP_P: tl.constexpr, FROM_PLANE: tl.constexpr,
    RETURN_WORK: tl.constexpr, DOT_PRECISION: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """One split's share of the output, over the full normalizer, as ``decode_combine`` wants it.

    Every program weighs the tiles of the group's splits that may hold retained ones, and takes each ``num_splits``-th of the retained:
    wherever they lie, no program has more than its share.
    """
    group = tl.program_id(0)
    split = tl.program_id(1)
    q_tile, kv_head, sequence, q_begin, k_begin, seqlen_q, seqlen_k = decode_place(
        group, num_q_tiles, num_kv_heads, bounds_ptr, q_begin, q_end, k_begin, k_end, HAS_BOUNDS
    )
    _, exists, _, _, threshold_log2, low, high = decode_rows(
        q_tile, seqlen_q, seqlen_k, window_left, window_right, tau, TOKENS, GROUP, SCAN_R, HAS_LEFT, HAS_RIGHT
    )
    first, last = low // BLOCK_N, tl.cdiv(high, BLOCK_N)
    ROWS: tl.constexpr = TOKENS * GROUP
    of_group = tl.cast(group, tl.int64) * num_k_tiles * ROWS
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    full_log2, largest = full_normalizer(split_max_ptr, split_sum_ptr, split_top_ptr, sinks_ptr, group, kv_head, num_splits, TOKENS,
                                          GROUP, SCAN_R, HAS_SINKS, FROM_PLANE)  # fmt: skip
    shift = tl.where(full_log2 == float("-inf"), 0.0, full_log2)
    limit = row_limits(full_log2, largest, threshold_log2, exists, BACKWARD_SLACK)
    tops_ptr = split_top_ptr if FROM_PLANE else split_max_ptr
    of_splits = group * num_splits
    list_ptr = lists_ptr + (of_splits + split).to(tl.int64) * (num_splits + tl.cdiv(num_k_tiles, num_splits))
    per_split = tiles_per_split(num_splits, low, high, BLOCK_N)
    places = per_split * list_reaching_splits(
        tops_ptr, split_sum_ptr, of_splits, num_splits, limit, list_ptr, ROWS, SCAN_R
    )
    kept = mass_of_reaching(maxima_ptr, sums_ptr, lower_ptr, of_group, list_ptr, places, per_split, first, last, full_log2, limit,
                             ROWS, SCAN_R, SCAN_TILES, FROM_PLANE)  # fmt: skip
    rows = tl.arange(0, SCAN_R)
    if HAS_SINKS:
        kept += tl.exp2(tl.load(sinks_ptr + kv_head * GROUP + rows % GROUP).to(tl.float32) * LOG2_E - shift)
    limit = row_limits(
        shift + tl.log2(kept), largest, threshold_log2, exists, BOUND_SLACK if FROM_PLANE else FORWARD_SLACK
    )

    places = per_split * list_reaching_splits(
        tops_ptr, split_sum_ptr, of_splits, num_splits, limit, list_ptr, ROWS, SCAN_R
    )
    mine_ptr = list_ptr + num_splits
    num_retained = 0
    for start in range(0, places, SCAN_TILES):
        tiles, is_tile = tiles_at(list_ptr, start + tl.arange(0, SCAN_TILES), places, per_split, first, last)
        of_tiles = of_group + tiles[:, None] * ROWS + rows[None, :]
        mask = is_tile[:, None] & (rows < ROWS)[None, :]
        retained = reaching_tiles(tl.load(maxima_ptr + of_tiles, mask=mask, other=float("-inf")), limit)
        place = num_retained + tl.cumsum(retained, 0) - retained
        is_mine = (retained > 0) & (place % num_splits == split)
        tl.store(mine_ptr + place // num_splits, tiles, mask=is_mine)
        num_retained += tl.sum(retained, 0)
    omitted = tl.zeros([SCAN_R], tl.float32)
    if RETURN_WORK:  # noqa: SIM102 - a constant: the rest is compiled only where it holds
        if split == 0:
            omitted = report_work(tiles_ptr + tl.cast(group, tl.int64) * num_k_tiles, maxima_ptr, sums_ptr, of_group, first, last,
                                   shift, limit, ROWS, SCAN_R, SCAN_TILES)  # fmt: skip
    tl.debug_barrier()  # the list is read by all threads

    token, exists, row_low, row_high, _, _, _ = decode_rows(
        q_tile, seqlen_q, seqlen_k, window_left, window_right, tau, TOKENS, GROUP, BLOCK_R, HAS_LEFT, HAS_RIGHT
    )
    shift = _spread(shift, BLOCK_R, SCAN_R)
    batch = sequence.to(tl.int64)
    rows = tl.arange(0, BLOCK_R)
    is_row = rows < ROWS
    if not KEEP_P:
        q = load_queries(q_ptr, batch, kv_head * GROUP, token, exists, q_begin, stride_qb * STRIDE_UNIT, stride_qs * STRIDE_UNIT,
                         stride_qh * STRIDE_UNIT, HEAD_DIM, GROUP, BLOCK_R, BLOCK_D)  # fmt: skip
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    row_max = _spread(full_log2, BLOCK_R, SCAN_R)
    row_sum = tl.zeros([BLOCK_R], tl.float32)
    for step in tl.range(0, (num_retained - split + num_splits - 1) // num_splits):
        tile = tl.load(mine_ptr + step)
        start_n = tile * BLOCK_N
        v = load_cached(v_ptr, tables_ptr, stride_tables, batch, kv_head, k_begin, start_n, seqlen_k, stride_vb * STRIDE_UNIT,
                        stride_vs * STRIDE_UNIT, stride_vh * STRIDE_UNIT, V_HEAD_DIM, BLOCK_N, BLOCK_DV, PAGE)  # fmt: skip
        if KEEP_P:
            of_tile = of_group + tile.to(tl.int64) * ROWS
            of_keys = (of_tile + rows)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            p = tl.load(p_ptr + of_keys, mask=is_row[:, None], other=0.0)
            tile_max = tl.load(maxima_ptr + of_tile + rows, mask=is_row, other=float("-inf"))
            weight = tl.exp2(tile_max - shift)
            row_sum += tl.load(sums_ptr + of_tile + rows, mask=is_row, other=0.0) * weight
            acc += tl.dot(p, v, input_precision=DOT_PRECISION) * weight[:, None]
        else:
            k = load_cached(k_ptr, tables_ptr, stride_tables, batch, kv_head, k_begin, start_n, seqlen_k, stride_kb * STRIDE_UNIT,
                            stride_ks * STRIDE_UNIT, stride_kh * STRIDE_UNIT, HEAD_DIM, BLOCK_N, BLOCK_D, PAGE)  # fmt: skip
            scores = decode_scores(q, k, start_n, row_low, row_high, softmax_scale, softcap_log2, LOG2_E, BLOCK_N,
                                   HAS_SOFTCAP, DOT_PRECISION)  # fmt: skip
            # from a plane, a score may be above what is known of the normalizer
            p, decay, row_max, row_sum = online_softmax_step(scores, 1.0, tl.max(scores, 1), row_max, row_sum, True)
            acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=DOT_PRECISION)
    left_out = _spread(omitted, BLOCK_R, SCAN_R)
    left_out = tl.where(left_out == 0.0, 0.0, left_out * tl.exp2(shift - row_max))
    store_split(acc_ptr, state_ptr, acc, row_max, row_sum, left_out, group, split, num_splits, V_HEAD_DIM, BLOCK_DV, TOKENS, GROUP,
                BLOCK_R)  # fmt: skip

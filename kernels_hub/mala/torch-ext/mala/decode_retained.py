# SPDX-License-Identifier: Apache-2.0
"""Which tiles a two-pass decode retains, from what its first pass left of each tile and of each split.

A split none of whose scores reaches a limit holds no tile that does. So the splits that reach it are listed first, and the tiles of
these alone are looked at: a program reads a number a split, where it would read one a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_combine import SPLITS_AT_ONCE
from .rule import limit_of
from .tile_steps import LOG2_E


@triton.jit
def full_normalizer(split_max_ptr, split_sum_ptr, split_top_ptr, sinks_ptr, group, kv_head, num_splits, TOKENS: tl.constexpr,
                    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, HAS_SINKS: tl.constexpr, FROM_PLANE: tl.constexpr):  # fmt: skip
    """log2 of the full normalizer of each row, from those of all splits and the sink; and the row's largest score.

    FROM_PLANE: a lower bound of the normalizer, and the largest upper bound of a score, which ``split_top`` has.
    """
    rows = tl.arange(0, BLOCK_R)
    is_row = rows < TOKENS * GROUP
    full_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    full_sum = tl.zeros([BLOCK_R], tl.float32)
    largest = full_max
    if HAS_SINKS:
        full_max = tl.load(sinks_ptr + kv_head * GROUP + rows % GROUP).to(tl.float32) * LOG2_E
        full_sum = tl.where(full_max == float("-inf"), 0.0, 1.0)
    for start in range(0, num_splits, SPLITS_AT_ONCE):
        splits = start + tl.arange(0, SPLITS_AT_ONCE)
        offsets = (group * num_splits + splits)[:, None] * (TOKENS * GROUP) + rows[None, :]
        mask = (splits < num_splits)[:, None] & is_row[None, :]
        split_max = tl.load(split_max_ptr + offsets, mask=mask, other=float("-inf"))
        split_sum = tl.load(split_sum_ptr + offsets, mask=mask, other=0.0)
        new_max = tl.maximum(full_max, tl.max(split_max, 0))
        if FROM_PLANE:
            split_max_or_top = tl.load(split_top_ptr + offsets, mask=mask, other=float("-inf"))
        else:
            split_max_or_top = split_max
        largest = tl.maximum(largest, tl.max(split_max_or_top, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        full_sum = full_sum * tl.exp2(full_max - shift) + tl.sum(split_sum * tl.exp2(split_max - shift[None, :]), 0)
        full_max = new_max
    return full_max + tl.log2(full_sum), largest


@triton.jit
def row_limits(normalizer_log2, largest, threshold_log2, exists, SLACK: tl.constexpr):
    """What a tile must reach in some row: the row's limit, or its largest score. NaN where the normalizer is, which all tiles reach."""
    limit = limit_of(normalizer_log2, threshold_log2, exists, SLACK)
    return tl.where(exists & (largest < limit), largest, limit)  # a GPU's minimum would pass over NaN


@triton.jit
def reaching_tiles(maxima, limit):
    """int32 (tiles,): 1 for tiles whose maxima (tiles, rows) reach the limit of some row."""
    return tl.max(((maxima != float("-inf")) & ~(maxima < limit[None, :])).to(tl.int32), 1)


@triton.jit
def list_reaching_splits(
    tops_ptr, sums_ptr, of_group, num_splits, limit, list_ptr, ROWS: tl.constexpr, SCAN_R: tl.constexpr
):
    """List the splits whose largest scores reach ``limit`` in some row, and return how many: no other holds a tile that does."""
    rows = tl.arange(0, SCAN_R)
    count = 0
    tl.debug_barrier()  # an earlier list has been read
    for start in range(0, num_splits, SPLITS_AT_ONCE):
        splits = start + tl.arange(0, SPLITS_AT_ONCE)
        offsets = (of_group + splits)[:, None] * ROWS + rows[None, :]
        mask = (splits < num_splits)[:, None] & (rows < ROWS)[None, :]
        tops = tl.load(tops_ptr + offsets, mask=mask, other=float("-inf"))
        sums = tl.load(sums_ptr + offsets, mask=mask, other=0.0)
        tops = tl.where(sums == sums, tops, sums)  # a maximum passes over NaN, a sum does not
        reaching = reaching_tiles(tops, limit)
        tl.store(list_ptr + count + tl.cumsum(reaching, 0) - reaching, splits, mask=reaching > 0)
        count += tl.sum(reaching, 0)
    tl.debug_barrier()  # the list is read by all threads
    return count


@triton.jit
def tiles_at(list_ptr, place, places, per_split, first, last):
    """The tiles of the listed splits at places 0 to ``places`` - 1, in order, and which of them there are."""
    split = tl.load(list_ptr + place // per_split, mask=place < places, other=0)
    tiles = first + split * per_split + place % per_split
    return tiles, (place < places) & (tiles < last)


@triton.jit
def mass_of_reaching(maxima_ptr, sums_ptr, lower_ptr, of_group, list_ptr, places, per_split, first, last, full_log2, limit,
                     ROWS: tl.constexpr, SCAN_R: tl.constexpr, SCAN_TILES: tl.constexpr, FROM_PLANE: tl.constexpr):  # fmt: skip
    """(SCAN_R,) mass over the full normalizer of the listed splits' tiles that reach ``limit`` in some row."""
    rows = tl.arange(0, SCAN_R)
    mass = tl.zeros([SCAN_R], tl.float32)
    shift = tl.where(full_log2 == float("-inf"), 0.0, full_log2)
    for start in range(0, places, SCAN_TILES):
        tiles, is_tile = tiles_at(list_ptr, start + tl.arange(0, SCAN_TILES), places, per_split, first, last)
        of_tiles = of_group + tiles[:, None] * ROWS + rows[None, :]
        mask = is_tile[:, None] & (rows < ROWS)[None, :]
        maxima = tl.load(maxima_ptr + of_tiles, mask=mask, other=float("-inf"))
        reaching = reaching_tiles(maxima, limit)
        if FROM_PLANE:
            of_tile = tl.exp2(tl.load(lower_ptr + of_tiles, mask=mask, other=float("-inf")) - shift[None, :])
        else:
            sums = tl.load(sums_ptr + of_tiles, mask=mask & (maxima != float("-inf")), other=0.0)
            of_tile = sums * tl.exp2(maxima - shift[None, :])
        mass += tl.sum(tl.where(reaching[:, None] > 0, of_tile, 0.0), 0)
    return mass


@triton.jit
def report_work(tiles_ptr, maxima_ptr, sums_ptr, of_group, first, last, shift, limit, ROWS: tl.constexpr, SCAN_R: tl.constexpr,
                SCAN_TILES: tl.constexpr):  # fmt: skip
    """Write which tiles are retained; (SCAN_R,) mass over exp2(shift) of those that are not."""
    rows = tl.arange(0, SCAN_R)
    omitted = tl.zeros([SCAN_R], tl.float32)
    for start in range(first, last, SCAN_TILES):
        tiles = start + tl.arange(0, SCAN_TILES)
        of_tiles = of_group + tiles[:, None] * ROWS + rows[None, :]
        mask = (tiles < last)[:, None] & (rows < ROWS)[None, :]
        maxima = tl.load(maxima_ptr + of_tiles, mask=mask, other=float("-inf"))
        retained = reaching_tiles(maxima, limit)
        sums = tl.load(sums_ptr + of_tiles, mask=mask & (maxima != float("-inf")), other=0.0)
        omitted += tl.sum(tl.where(retained[:, None] > 0, 0.0, sums * tl.exp2(maxima - shift[None, :])), 0)
        code = (1 + retained) * tl.max((maxima != float("-inf")).to(tl.int32), 1)
        tl.store(tiles_ptr + tiles, code.to(tl.int8), mask=tiles < last)
    return omitted

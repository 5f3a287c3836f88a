# SPDX-License-Identifier: Apache-2.0
"""Candidates in the Hopper forward: all warpgroups visit the tiles that one of their query tiles has as a candidate.

A tile that is a candidate of another alone is tested too and skipped, as in a search through all tiles. So keys are read once for
all of them; the loading warp walks the bits and says with each tile which it is.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_steps import load_keys, load_tiles
from .support import WORDS, count_bits, previous_bit

NUMBER = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))  # of one number in shared memory


@gluon.jit
def _load_union(row, chunk, num_words, num_tiles, TILES: gl.constexpr, WARPS: gl.constexpr):
    """(WORDS,) words of a row of candidates and of the next ones, ``num_tiles`` in all, together; and their lanes."""
    lanes = gl.arange(0, WORDS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    offset = chunk * WORDS + lanes
    words = gl.zeros_like(lanes)
    for tile in gl.static_range(TILES):
        words |= gl.load(row + tile * num_words + offset, mask=(offset < num_words) & (tile < num_tiles), other=0)
    return words, lanes


@gluon.jit
def count_candidates(row, num_words, num_tiles, TILES: gl.constexpr, WARPS: gl.constexpr):
    """Tiles that are candidates of one of ``num_tiles`` <= TILES query tiles, whose words begin at ``row``."""
    count = 0
    for chunk in range(gl.cdiv(num_words, WORDS)):
        words, _ = _load_union(row, chunk, num_words, num_tiles, TILES, WARPS)
        count += count_bits(words)
    return count


@gluon.jit
def _load_candidates(
    k_desc, k_ring, k_ready, k_free, indices, batch, kv_head, row, num_words, num_tiles, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """The loading warp: as ``hopper_steps.load_tiles``, of candidates from the last down, each with its number in ``indices``."""
    number_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tile = 0
    num_chunks = gl.cdiv(num_words, WORDS)
    for step in range(num_chunks):
        chunk = num_chunks - 1 - step
        words, lanes = _load_union(row, chunk, num_words, num_tiles, TILES, 1)
        place = WORDS
        word = 0
        for _ in range(count_bits(words)):
            bit, place, word = previous_bit(words, lanes, place, word)
            index = chunk * WORDS * 32 + bit
            stage = tile % STAGES
            mbarrier.wait(k_free.index(stage), ((tile // STAGES) & 1) ^ 1)  # for the number too
            indices.index(stage).store(gl.full([1], index, gl.int32, number_layout))
            load_keys(k_desc, k_ring, k_ready, k_free, batch, kv_head, index * BLOCK_N, tile, STAGES)
            tile += 1


@gluon.jit
def load_visited(arguments, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, CAN_SKIP: gl.constexpr, IS_WALK: gl.constexpr,
                 TILES: gl.constexpr):  # fmt: skip
    """The loading warp, over all tiles or over candidates."""
    (
        k_desc, v_desc, k_ring, v_buffers, k_ready, k_free, v_ready, v_free, indices, candidates_ptr, first_word, num_words, num_tiles,
        batch, kv_head, first, last,
    ) = arguments  # fmt: skip
    if IS_WALK:
        row = candidates_ptr + first_word
        _load_candidates(
            k_desc, k_ring, k_ready, k_free, indices, batch, kv_head, row, num_words, num_tiles, STAGES, BLOCK_N, TILES
        )
    else:
        load_tiles(k_desc, v_desc, k_ring, v_buffers, k_ready, k_free, v_ready, v_free, batch, kv_head, first, last, STAGES, BLOCK_N,
                   CAN_SKIP)  # fmt: skip


@gluon.jit
def visited_tile(indices, tile, last, STAGES: gl.constexpr, IS_WALK: gl.constexpr):
    """The key tile that is visited as the ``tile``-th; of a candidate once its keys are there."""
    index = last - 1 - tile
    if IS_WALK:
        index = gl.max(indices.index(tile % STAGES).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    return index

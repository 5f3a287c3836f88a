# SPDX-License-Identifier: Apache-2.0
"""A query tile's way through its key tiles, from the diagonal toward earlier keys: all of them, or those of a known support."""

import triton
import triton.language as tl

from .rule import FORWARD_SLACK, is_tile_retained, largest_of_rows, limit_of, online_softmax_step
from .support import load_words, previous_bit, set_bit
from .tile_steps import allocate, legal_pairs, load_tile, score_tile


@triton.jit
def visit_tiles(q_tile, k, v, k_base, v_base, mask_base, stride_ms, tiles_base, support_base, batch, kv_head, k_begin, seqlen_k,
                 position, row_exists, threshold_log2, row_max, row_sum, acc, limit, omitted, first, last, stride_ks, stride_vs,
                 window_left, window_right, scale_log2, softcap_log2,
                 HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                 BLOCK_DV: tl.constexpr, IS_EDGE: tl.constexpr, USE_TMA: tl.constexpr, HAS_LEFT: tl.constexpr,
                 HAS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, RETURN_WORK: tl.constexpr,
                 SAVE_SUPPORT: tl.constexpr, DOT_PRECISION: tl.constexpr):  # fmt: skip
    """Key tiles last - 1 down to first: row_max, row_sum, acc, limit and omitted (skipped mass over that of row_max) after them."""
    to_log2 = 1.0 if HAS_SOFTCAP else scale_log2
    for step in tl.range(0, last - first):
        index = last - 1 - step
        start_n = index * BLOCK_N
        scores = score_tile(q_tile, k, k_base, batch, kv_head, k_begin, start_n, seqlen_k, stride_ks, scale_log2, softcap_log2,
                            HEAD_DIM, BLOCK_N, BLOCK_D, IS_EDGE, USE_TMA, HAS_SOFTCAP, DOT_PRECISION)  # fmt: skip
        legal_keys = BLOCK_N
        if IS_EDGE:
            legal = legal_pairs(
                (start_n + tl.arange(0, BLOCK_N))[None, :], position[:, None], tl.arange(0, position.shape[0])[:, None],
                row_exists[:, None], seqlen_k, mask_base, stride_ms, window_left, window_right, HAS_LEFT, HAS_RIGHT, HAS_MASK,
            )  # fmt: skip
            scores = tl.where(legal, scores, float("-inf"))
            legal_keys = tl.sum(legal.to(tl.int32), 1)
        tile_max = largest_of_rows(scores)  # (BLOCK_M,)
        row_max, row_sum, acc, limit, omitted = allocate(
            scores, to_log2, tile_max, legal_keys, v, v_base, batch, kv_head, k_begin, start_n, seqlen_k, stride_vs,
            tiles_base, support_base, index, row_exists, threshold_log2, row_max, row_sum, acc, limit, omitted,
            V_HEAD_DIM, BLOCK_N, BLOCK_DV, IS_EDGE, USE_TMA, RETURN_WORK, SAVE_SUPPORT, DOT_PRECISION)  # fmt: skip
    return row_max, row_sum, acc, limit, omitted


@triton.jit
def walk_tiles(q_tile, k, v, k_base, v_base, mask_base, stride_ms, walked_base, support_base, words_in_row, batch, kv_head, k_begin,
               seqlen_k, position, row_exists, threshold_log2, row_max, row_sum, acc, limit, whole_low, whole_high,
               stride_ks, stride_vs, window_left, window_right, scale_log2, softcap_log2,
               HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
               BLOCK_DV: tl.constexpr, IS_SUPPORT: tl.constexpr, USE_TMA: tl.constexpr, HAS_LEFT: tl.constexpr,
               HAS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SAVE_SUPPORT: tl.constexpr,
               DOT_PRECISION: tl.constexpr):  # fmt: skip
    """The tiles of a support, which are all retained, or candidates, which are tested: the bits of a visit of all tiles."""
    to_log2 = 1.0 if HAS_SOFTCAP else scale_log2
    num_chunks = tl.cdiv(words_in_row, 32)
    for chunk in range(num_chunks):
        first_word = (num_chunks - 1 - chunk) * 32
        words, count = load_words(walked_base, num_chunks - 1 - chunk, words_in_row)
        place = 32
        word = 0
        for _ in tl.range(0, count):
            bit, place, word = previous_bit(words, place, word)
            index = first_word * 32 + bit
            start_n = index * BLOCK_N
            scores = score_tile(q_tile, k, k_base, batch, kv_head, k_begin, start_n, seqlen_k, stride_ks, scale_log2, softcap_log2,
                                HEAD_DIM, BLOCK_N, BLOCK_D, True, USE_TMA, HAS_SOFTCAP, DOT_PRECISION)  # fmt: skip
            # of a tile that is not retained too: what is loaded whatever happens can be on its way early
            v_tile = load_tile(v, v_base, batch, kv_head, k_begin, start_n, seqlen_k, tl.arange(0, BLOCK_DV), stride_vs,
                               V_HEAD_DIM, not USE_TMA, USE_TMA, BLOCK_N, BLOCK_DV)  # fmt: skip
            if (start_n < whole_low) | (start_n + BLOCK_N > whole_high) | HAS_MASK:
                legal = legal_pairs(
                    (start_n + tl.arange(0, BLOCK_N))[None, :], position[:, None], tl.arange(0, position.shape[0])[:, None],
                    row_exists[:, None], seqlen_k, mask_base, stride_ms, window_left, window_right, HAS_LEFT, HAS_RIGHT, HAS_MASK,
                )  # fmt: skip
                scores = tl.where(legal, scores, float("-inf"))
            tile_max = largest_of_rows(scores)
            if IS_SUPPORT:
                p, decay, row_max, row_sum = online_softmax_step(scores, to_log2, tile_max, row_max, row_sum, True)
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision=DOT_PRECISION)
            else:
                retained = is_tile_retained(tile_max * to_log2, limit)
                if retained:
                    p, decay, row_max, row_sum = online_softmax_step(scores, to_log2, tile_max, row_max, row_sum, True)
                    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision=DOT_PRECISION)
                    limit = limit_of(row_max * to_log2 + tl.log2(row_sum), threshold_log2, row_exists, FORWARD_SLACK)
                    if SAVE_SUPPORT:
                        set_bit(support_base, index, retained)
    return row_max, row_sum, acc

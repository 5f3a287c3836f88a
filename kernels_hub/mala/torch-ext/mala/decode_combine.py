# SPDX-License-Identifier: Apache-2.0
"""What the splits of a decode found, added up: the last kernel of all of its forms."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_chain import gdc_wait
from .decode_rows import decode_place
from .tile_steps import LOG2_E

SPLITS_AT_ONCE = tl.constexpr(128)
# fmt: off
COMBINE_VALUES = ["q_begin", "q_end", "k_begin", "k_end", "total_q", "num_q_tiles", "num_kv_heads", "num_splits"]
# fmt: on


@triton.jit
def store_split(acc_ptr, state_ptr, acc, row_max, row_sum, omitted, group, split, num_splits, V_HEAD_DIM: tl.constexpr,
                BLOCK_DV: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """A split's result for combine; acc is left unwritten where the split retained nothing."""
    rows = tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_DV)
    is_row = rows < TOKENS * GROUP
    of_split = tl.cast(group * num_splits + split, tl.int64) * (TOKENS * GROUP)
    state = state_ptr + of_split * 3 + rows * 3
    tl.store(state, row_max, mask=is_row)
    tl.store(state + 1, row_sum, mask=is_row)
    tl.store(state + 2, omitted, mask=is_row)
    mask = (is_row & (row_sum != 0.0))[:, None] & (dims < V_HEAD_DIM)[None, :]
    tl.store(acc_ptr + (of_split + rows)[:, None] * V_HEAD_DIM + dims[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=COMBINE_VALUES)
def combine_kernel(
    acc_ptr, state_ptr, sinks_ptr, out_ptr, lse_ptr, certificate_ptr, bounds_ptr,
    q_begin, q_end, k_begin, k_end, total_q, num_q_tiles, num_kv_heads, num_splits,
    V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    HAS_SINKS: tl.constexpr, RETURN_WORK: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """One row of a group: the splits' sums over one normalizer, the sink in it.

    out is (batch, total_q, heads, V_HEAD_DIM), lse and certificate (batch, heads, total_q).
    """
    group = tl.program_id(0)
    row = tl.program_id(1)
    q_tile, kv_head, sequence, q_begin, _, seqlen_q, _ = decode_place(
        group, num_q_tiles, num_kv_heads, bounds_ptr, q_begin, q_end, k_begin, k_end, HAS_BOUNDS
    )
    token = q_tile * TOKENS + row // GROUP
    if IS_CHAINED:
        gdc_wait()  # rows that do not exist, too: if no program waited, what follows would not wait for the kernels before either
    if token >= seqlen_q:
        return
    dims = tl.arange(0, BLOCK_DV)
    total_max = float("-inf")
    total_sum = 0.0
    omitted = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    head = kv_head * GROUP + row % GROUP
    if HAS_SINKS:
        total_max = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total_sum = tl.where(total_max == float("-inf"), 0.0, 1.0)
    for start in range(0, num_splits, SPLITS_AT_ONCE):
        splits = start + tl.arange(0, SPLITS_AT_ONCE)
        of_splits = tl.cast(group * num_splits + splits, tl.int64) * (TOKENS * GROUP) + row
        is_split = splits < num_splits
        row_max = tl.load(state_ptr + of_splits * 3, mask=is_split, other=float("-inf"))
        row_sum = tl.load(state_ptr + of_splits * 3 + 1, mask=is_split, other=0.0)
        some = row_sum != 0.0
        new_max = tl.maximum(total_max, tl.max(tl.where(some, row_max, float("-inf")), 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(total_max - shift)
        weight = tl.where(some, tl.exp2(row_max - shift), 0.0)
        pieces = tl.load(acc_ptr + of_splits[:, None] * V_HEAD_DIM + dims[None, :],
                         mask=some[:, None] & (dims < V_HEAD_DIM)[None, :], other=0.0)  # fmt: skip
        acc = acc * decay + tl.sum(pieces * weight[:, None], 0)
        total_sum = total_sum * decay + tl.sum(row_sum * weight, 0)
        if RETURN_WORK:
            # a split that retained nothing still has a normalizer in the two-pass form
            left_out = tl.load(state_ptr + of_splits * 3 + 2, mask=is_split, other=0.0)
            at = tl.where(row_max == float("-inf"), 0.0, tl.exp2(row_max - shift))
            omitted = omitted * decay + tl.sum(tl.where(left_out == 0.0, 0.0, left_out * at), 0)
        total_max = new_max
    inverse = tl.where(total_sum == 0.0, 0.0, 1.0 / total_sum)
    lse = tl.where(total_sum == 0.0, float("-inf"), (total_max + tl.log2(total_sum)) / LOG2_E)
    batch = sequence.to(tl.int64)
    num_heads = num_kv_heads * GROUP
    of_out = ((batch * total_q + q_begin + token) * num_heads + head) * V_HEAD_DIM
    tl.store(out_ptr + of_out + dims, (acc * inverse).to(out_ptr.dtype.element_ty), mask=dims < V_HEAD_DIM)
    of_lse = (batch * num_heads + head) * total_q + q_begin + token
    tl.store(lse_ptr + of_lse, lse)
    if RETURN_WORK:
        tl.store(certificate_ptr + of_lse, omitted * inverse)

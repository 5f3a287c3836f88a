# SPDX-License-Identifier: Apache-2.0
"""A layer left to torch's scaled_dot_product_attention, with the same legal pairs as MALA would have."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .hf_mask import Visible
from .visibility import visible_range


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scaling: Optional[float]) -> Tensor:
    """out (batch, seqlen_q, num_heads, v_head_dim) of full attention; ``visible`` says which pairs are legal."""
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    left, right = visible.window
    unmasked = all(x is None for x in (visible.mask, visible.padding, visible.lengths, visible.packing))
    unmasked = unmasked and (left < 0 or left >= seqlen_k - 1)  # nothing is hidden on the left
    if unmasked and (right < 0 or (right == 0 and seqlen_q == 1)):
        mask, is_causal = None, False
    elif unmasked and right == 0 and seqlen_q == seqlen_k:  # torch aligns at the top left; both alignments agree here
        mask, is_causal = None, True
    else:
        mask, is_causal = legal_pairs(visible, seqlen_q, seqlen_k, q.device), False
    groups = query.shape[1] // key.shape[1]
    if (
        groups > 1 and seqlen_q == 1 and mask is not None and (mask.ndim < 4 or mask.shape[1] == 1)
    ):  # a step copies no keys
        rows = query[:, :, 0].unflatten(1, (-1, groups))  # the heads of a group are the rows of one
        out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
        return out.flatten(1, 2)[:, None]
    # with a mask, torch has fast kernels only for equal head counts
    shares_heads = groups > 1 and mask is None
    if groups > 1 and not shares_heads:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scaling, enable_gqa=shares_heads
    )
    return out.transpose(1, 2)


def legal_pairs(visible: Visible, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """bool, broadcastable to (batch, num_heads, seqlen_q, seqlen_k)."""
    row, key = torch.arange(seqlen_q, device=device), torch.arange(seqlen_k, device=device)
    if visible.packing is not None:
        sequence_of_row, position = _sequence_and_position(visible.packing[0].cu_seqlens, row)
        sequence_of_key, key_position = _sequence_and_position(visible.packing[1].cu_seqlens, key)
        lengths_q, lengths_k = (x.cu_seqlens.diff() for x in visible.packing)
        # the last row of a sequence is aligned with its last key
        position = position + (lengths_k - lengths_q)[sequence_of_row]
        legal = _in_window(position[:, None], key_position, visible.window)
        return legal & (sequence_of_row[:, None] == sequence_of_key)
    if visible.lengths is not None:
        begin, end = (x[:, None, None] for x in visible.lengths.unbind(1))
        legal = _in_window(end - seqlen_q + row[:, None], key, visible.window)
        return (legal & (key >= begin) & (key < end))[:, None]
    width = seqlen_k if visible.padding is None else visible.padding.width
    position = row + width - seqlen_q
    low, high = visible_range(position, width, visible.window)
    legal = (key >= low[:, None]) & (key < high[:, None])
    if visible.padding is not None:
        begin, end = visible.padding.leftpad_k[:, None], visible.padding.seqused_k[:, None]
        own_keys, own_rows = (key >= begin) & (key < end), (position >= begin) & (position < end)
        legal = (legal & own_keys[:, None] & own_rows[:, :, None])[:, None]
    return legal if visible.mask is None else legal & visible.mask


def _sequence_and_position(cu_seqlens: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    sequence = torch.searchsorted(cu_seqlens, index, right=True) - 1
    sequence = sequence.clamp(max=len(cu_seqlens) - 2)
    return sequence, index - cu_seqlens[sequence]


def _in_window(position: Tensor, key: Tensor, window: tuple[int, int]) -> Tensor:
    left, right = window
    legal = torch.ones(torch.broadcast_shapes(position.shape, key.shape), dtype=torch.bool, device=key.device)
    if left >= 0:
        legal &= key >= position - left
    if right >= 0:
        legal &= key <= position + right
    return legal

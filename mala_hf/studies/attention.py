# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention by torch: of all tokens, under a mask, of the last tokens.

q (batch, seqlen, num_heads, head_dim), k and v (batch, seqlen, num_kv_heads, head_dim), out like q.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bench.baselines import heads_first


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query sees all keys up to its own."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = heads_first(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """allowed: bool, broadcastable to (batch, num_heads, seqlen_q, seqlen_k), True where a query sees a key."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = heads_first(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=grouped).transpose(1, 2)


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Each query sees the last ``window`` keys, its own included. On a GPU FlashAttention-2 as torch ships it; elsewhere a mask."""
    batch, seqlen = q.shape[:2]
    if not q.is_cuda:
        pairs = torch.ones(seqlen, seqlen, dtype=torch.bool, device=q.device)
        return masked_attention(q, k, v, pairs.tril() & pairs.triu(1 - window))
    cu_seqlens = seqlen * torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    out = torch.ops.aten._flash_attention_forward(
        *(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens, cu_seqlens, seqlen, seqlen, 0.0, True, False,
        scale=q.shape[-1] ** -0.5, window_size_left=window - 1, window_size_right=0,
    )[0]  # fmt: skip
    return out.view(q.shape)

# SPDX-License-Identifier: Apache-2.0
"""Packed sequences with one new token each, as continuous batching makes them: a decode, which packed calls as such do not have.

Packed keys are a cache whose pages hold one key, so they are read where they lie.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .interface import mala_attn_varlen_func
from .kvcache import mala_attn_with_kvcache_func


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    **options: Any,
):
    """:func:`mala_attn_varlen_func`, as a decode where every sequence has one row, gradients are not needed and lengths are given.

    Out, and the work if it is asked for; a decode's work has one tile row per sequence.
    """
    differentiable = (q, k, v, options.get("sinks"))
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable)
    has_one_row_each = max_seqlen_q == 1 and q.shape[0] == cu_seqlens_q.numel() - 1 > 0
    if max_seqlen_k is None or not has_one_row_each or needs_grad or k.shape[0] == 0:
        return mala_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            **options,
        )  # fmt: skip
    key = torch.arange(max_seqlen_k, device=k.device, dtype=torch.int32)
    # behind a sequence's keys the table is not read
    table = (cu_seqlens_k[:-1, None].to(torch.int32) + key).clamp(max=k.shape[0] - 1)
    result = mala_attn_with_kvcache_func(
        q[:, None], k[:, None], v[:, None], cache_seqlens=cu_seqlens_k.diff(), block_table=table, **options
    )
    return (result[0][:, 0], *result[1:]) if isinstance(result, tuple) else result[:, 0]

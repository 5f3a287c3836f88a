# SPDX-License-Identifier: Apache-2.0
"""DSA over sequences too long for a mask of seqlen squared: selected tokens are numbers, and their keys and values are gathered."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .attention import full_attention
from .dsa import causal_rows, index_scores

INDEX_ROWS = 1024  # whose index scores are formed at once
GATHER_ROWS = 4096  # whose keys and values are gathered at once


@torch.no_grad()
def selected_numbers(qi: Tensor, ki: Tensor, w: Tensor, topk: int) -> Tensor:
    """Numbers of the topk tokens with the largest I, of every query that sees more: int32 (batch, seqlen - topk, topk).

    The first ``topk`` queries see no more than that. qi, ki, w: as of :class:`~mala_hf.studies.dsa.Indexer`.
    """
    seqlen, found = ki.shape[1], []
    for start in range(topk, seqlen, INDEX_ROWS):
        rows = torch.arange(start, min(start + INDEX_ROWS, seqlen), device=ki.device)
        part, keys = slice(start, start + len(rows)), start + len(rows)
        scores = index_scores(qi[:, part], ki[:, :keys], w[:, part])
        scores = scores.masked_fill(~causal_rows(rows, keys), -torch.inf)
        found.append(scores.topk(topk, sorted=False).indices.int())
    return torch.cat(found, 1)


def gathered_rows(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    """Attention of each query to the tokens of these numbers: q (batch, rows, num_heads, head_dim), out like it.

    k, v (batch, keys, num_kv_heads, head_dim), numbers (batch, rows, topk). The query heads of a KV head share what is gathered.
    """
    batch, rows, _, head_dim = q.shape
    sequence = torch.arange(batch, device=q.device).view(-1, 1, 1)
    # (batch * rows, kv heads, topk, 2 head_dim)
    gathered = torch.cat([k, v], -1)[sequence, numbers].flatten(0, 1).transpose(1, 2)
    keys, values = gathered.split(head_dim, -1)
    grouped = q.reshape(batch * rows, k.shape[2], -1, head_dim)
    return F.scaled_dot_product_attention(grouped, keys, values).reshape(q.shape)


def dsa_attention(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    """Causal attention to the selected tokens; out like q. numbers: of :func:`selected_numbers`, for the last queries.

    The queries before them attend to all that they see. Backward gathers again, a few rows at a time: memory.
    """
    topk = numbers.shape[2]
    parts = [full_attention(q[:, :topk], k[:, :topk], v[:, :topk])]
    for start in range(0, numbers.shape[1], GATHER_ROWS):
        part = numbers[:, start : start + GATHER_ROWS]
        rows = q[:, topk + start : topk + start + part.shape[1]]
        parts.append(checkpoint(gathered_rows, rows, k, v, part, use_reentrant=False))
    return torch.cat(parts, 1)


@torch.no_grad()
def dsa_decode(q: Tensor, k: Tensor, v: Tensor, index: tuple[Tensor, Tensor, Tensor], topk: int) -> Tensor:
    """One new token over a cache with its index keys: (batch, 1, num_heads, head_dim). index: qi and w of the token, ki of all."""
    qi, ki, w = index
    best = index_scores(qi, ki, w).topk(min(topk, ki.shape[1]), sorted=False).indices
    return gathered_rows(q, k, v, best)

# SPDX-License-Identifier: Apache-2.0
"""MoBA, mixture of block attention (Lu et al., 2025, arXiv 2502.13189).

Keys are cut into blocks. The gate of a query is its product with the mean of a block's keys; a query attends to the ``topk`` blocks
with the largest gates, its own block always among them and causal inside, later blocks never. It has no parameters, and a choice has no
gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import masked_attention
from .block_attention import block_attention, block_mask
from .packed_attention import upcast

ROWS = 8192  # whose gates are formed at once


def block_means(k: Tensor, block: int) -> Tensor:
    """Means in float32 of the keys of every block, the last one perhaps shorter: (batch, blocks, num_kv_heads, head_dim)."""
    seqlen = k.shape[1]
    full = seqlen // block * block
    means = upcast(k[:, :full]).unflatten(1, (-1, block)).mean(2)
    if full == seqlen:
        return means
    return torch.cat([means, upcast(k[:, full:]).mean(1, keepdim=True)], 1)


@torch.no_grad()
def chosen_blocks(q: Tensor, k: Tensor, block: int, topk: int) -> Tensor:
    """The topk - 1 blocks before each query's own with the largest gates: int64 (batch, seqlen, num_heads, choices), -1 for none.

    q (batch, seqlen, num_heads, head_dim), k (batch, seqlen, num_kv_heads, head_dim).
    """
    seqlen, groups = q.shape[1], q.shape[2] // k.shape[2]
    means = block_means(k, block).repeat_interleave(groups, 2)
    choices = min(topk - 1, means.shape[1] - 1)
    if choices == 0:
        return torch.full((*q.shape[:3], 0), -1, dtype=torch.int64, device=q.device)
    numbers = torch.arange(means.shape[1], device=q.device)
    found = []
    for start in range(0, seqlen, ROWS):
        with torch.autocast(q.device.type, enabled=False):
            gates = torch.einsum("bqhd,bnhd->bqhn", upcast(q[:, start : start + ROWS]), means)
        own = torch.arange(start, start + gates.shape[1], device=q.device) // block
        gates = gates.masked_fill((numbers >= own[:, None])[None, :, None], -torch.inf)
        best = gates.topk(choices, sorted=False)
        found.append(best.indices.where(best.values > -torch.inf, -1))
    return torch.cat(found, 1)


def moba_attention(q: Tensor, k: Tensor, v: Tensor, *, block: int, topk: int, masked: bool = False) -> Tensor:
    """Causal MoBA: q (batch, seqlen, num_heads, head_dim), k and v (batch, seqlen, num_kv_heads, head_dim); out like q.

    masked: form all scores and mask them, instead of routing queries to blocks; the same result, memory seqlen squared.
    Raises ``ValueError`` for a block or a topk below 1.
    """
    if min(block, topk) < 1:
        raise ValueError(f"block and topk must be at least 1, got {block} and {topk}")
    chosen = chosen_blocks(q, k, block, topk)
    if masked:
        return masked_attention(q, k, v, block_mask(chosen, q.shape[1], block))
    return block_attention(q, k, v, chosen, block)


def moba_slots(seqlen: int, block: int, topk: int) -> float:
    """Key slots per query, mean over the queries of a sequence."""
    query = torch.arange(seqlen)
    return (query % block + 1 + block * (query // block).clamp(max=topk - 1)).double().mean().item()


@torch.no_grad()
def moba_decode(q: Tensor, k: Tensor, v: Tensor, means: Tensor, *, block: int, topk: int) -> Tensor:
    """One new token, the last of k and v, over a cache whose block means are kept: (batch, 1, num_heads, head_dim).

    The last block is the query's own. Raises ``ValueError`` where it is not full: then its mean would be another every time.
    """
    batch, seqlen, num_kv_heads, head_dim = k.shape
    if seqlen % block:
        raise ValueError(f"a context of {seqlen} tokens does not end with a block of {block}")
    blocks = seqlen // block
    grouped = q.view(batch, num_kv_heads, -1, head_dim)  # a KV head's query heads
    gates = torch.einsum("bkgd,bnkd->bkgn", upcast(grouped), means)
    gates[..., -1] = torch.inf
    chosen = gates.topk(min(topk, blocks), sorted=False).indices  # (batch, kv heads, groups, topk)
    sequence = torch.arange(batch, device=q.device).view(-1, 1, 1, 1)
    head = torch.arange(num_kv_heads, device=q.device).view(-1, 1, 1)
    keys, values = (
        x.unflatten(1, (blocks, block)).permute(0, 3, 1, 2, 4)[sequence, head, chosen].flatten(3, 4) for x in (k, v)
    )  # (batch, kv heads, groups, topk * block, head_dim)
    out = F.scaled_dot_product_attention(grouped[..., None, :], keys, values)
    return out.reshape(batch, 1, -1, head_dim)

# SPDX-License-Identifier: Apache-2.0
"""Causal attention in which every query sees its own block of keys and a few earlier ones that were chosen for it.

What MoBA and the selected branch of NSA have in common. ``block_attention`` routes: the queries that chose a block are gathered, attend
to it together, and the parts of each row are merged (the scheme of MoBA's algorithm 1). ``block_mask`` says the same as a mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .packed_attention import Packing, packed_backward, packed_forward, upcast


def block_mask(chosen: Tensor, seqlen: int, block: int) -> Tensor:
    """bool (batch, num_heads, rows, seqlen): who sees whom. chosen: as in :func:`block_attention`, of all queries or of the last."""
    batch, rows, num_heads, _ = chosen.shape
    blocks = -(-seqlen // block)
    query = torch.arange(seqlen - rows, seqlen, device=chosen.device)
    allowed = torch.zeros(batch, rows, num_heads, blocks + 1, dtype=torch.bool, device=chosen.device)
    allowed.scatter_(-1, chosen.where(chosen >= 0, blocks), True)
    allowed.scatter_(-1, (query // block).view(1, -1, 1, 1).expand(batch, -1, num_heads, 1), True)
    by_key = allowed[..., :blocks].repeat_interleave(block, -1)[..., :seqlen]
    return by_key.transpose(1, 2) & (torch.arange(seqlen, device=chosen.device) <= query[:, None])


def block_attention(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int) -> Tensor:
    """Attention of each query to its own block, causally, and to the chosen earlier blocks.

    Args:
        q: (batch, seqlen, num_heads, head_dim); k, v: (batch, seqlen, num_kv_heads, head_dim).
        chosen: int64 (batch, seqlen, num_heads, choices), for each query and head the numbers of blocks of ``block`` keys before its
            own, each at most once; -1 for none.

    Returns:
        out like q. Its gradients reach q, k and v; a choice has none.
    """
    return _BlockAttention.apply(q, k, v, chosen, block)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int) -> Tensor:
        batch, seqlen = q.shape[:2]
        scale = q.shape[-1] ** -0.5
        own = own_blocks(batch, seqlen, block, q.device)
        rows, routed = routed_rows(chosen, k.shape[2], seqlen, block)
        parts = q.flatten(0, 1).contiguous(), k.flatten(0, 1).contiguous(), v.flatten(0, 1).contiguous()
        out, lse = packed_forward(*parts, own, scale)
        out, lse = upcast(out).flatten(0, 1), lse.T.reshape(-1)  # a row for each token and head
        if len(rows):
            found, found_lse = packed_forward(by_row(q)[rows], by_head(k), by_head(v), routed, scale)
            out, lse = merged(out, lse, found.squeeze(1), found_lse.squeeze(0), rows)
        out = out.to(q.dtype).view(q.shape)
        ctx.save_for_backward(q, k, v, out, lse, rows)
        ctx.packings = own, routed
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, rows = ctx.saved_tensors
        own, routed = ctx.packings
        batch, seqlen, num_heads, head_dim = q.shape
        scale, do = head_dim**-0.5, gradients[0].contiguous()
        flat_do, flat_q, flat_k, flat_v, flat_out = (x.flatten(0, 1).contiguous() for x in (do, q, k, v, out))
        lse_own = lse.view(-1, num_heads).T.contiguous()
        dq, dk, dv = (
            upcast(x) for x in packed_backward(flat_do, flat_q, flat_k, flat_v, flat_out, lse_own, own, scale)
        )
        dk, dv = (x.view(batch, seqlen, -1, head_dim) for x in (dk, dv))
        if len(rows):
            part = packed_backward(
                by_row(do)[rows], by_row(q)[rows], by_head(k), by_head(v), by_row(out)[rows], lse[rows][None], routed, scale
            )  # fmt: skip
            dq = dq.flatten(0, 1).index_add(0, rows, upcast(part[0].squeeze(1)))
            dk, dv = (
                into + x.view(batch, -1, seqlen, head_dim).transpose(1, 2)
                for into, x in zip((dk, dv), part[1:], strict=True)
            )
        return dq.view(q.shape).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def by_row(x: Tensor) -> Tensor:
    """(batch, seqlen, num_heads, head_dim) as (rows, 1, head_dim), a row for each token and head."""
    return x.reshape(-1, 1, x.shape[-1])


def by_head(x: Tensor) -> Tensor:
    """(batch, seqlen, num_kv_heads, head_dim) as (keys, 1, head_dim), the keys of a head together."""
    return x.transpose(1, 2).reshape(-1, 1, x.shape[-1])


def own_blocks(batch: int, seqlen: int, block: int, device: torch.device) -> Packing:
    """Every block as a sequence of its own."""
    starts = torch.arange(0, seqlen, block, device=device)
    every = (seqlen * torch.arange(batch, device=device)[:, None] + starts).flatten()
    cu_seqlens = torch.cat([every, every.new_tensor([batch * seqlen])]).int()
    return Packing(cu_seqlens, cu_seqlens, block, block, True)


def routed_rows(chosen: Tensor, num_kv_heads: int, seqlen: int, block: int) -> tuple[Tensor, Packing]:
    """The rows (token and head) of all choices in the order of what they chose, and a packing with a sequence for each of those blocks.

    The device is waited for: how many rows chose a block decides shapes.
    """
    batch, _, num_heads, choices = chosen.shape
    blocks = -(-seqlen // block)
    head = torch.arange(num_heads, device=chosen.device) // (num_heads // num_kv_heads)
    sequence = torch.arange(batch, device=chosen.device)[:, None] * num_kv_heads + head  # (batch, num_heads)
    target = sequence[:, None, :, None] * blocks + chosen
    none = batch * num_kv_heads * blocks
    target = target.where(chosen >= 0, none).flatten()
    counts = torch.bincount(target, minlength=none + 1)[:none]
    order = torch.sort(target, stable=True).indices[: int(counts.sum())]
    starts_k = torch.arange(blocks, device=chosen.device) * block
    starts_k = (seqlen * torch.arange(batch * num_kv_heads, device=chosen.device)[:, None] + starts_k).flatten()
    return order // choices, Packing(
        torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(),
        torch.cat([starts_k, starts_k.new_tensor([batch * num_kv_heads * seqlen])]).int(),
        int(counts.max()),
        block,
        False,
    )


def merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """out (all rows, head_dim), lse (all rows,) together with parts of the rows ``rows``, of which some come several times; float32."""
    largest = lse.scatter_reduce(0, rows, part_lse, "amax")
    weight, part_weight = (lse - largest).exp(), (part_lse - largest[rows]).exp()
    total = weight.index_add(0, rows, part_weight)
    summed = (out * weight[:, None]).index_add(0, rows, upcast(part) * part_weight[:, None])
    return summed / total[:, None], largest + total.log()

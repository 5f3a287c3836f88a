# SPDX-License-Identifier: Apache-2.0
"""Softmax attention of packed sequences with its normalizers, forward and backward apart, so that parts of a row can be merged.

A row whose keys lie in several parts has one softmax over all of them. Each part's forward gives (out, lse); merged, they are the
row's. Each part's backward takes the *merged* out and lse: P = exp(S - lse) and delta = rowsum(dO * O) are then those of the whole row.
On a GPU both are FlashAttention-2 as torch ships it; elsewhere plain PyTorch, one sequence at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where sequences begin in packed rows and keys: int32 (sequences + 1,), first 0; and the longest of each."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool


def upcast(x: Tensor) -> Tensor:
    """In float32, or float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def packed_forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """q (total_q, num_heads, head_dim), k and v (total_k, num_kv_heads, head_dim): out like q, lse float32 (num_heads, total_q).

    A row of a sequence without keys gives zeros and -inf.
    """
    if q.is_cuda:
        found = torch.ops.aten._flash_attention_forward(
            q, k, v, packing.cu_seqlens_q, packing.cu_seqlens_k, packing.max_seqlen_q, packing.max_seqlen_k,
            0.0, packing.causal, False, scale=softmax_scale,
        )  # fmt: skip
        if found[1].shape != (q.shape[1], q.shape[0]):
            raise RuntimeError(
                f"torch {torch.__version__} lays out lse as {tuple(found[1].shape)} for q {tuple(q.shape)}"
            )
        return found[0], found[1]
    out, lse = torch.zeros_like(q), upcast(q.new_full((q.shape[1], q.shape[0]), -torch.inf))
    for rows, keys in _sequences(packing):
        if rows.stop > rows.start and keys.stop > keys.start:
            scores = _scores(q[rows], k[keys], packing.causal, softmax_scale)
            lse[:, rows] = scores.logsumexp(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _per_head(v[keys], q)).to(out.dtype)
    return out, lse


def packed_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this part, for the merged ``out`` and ``lse``; shapes as in :func:`packed_forward`."""
    if q.is_cuda:
        unused = torch.zeros((2,), dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
        return torch.ops.aten._flash_attention_backward(
            do, q, k, v, out, lse, packing.cu_seqlens_q, packing.cu_seqlens_k, packing.max_seqlen_q, packing.max_seqlen_k,
            0.0, packing.causal, unused, torch.empty(0, device=q.device), scale=softmax_scale,
        )  # fmt: skip
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (upcast(do) * upcast(out)).sum(-1).T  # (num_heads, total_q)
    for rows, keys in _sequences(packing):
        if rows.stop > rows.start and keys.stop > keys.start:
            p = (_scores(q[rows], k[keys], packing.causal, softmax_scale) - lse[:, rows, None]).exp()
            dp = torch.einsum("qhd,khd->hqk", upcast(do[rows]), _per_head(v[keys], q))
            ds = softmax_scale * p * (dp - delta[:, rows, None])
            dq[rows] = torch.einsum("hqk,khd->qhd", ds, _per_head(k[keys], q)).to(dq.dtype)
            per_head = (
                torch.einsum("hqk,qhd->khd", ds, upcast(q[rows])),
                torch.einsum("hqk,qhd->khd", p, upcast(do[rows])),
            )
            for into, gradient in zip((dk, dv), per_head, strict=True):
                into[keys] = gradient.unflatten(1, (into.shape[1], -1)).sum(2).to(into.dtype)
    return dq, dk, dv


def _sequences(packing: Packing) -> list[tuple[slice, slice]]:
    pairs = (pairwise(cu_seqlens.tolist()) for cu_seqlens in (packing.cu_seqlens_q, packing.cu_seqlens_k))
    return [(slice(*rows), slice(*keys)) for rows, keys in zip(*pairs, strict=True)]


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, each key-value head repeated for its group of query heads."""
    return upcast(x).repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, causal: bool, softmax_scale: float) -> Tensor:
    """(num_heads, rows, keys); a causal one is bottom-right aligned, and is used with as many rows as keys."""
    scores = softmax_scale * torch.einsum("qhd,khd->hqk", upcast(q), _per_head(k, q))
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores

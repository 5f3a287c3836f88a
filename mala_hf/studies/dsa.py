# SPDX-License-Identifier: Apache-2.0
"""DSA, DeepSeek sparse attention (the DeepSeek-V3.2 report, 2025): a small indexer scores every earlier token, attention sees the best.

    I[t, s] = sum_j w[t, j] * relu(<qi[t, j], ki[s]>)        index heads j; one index key for each token

A query attends to its ``topk`` tokens of the largest I: to all while it sees no more, as in the report's first, dense stage.
Only a loss of its own trains the indexer, on inputs cut from the graph: the divergence, over the tokens that are attended to, between
attention's probabilities summed over its heads and made to sum to 1, and the softmax of I. Attention here has ordinary heads, not the
latent ones of that model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention import full_attention, masked_attention

ROWS = 2048  # whose index scores are formed at once


class Indexer(nn.Module):
    """Index queries, keys and weights of a token."""

    def __init__(self, d_model: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.query = nn.Linear(d_model, num_heads * head_dim, bias=False)
        self.key = nn.Linear(d_model, head_dim, bias=False)
        self.norm = nn.LayerNorm(head_dim)
        self.weight = nn.Linear(d_model, num_heads, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qi (batch, seqlen, heads, head_dim), ki (batch, seqlen, head_dim), w (batch, seqlen, heads), scaled as a softmax needs."""
        scale = (self.num_heads * self.head_dim) ** -0.5
        qi = self.query(x).unflatten(-1, (self.num_heads, -1))
        return qi, self.norm(self.key(x)).to(qi.dtype), scale * self.weight(x)


def index_scores(qi: Tensor, ki: Tensor, w: Tensor) -> Tensor:
    """I of these rows for all keys, (batch, rows, keys); no key is hidden."""
    products = torch.einsum("bqhd,bkd->bqhk", qi, ki).relu()
    return torch.einsum("bqh,bqhk->bqk", w, products)


def causal_rows(rows: Tensor, keys: int) -> Tensor:
    """bool (rows, keys): True where a key is not later than the row's token. rows: int64 numbers of tokens."""
    return torch.arange(keys, device=rows.device) <= rows[:, None]


@torch.no_grad()
def selected_tokens(qi: Tensor, ki: Tensor, w: Tensor, topk: int) -> Tensor:
    """bool (batch, seqlen, seqlen): for each query its topk visible tokens of the largest I, all while there are no more."""
    batch, seqlen = ki.shape[:2]
    selected = torch.zeros(batch, seqlen, seqlen, dtype=torch.bool, device=ki.device)
    for start in range(0, seqlen, ROWS):
        rows = torch.arange(start, min(start + ROWS, seqlen), device=ki.device)
        part = slice(start, start + len(rows))
        visible = causal_rows(rows, start + len(rows))
        if start + len(rows) <= topk:
            selected[:, part, : visible.shape[1]] = visible
            continue
        for b in range(batch):  # one sequence at a time: memory
            scores = index_scores(qi[b : b + 1, part], ki[b : b + 1, : visible.shape[1]], w[b : b + 1, part])[0]
            best = scores.masked_fill(~visible, -torch.inf).topk(min(topk, visible.shape[1]), sorted=False).indices
            selected[b, part, : visible.shape[1]] = torch.zeros_like(visible).scatter_(1, best, True) & visible
    return selected


@torch.no_grad()
def target_probabilities(q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    """Attention's probabilities over the allowed keys, mean over its heads: float32 (batch, rows, keys).

    q (batch, rows, num_heads, head_dim), k (batch, keys, num_kv_heads, head_dim), allowed (batch or 1, rows, keys).
    """
    groups, total = q.shape[2] // k.shape[2], torch.zeros((), device=q.device)
    for head in range(q.shape[2]):  # one at a time: memory
        scores = torch.einsum("bqd,bkd->bqk", q[:, :, head], k[:, :, head // groups]).float() * q.shape[-1] ** -0.5
        total = total + scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return total / q.shape[2]


def indexer_loss(target: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
    """Mean over rows of KL(target || softmax of the scores), both over the allowed keys; (batch, rows, keys)."""
    log_p = scores.float().masked_fill(~allowed, -torch.inf).log_softmax(-1).masked_fill(~allowed, 0.0)
    return (torch.special.xlogy(target, target) - target * log_p).sum(-1).mean()


def dsa_slots(seqlen: int, topk: int) -> float:
    """Key slots per query, mean over the queries of a sequence; the indexer's scores are not among them."""
    return torch.arange(1, seqlen + 1).clamp(max=topk).double().mean().item()


class DSA(nn.Module):
    """The layer.

    loss_rows: queries of a step on which the indexer's loss is taken, drawn anew each time; its mean is that over all of them.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        topk: int,
        *,
        index_heads: int = 4,
        index_dim: int = 32,
        loss_rows: int = 512,
    ) -> None:
        super().__init__()
        self.num_heads, self.topk, self.loss_rows = num_heads, topk, loss_rows
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.indexer = Indexer(d_model, index_heads, index_dim)
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, d_model) to the same; in training ``loss`` then holds the indexer's."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        seqlen = x.shape[1]
        qi, ki, w = self.indexer(x.detach())
        selected = None if seqlen <= self.topk else selected_tokens(qi, ki, w, self.topk)
        if selected is None:
            out = full_attention(q, k, v)
        else:
            out = masked_attention(q, k, v, selected[:, None])
        if self.training:
            rows = torch.randperm(seqlen, device=x.device)[: self.loss_rows]
            allowed = causal_rows(rows, seqlen)[None] if selected is None else selected[:, rows]
            target = target_probabilities(q.detach()[:, rows], k.detach(), allowed)
            self.loss = indexer_loss(target, index_scores(qi[:, rows], ki, w[:, rows]), allowed)
        return self.out(out.flatten(2))

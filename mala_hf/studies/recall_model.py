# SPDX-License-Identifier: Apache-2.0
"""The model of the associative recall: as in Zoology a layer of short convolution, one of the attention under study, no positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..flops import causal_slots
from ..ops import mala_attn_func
from .attention import full_attention
from .dsa import DSA, dsa_slots
from .moba import moba_attention, moba_slots
from .nsa import NSA, NSAShape, nsa_slots

METHODS = ("full", "mala", "moba", "dsa", "nsa")
CEILING = 1024  # key slots per query of the methods with a budget
MOBA_BLOCK = 128
KERNEL = 3
HEAD_DIM = 64

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class ShortConvolution(nn.Module):
    """Zoology's BaseConv: a projection times a causal depthwise convolution over ``KERNEL`` tokens."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.projection = nn.Linear(d_model, d_model)
        nn.init.ones_(self.projection.bias)  # the convolution alone, at first: training takes many times longer without
        self.weight = nn.Parameter(torch.empty(KERNEL, d_model).uniform_(-(KERNEL**-0.5), KERNEL**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, d_model) to the same."""
        padded = F.pad(x, (0, 0, KERNEL - 1, 0))
        mixed = sum(weight * padded[:, i : i + x.shape[1]] for i, weight in enumerate(self.weight))
        return self.projection(x) * mixed


class Heads(nn.Module):
    """Projections around an attention without parameters."""

    def __init__(self, d_model: int, num_heads: int, attention: Attention) -> None:
        super().__init__()
        self.num_heads, self.attention = num_heads, attention
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, d_model) to the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        return self.out(self.attention(q, k, v).flatten(2))


class MalaHeads(Heads):
    """MALA at tau = 1. In evaluation ``key_slots_per_query`` is what the last call retained, the mean over heads and sequences."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads, self.attend)
        self.key_slots_per_query: float | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal; (batch, seqlen, num_heads, head_dim)."""
        if self.training:
            return mala_attn_func(q, k, v, causal=True, discovery="fused")
        out, work = mala_attn_func(q, k, v, causal=True, discovery="fused", return_work=True)
        self.key_slots_per_query = work.key_slots_per_query.mean().item()
        return out


class MoBAHeads(Heads):
    """MoBA: by routing on a GPU, under a mask elsewhere."""

    def __init__(self, d_model: int, num_heads: int, block: int, topk: int) -> None:
        super().__init__(d_model, num_heads, self.attend)
        self.block, self.topk = block, topk

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal; (batch, seqlen, num_heads, head_dim)."""
        return moba_attention(q, k, v, block=self.block, topk=self.topk, masked=not q.is_cuda)


def nsa_shape(seqlen: int, ceiling: int) -> NSAShape:
    """The compressed and selected lengths of its paper, a window of a quarter of the ceiling, and as many selected blocks as fit.

    Raises ``ValueError`` where the ceiling has no room for the blocks that are always selected.
    """
    shape = NSAShape(window=ceiling // 4)
    return replace(shape, count=(ceiling - shape.window - shape.compressed_blocks(seqlen)) // shape.selected)


def attention_layer(method: str, d_model: int, seqlen: int, ceiling: int = CEILING) -> tuple[nn.Module, float]:
    """The attention of a method, causal, with at most ``ceiling`` key slots per query if it has a budget; and its slots per query.

    The slots are the mean over the queries of a sequence, clipped where fewer keys are visible. MALA's depend on what it sees: NaN.
    Raises ``ValueError`` for a name that is none, and for sizes that the method cannot have.
    """
    if d_model % min(HEAD_DIM, d_model):
        raise ValueError(f"heads of {HEAD_DIM} do not divide {d_model}")
    num_heads = max(1, d_model // HEAD_DIM)
    if method == "full":
        return Heads(d_model, num_heads, full_attention), causal_slots(seqlen) / seqlen
    if method == "mala":
        return MalaHeads(d_model, num_heads), math.nan
    if method == "moba":
        block = min(MOBA_BLOCK, ceiling // 8)
        return MoBAHeads(d_model, num_heads, block, ceiling // block), moba_slots(seqlen, block, ceiling // block)
    if method == "dsa":
        return DSA(d_model, num_heads, ceiling), dsa_slots(seqlen, ceiling)
    if method == "nsa":
        shape = nsa_shape(seqlen, ceiling)
        return NSA(d_model, num_heads, shape), nsa_slots(seqlen, shape)
    raise ValueError(f"methods are {', '.join(METHODS)}, got {method}")


class RecallModel(nn.Module):
    """Embedding, the two layers with their norms and residuals, norm, and the embedding again for the logits."""

    def __init__(self, vocab_size: int, d_model: int, attention: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.layers = nn.ModuleList([ShortConvolution(d_model), attention])
        self.norms = nn.ModuleList([nn.LayerNorm(d_model) for _ in range(3)])

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """tokens (batch, seqlen), places (batch, queries): logits (batch, queries, vocab_size) of what follows those places."""
        x = self.embedding(tokens)
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = x + layer(norm(x))
        x = self.norms[-1](x.gather(1, places[..., None].expand(-1, -1, x.shape[-1])))
        return x @ self.embedding.weight.T

    @property
    def attention(self) -> nn.Module:
        """The layer under study."""
        return self.layers[1]

    @property
    def auxiliary_loss(self) -> Tensor | float:
        """What the attention wants to be trained on beside the task."""
        found = getattr(self.attention, "loss", None)
        return 0.0 if found is None else found

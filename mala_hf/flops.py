# SPDX-License-Identifier: Apache-2.0
"""FLOPs of attention and of training a Llama-shaped model, score discovery counted in full.

Two FLOPs for each multiply-add of a matrix product, nothing else: what is elementwise (softmax, norms, rotary embedding,
dS = P * (dP - delta)) is left out, as usual. Attention's work is in key slots: pairs of a query row and a key in a tile, summed over
rows and query heads (and sequences, and layers). A slot costs

    score discovery       S = Q K^T          2 head_dim
    post-score, forward   O = P V            2 v_head_dim
    post-score, backward  dP = dO V^T        2 v_head_dim
                          dV = P^T dO        2 v_head_dim
                          dQ = dS K          2 head_dim
                          dK = dS^T Q        2 head_dim

and backward computes the scores of the tiles that it tests once more.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from .ops import Work

GATED_MLPS = ("llama", "mistral", "qwen2", "qwen3")  # model types that ``ModelShape`` describes


def score_flops(slots: float, head_dim: int) -> float:
    """FLOPs of Q K^T over so many key slots."""
    return 2.0 * slots * head_dim


def post_score_forward_flops(slots: float, v_head_dim: int) -> float:
    """FLOPs of P V over the retained slots."""
    return 2.0 * slots * v_head_dim


def post_score_backward_flops(slots: float, head_dim: int, v_head_dim: int) -> dict[str, float]:
    """FLOPs of each product of the backward after the scores, ``dp``, ``dv``, ``dq`` and ``dk``, over its retained slots."""
    return {
        "dp": 2.0 * slots * v_head_dim,
        "dv": 2.0 * slots * v_head_dim,
        "dq": 2.0 * slots * head_dim,
        "dk": 2.0 * slots * head_dim,
    }


@dataclass(frozen=True)
class AttentionFlops:
    """FLOPs of attention's forward and backward; backward's are 0 for inference. They add up: over layers, over steps."""

    discovery_forward: float = 0.0
    post_score_forward: float = 0.0
    discovery_backward: float = 0.0
    post_score_backward: float = 0.0

    def __add__(self, other: AttentionFlops) -> AttentionFlops:
        return AttentionFlops(*(x + y for x, y in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    @property
    def forward(self) -> float:
        """Discovery and post-score work of the forward."""
        return self.discovery_forward + self.post_score_forward

    @property
    def backward(self) -> float:
        """Scores computed again and post-score work of the backward."""
        return self.discovery_backward + self.post_score_backward

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def attention_flops(
    visible_slots: float,
    forward_slots: float,
    head_dim: int,
    v_head_dim: int | None = None,
    *,
    backward_slots: float | None = None,
    saves_support: bool = False,
) -> AttentionFlops:
    """FLOPs of attention that retains ``forward_slots`` of the visible slots, and ``backward_slots`` in backward (None: no backward).

    saves_support: backward scores only the tiles that forward retained; else all visible ones, as full attention's does.
    Full attention retains every visible slot in both.

    Raises:
        ValueError: unless backward <= forward <= visible slots, all >= 0.
    """
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    backward = 0.0 if backward_slots is None else backward_slots
    if not 0 <= backward <= forward_slots <= visible_slots:
        raise ValueError(
            f"slots must be 0 <= backward <= forward <= visible, got {backward_slots}, {forward_slots}, {visible_slots}"
        )
    scored = 0.0 if backward_slots is None else (forward_slots if saves_support else visible_slots)
    return AttentionFlops(
        score_flops(visible_slots, head_dim),
        post_score_forward_flops(forward_slots, v_head_dim),
        score_flops(scored, head_dim),
        sum(post_score_backward_flops(backward, head_dim, v_head_dim).values()),
    )


def retained_slots(work: Work) -> float:
    """Key slots of the retained tiles, over all sequences, heads and rows: BLOCK_N for each row of a tile."""
    return _total(work, work.key_slots_per_query)


def visible_slots(work: Work) -> float:
    """The same count with every visible tile retained: what score discovery computes."""
    return _total(work, work.visible_slots_per_query)


def _total(work: Work, slots_per_query: Any) -> float:
    rows = work.rows.sum(-1).double()[:, None]  # (num_sequences, 1)
    return (slots_per_query.double() * rows).sum().item()


def causal_slots(seqlen: int, tile: tuple[int, int] = (1, 1)) -> int:
    """Visible key slots of one head of a causal sequence on itself; with tiles of one pair, the legal pairs."""
    block_m, block_n = tile
    starts = range(0, seqlen, block_m)
    return sum(
        (min(start + block_m, seqlen) - start) * math.ceil(min(start + block_m, seqlen) / block_n) * block_n
        for start in starts
    )


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated MLP (three matrices); embeddings are looked up, not multiplied."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Read a Transformers config; ``ValueError`` for a model type that is not one of ``GATED_MLPS``."""
        config = config.get_text_config()
        if config.model_type not in GATED_MLPS:
            raise ValueError(f"FLOPs are counted for {', '.join(GATED_MLPS)}, got a {config.model_type!r} model")
        return cls(
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            config.vocab_size,
        )

    @property
    def linear_flops_per_token(self) -> float:
        """FLOPs of one token's forward through all weight matrices, the output head among them; backward takes twice as many."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return 2.0 * (self.num_layers * (attention + mlp) + self.hidden_size * self.vocab_size)

    def causal_slots(self, seqlen: int, tile: tuple[int, int] = (1, 1)) -> int:
        """Visible slots of one sequence, over all layers and query heads."""
        return self.num_layers * self.num_heads * causal_slots(seqlen, tile)

    def forward_flops(self, tokens: int, attention: AttentionFlops) -> float:
        """FLOPs of a forward over so many tokens, whose attention is that of all layers."""
        return tokens * self.linear_flops_per_token + attention.forward

    def training_flops(self, tokens: int, attention: AttentionFlops) -> float:
        """FLOPs of forward and backward over so many tokens; nothing is counted twice for gradient checkpointing."""
        return 3 * tokens * self.linear_flops_per_token + attention.total

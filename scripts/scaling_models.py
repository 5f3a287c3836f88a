# SPDX-License-Identifier: Apache-2.0
"""Models and attentions of the scaling study: Llama-shaped, a few million parameters, trained from nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from training_runs import RULE, settings_in
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

from mala_hf import MalaConfig, mala_attention
from mala_hf.flops import AttentionFlops, attention_flops, score_flops
from mala_hf.implementations import using_implementation
from mala_hf.masks import mala_mask
from mala_hf.studies.moba import moba_attention, moba_slots

MOBA = "study_moba"
MLP_MULTIPLE = 64


@dataclass(frozen=True)
class Size:
    """Heads of ``head_dim`` share ``num_kv_heads`` keys and values; the gated MLP is 8/3 as wide as the model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int

    @classmethod
    def parse(cls, name: str) -> Size:
        """Read a name of SIZES or HIDDENxLAYERSxHEADSxKV_HEADS; ``ValueError`` for anything else."""
        if name in SIZES:
            return SIZES[name]
        if not re.fullmatch(r"\d+x\d+x\d+x\d+", name):
            raise ValueError(f"a size is {', '.join(SIZES)} or HIDDENxLAYERSxHEADSxKV_HEADS, got {name!r}")
        size = cls(*map(int, name.split("x")))
        if size.hidden % (2 * size.heads) or size.heads % size.kv_heads:
            raise ValueError(f"{name}: hidden must be an even multiple of the heads, and they of the KV heads")
        return size

    def build(self, vocabulary: int, positions: int, seed: int) -> LlamaForCausalLM:
        """A model with seeded weights, float32, input and output embeddings shared."""
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=self.hidden,
                intermediate_size=-(-8 * self.hidden // (3 * MLP_MULTIPLE)) * MLP_MULTIPLE,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.kv_heads,
                max_position_embeddings=positions,
                rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=0,
                pad_token_id=0,
            )
        )


# about 5, 20 and 61 million parameters with 8,192 tokens in the vocabulary; heads of 64
SIZES = {"5m": Size(256, 4, 4, 2), "20m": Size(384, 11, 6, 2), "60m": Size(576, 16, 9, 3)}


@dataclass(frozen=True)
class Trained:
    """An attention to train with: "sdpa", "mala" with fields of MalaConfig, "moba" with ``block`` and ``topk``."""

    label: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, label: str) -> Trained:
        """Read NAME or NAME:KEY=VALUE,... with JSON values; ``ValueError`` for anything else."""
        name, settings = settings_in(label)
        if name == "mala":
            MalaConfig.from_dict(settings)
        elif name == "moba":
            settings = {"block": 128, "topk": 8} | settings
            if set(settings) != {"block", "topk"} or not all(type(x) is int and x > 0 for x in settings.values()):
                raise ValueError(f"moba has a block and a topk, numbers above 0, got {settings}")
        elif name != "sdpa" or settings:
            raise ValueError(
                f"an attention is sdpa, mala, moba or one of the latter two with :KEY=VALUE,..., got {label!r}"
            )
        return cls(label, name, settings)

    def of(self, model: Any) -> contextlib.AbstractContextManager:
        """Run ``model`` with this attention inside a ``with`` block."""
        if self.name == "mala":
            return mala_attention(model, **RULE | self.settings)
        return _moba(model, self.settings) if self.name == "moba" else using_implementation(model, self.name)

    def flops(self, model: Any, batch: int, seqlen: int, slots: tuple[float, float]) -> dict[str, AttentionFlops]:
        """FLOPs of attention of a training step, of all layers; slots: visible and retained ones, MALA's.

        ``state_only``: backward scores every visible tile again, as the paper's; ``saved_support``: only what forward retained.
        Backward is counted as if it retained what forward did; its own test leaves out a little more.
        """
        config = model.config
        visible, retained = slots
        if self.name == "moba":
            rows = batch * seqlen * config.num_attention_heads * config.num_hidden_layers
            seen = rows * moba_slots(seqlen, **self.settings)
            gates = score_flops(rows * (seqlen / self.settings["block"]) / 2, config.head_dim)
            plain = attention_flops(seen, seen, config.head_dim, backward_slots=seen)
            return {"state_only": plain + AttentionFlops(discovery_forward=gates)}
        if self.name == "sdpa":
            retained = visible
        both = {"state_only": False} | ({"saved_support": True} if self.name == "mala" else {})
        return {
            name: attention_flops(visible, retained, config.head_dim, backward_slots=retained, saves_support=saves)
            for name, saves in both.items()
        }


@contextlib.contextmanager
def _moba(model: Any, settings: dict[str, int]) -> Iterator[None]:
    if MOBA not in AttentionInterface():
        AttentionInterface.register(MOBA, _moba_forward)
        AttentionMaskInterface.register(MOBA, mala_mask)
    before = getattr(model.config, "moba", None)
    model.config.moba = settings
    try:
        with using_implementation(model, MOBA):
            yield
    finally:
        model.config.moba = before


def _moba_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **_: Any
) -> tuple[Tensor, None]:
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        raise ValueError("MoBA is here for whole causal sequences: no padding, no cache")
    q, k, v = (x.transpose(1, 2) for x in (query.to(value.dtype), key.to(value.dtype), value))
    return moba_attention(q, k, v, **module.config.moba), None

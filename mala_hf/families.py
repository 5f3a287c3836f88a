# SPDX-License-Identifier: Apache-2.0
"""The model families whose behaviour with MALA is tested, by the ``model_type`` of the config of their text layers.

Tested, on tiny random weights: tau = 0 equals the model's own attention, tau = 1 equals the executable definition of the rule,
padded batches, generation with a cache, and that unpatching restores the logits bit by bit. The page docs/models.md shows this table.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """``name``: as people know it. ``layers``: what kinds of attention layers it has, as tested. ``dense``: whether "sdpa" is one of
    the settings of its layers: torch's SDPA has neither softcap nor sinks, and tau = 0 is full attention with both.
    """

    name: str
    layers: str
    dense: bool = True


FULL, SLIDING, MIXED = "full", "sliding", "sliding and full"

FAMILIES: dict[str, Family] = {
    "bart": Family("BART", "encoder, decoder, cross-attention"),
    "bert": Family("BERT", "bidirectional"),
    "cohere2": Family("Cohere 2 (Command A, R7B)", f"{MIXED}, the full ones without positions"),
    "gemma2": Family("Gemma 2", f"{MIXED}, softcap", dense=False),
    "gemma3_text": Family("Gemma 3", f"{MIXED}; tokens of an image see one another"),
    "gpt_oss": Family("GPT-OSS", f"{MIXED}, sinks", dense=False),
    "granite": Family("Granite 3", FULL),
    "llama": Family("Llama 2 and 3, SmolLM2", FULL),
    "mistral": Family("Mistral, Ministral", SLIDING),
    "mixtral": Family("Mixtral", SLIDING),
    "modernbert": Family("ModernBERT", f"bidirectional, {MIXED}"),
    "olmo2": Family("OLMo 2", FULL),
    "olmo3": Family("OLMo 3", MIXED),
    "phi3": Family("Phi-3, Phi-4", FULL),
    "qwen2": Family("Qwen2, Qwen2.5", MIXED),
    "qwen2_5_vl_text": Family("Qwen2.5-VL", FULL),
    "qwen2_moe": Family("Qwen2-MoE", MIXED),
    "qwen2_vl_text": Family("Qwen2-VL", FULL),
    "qwen3": Family("Qwen3", FULL),
    "qwen3_moe": Family("Qwen3-MoE", FULL),
    "qwen3_vl_text": Family("Qwen3-VL", FULL),
    "smollm3": Family("SmolLM3", f"{MIXED}, some without positions"),
}

_warned: set[str] = set()


def warn_unless_tested(text_config: Any) -> None:
    """Warn, once per process and ``model_type``, of a family that the table lacks."""
    name = text_config.model_type
    if name in FAMILIES or name in _warned:
        return
    _warned.add(name)
    warnings.warn(
        f"MALA is not tested with models of the type {name!r}. Its layers ask Transformers' attention interface, so MALA runs in them, "
        "and what it does not cover is refused; that tau = 0 gives the logits of attn_implementation='eager' is for you to check. "
        "Tested types: mala_hf.families.FAMILIES",
        stacklevel=3,
    )

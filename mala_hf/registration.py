# SPDX-License-Identifier: Apache-2.0
"""The names that Transformers learns: "mala", "mala_reference" for the executable definition of the rule, and that of pages."""

from __future__ import annotations

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from .continuous_batching import PAGED_NAME, keep_mala, mala_paged_attention_forward
from .flash_attn_4 import kernel as flash_attn_4
from .hub import adapter_of
from .masks import mala_mask
from .ops import dense
from .ops.hf_heads import sharers
from .sequence_parallel import NAME, place_and_size

REFERENCE_NAME = "mala_reference"


def mala_attention_forward(module, query, key, value, attention_mask=None, **kwargs) -> tuple[Tensor, None]:
    """``ops.hf.mala_attention_forward``, of the Hub kernel that ``module.config.mala`` names if it names one."""
    return adapter_of(module).mala_attention_forward(module, query, key, value, attention_mask, **kwargs)


def mala_reference_attention_forward(module, query, key, value, attention_mask=None, **kwargs) -> tuple[Tensor, None]:
    """``ops.hf.mala_reference_attention_forward``, likewise."""
    return adapter_of(module).mala_reference_attention_forward(module, query, key, value, attention_mask, **kwargs)


def register() -> None:
    """Add the names to Transformers' attention and mask interfaces, keep "mala" in continuous batching, and offer FlashAttention-4.

    Doing it twice changes nothing.
    """
    for name, forward in ((NAME, mala_attention_forward), (REFERENCE_NAME, mala_reference_attention_forward)):
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, mala_mask)
    AttentionInterface.register(PAGED_NAME, mala_paged_attention_forward)
    keep_mala(REFERENCE_NAME)
    if place_and_size not in sharers:
        sharers.append(place_and_size)
    dense.offered = flash_attn_4

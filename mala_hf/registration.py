# SPDX-License-Identifier: Apache-2.0
"""The names that Transformers learns: "mala", and "mala_reference" for the executable definition of the rule."""

from __future__ import annotations

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from .hub import adapter_of
from .masks import mala_mask
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
    """Add both names to Transformers' attention and mask interfaces; doing it twice changes nothing."""
    for name, forward in ((NAME, mala_attention_forward), (REFERENCE_NAME, mala_reference_attention_forward)):
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, mala_mask)
    if place_and_size not in sharers:
        sharers.append(place_and_size)

# SPDX-License-Identifier: Apache-2.0
"""The names that Transformers learns: "mala", and "mala_reference" for the executable definition of the rule."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from .masks import mala_mask
from .ops.hf import mala_attention_forward, mala_reference_attention_forward

NAME, REFERENCE_NAME = "mala", "mala_reference"


def register() -> None:
    """Add both names to Transformers' attention and mask interfaces; doing it twice changes nothing."""
    for name, forward in ((NAME, mala_attention_forward), (REFERENCE_NAME, mala_reference_attention_forward)):
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, mala_mask)

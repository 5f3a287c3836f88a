# SPDX-License-Identifier: Apache-2.0
"""Longer contexts for a checkpoint through Transformers' own rotary settings: YaRN and the other kinds it has."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

BASE = "original_max_position_embeddings"


def read_rope_scaling(text: str | None) -> dict[str, Any] | None:
    """Parse ``{"rope_type": ..., ...}``; ``ValueError`` for what is no JSON object, or a kind that Transformers does not have."""
    if text is None:
        return None
    try:
        scaling = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"rope scaling is not JSON: {error}") from error
    known = sorted({"default", *ROPE_INIT_FUNCTIONS})
    if not isinstance(scaling, dict) or scaling.get("rope_type") not in known:
        raise ValueError(f"rope scaling must be a JSON object with a rope_type of {', '.join(known)}, got {text}")
    factor = scaling.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor < math.inf:
        raise ValueError(f"the factor of rope scaling must be a number >= 1, got {factor!r}")
    return scaling


def scale_rope(config: Any, scaling: dict[str, Any]) -> Any:
    """Set the rotary settings of a model's config, not yet built, and the positions that follow from ``factor``; return the config.

    What is missing is taken from the model: its base frequency and, for the trained context, its positions.
    Raises ``ValueError`` for models without rotary positions, or whose layers have rotary settings of several kinds,
    and for a kind of scaling that lacks a setting.
    """
    text_config = config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None)
    if not rope:
        raise ValueError(f"{type(config).__name__} has no rotary positions to scale")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"the layers of {type(config).__name__} have several rotary settings: {sorted(rope)}")
    trained = scaling.get(BASE) or rope.get(BASE) or text_config.max_position_embeddings
    kept = {name: value for name, value in rope.items() if name in ("rope_theta", "partial_rotary_factor")}
    text_config.rope_parameters = kept | {BASE: trained} | scaling
    text_config.max_position_embeddings = max(
        int(trained * scaling.get("factor", 1.0)), text_config.max_position_embeddings
    )
    frequencies = ROPE_INIT_FUNCTIONS.get(scaling["rope_type"])
    try:
        if frequencies is not None:
            frequencies(text_config, torch.device("cpu"))
    except (KeyError, TypeError) as error:
        raise ValueError(f"rope scaling of type {scaling['rope_type']} lacks a setting: {error}") from error
    return config

# SPDX-License-Identifier: Apache-2.0
"""A softmax temperature that falls with the length: row i's scores times ``max(1, log(i + 1) / log(base))``, whatever the attention.

Rotary embedding turns queries and keeps their length, so what multiplies the scores can multiply the projection's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def log_scale(positions: Tensor, base: float) -> Tensor:
    """The factor of each position (any shape, from 0), float32."""
    return ((positions + 1).float().log() / torch.tensor(base).log()).clamp(min=1.0)


@contextmanager
def log_scaled_queries(model: nn.Module, base: float) -> Iterator[None]:
    """Scale the queries of every attention layer of ``model`` with a ``q_proj`` inside a ``with`` block.

    Raises ``ValueError`` for a base that is not above 1, and for a model without such layers.
    """
    if not 1 < base < float("inf"):
        raise ValueError(f"the base of the length scaling must be a number above 1, got {base}")
    layers = [module for module in model.modules() if isinstance(getattr(module, "q_proj", None), nn.Linear)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layer with a q_proj")
    handles = []
    for layer in layers:
        positions: dict[str, Tensor | None] = {}

        def see(_: Any, args: Any, kwargs: Any, positions: dict = positions) -> None:
            positions["ids"] = kwargs.get("position_ids")

        def scale(_: Any, args: Any, out: Tensor, positions: dict = positions) -> Tensor:
            ids = positions["ids"]
            if ids is None:
                raise ValueError("this model's layers are not told the positions of their tokens")
            return out * log_scale(ids, base)[..., None].to(out)

        handles += [layer.register_forward_pre_hook(see, with_kwargs=True), layer.q_proj.register_forward_hook(scale)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

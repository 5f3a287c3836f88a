# SPDX-License-Identifier: Apache-2.0
"""A real model's attention, layer by layer on real text: looked at beside full attention, or computed by a rule in its place."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..full_attention import LayerCall
from ..patch import mala_attention
from ..perplexity import check_positions, window_logits
from ..windows import tokenize
from ..work_study import attention_calls
from .figures import Figures
from .rules import Rule, choose
from .scores import outcome, scores_by_tile

Observer = Callable[[int, LayerCall], None]


def text_windows(tokenizer: Any, text: str, length: int, count: int) -> list[Tensor]:
    """Return ``count`` windows (1, length) of the text, evenly spread over it and without common tokens.

    Raises ``ValueError`` for a text that is too short.
    """
    ids = tokenize(tokenizer, text)
    if len(ids) < length * count:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than {count} windows of {length}")
    step = len(ids) // count
    return [ids[None, start : start + length] for start in range(0, step * count, step)]


def observe(model: Any, ids: Tensor, observer: Observer, layers: Collection[int] | None = None) -> None:
    """Run ids (1, L) with full attention; ``observer(index, call)`` sees the inputs of each layer, or of some of them."""

    def answer(module: Any, call: LayerCall) -> Tensor:
        if layers is None or module.layer_idx in layers:
            observer(module.layer_idx, call)
        return full(call)

    with torch.no_grad(), mala_attention(model, tau=0.0), attention_calls(answer):
        model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=1)


def full(call: LayerCall) -> Tensor:
    """torch's attention on a call, (1, L, H, E)."""
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    # repeated by hand: in float32 torch shares heads only in the form that holds all probabilities
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.softmax_scale).transpose(1, 2)


def run_rule(model: Any, ids: Tensor, rule: Rule, tile: tuple[int, int]) -> tuple[Tensor, Figures]:
    """Run ids (1, L) with a rule in every layer; return logits (L, vocabulary) and what the rule did, layer by layer.

    Each layer sees the inputs that the rule's earlier layers gave it, and is compared with full attention on the same inputs.
    """
    check_positions(model, ids.shape[1])
    figures = Figures()

    def answer(module: Any, call: LayerCall) -> Tensor:
        parts = []
        for scores in scores_by_tile(call, tile):
            found = outcome(scores, choose(scores, rule, module.layer_idx))
            figures.add(module.layer_idx, found)
            parts.append(found.out.transpose(1, 2).flatten(0, 1))  # (rows, H, E)
        return torch.cat(parts)[None].to(call.v.dtype)

    with torch.inference_mode(), mala_attention(model, tau=0.0), attention_calls(answer):
        return window_logits(model, ids), figures

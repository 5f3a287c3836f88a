# SPDX-License-Identifier: Apache-2.0
"""Perplexity over fixed windows of one text, and how far two sets of logits agree on it.

A model is taken as it is: to compare attention implementations, call this twice with ``model.set_attn_implementation`` or
``mala_attention`` in between. Windows do not overlap; each scores all of its tokens but the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .patch import mala_attention

CHUNK = 512  # positions whose float32 log-probabilities exist at once: 100 MB at a vocabulary of 49,152


@dataclass(frozen=True)
class Perplexity:
    """Negative log-likelihood of each window in nats: ``window_nll`` (mean per scored token), ``window_tokens`` (scored)."""

    window_nll: tuple[float, ...]
    window_tokens: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Scored tokens of all windows."""
        return sum(self.window_tokens)

    @property
    def nll(self) -> float:
        """Mean over tokens, in nats: a window counts by its scored tokens."""
        total = sum(nll * tokens for nll, tokens in zip(self.window_nll, self.window_tokens, strict=True))
        return total / self.tokens

    @property
    def ppl(self) -> float:
        """Perplexity, ``exp(nll)``."""
        return math.exp(self.nll)


def fixed_windows(input_ids: Tensor, length: int, max_windows: int | None = None) -> list[Tensor]:
    """Cut ids (n,) or (1, n) into consecutive windows (1, length); the last may be shorter, but has at least two tokens.

    Raises ``ValueError`` when the shape is another, ``length`` is below 2, or nothing is left to score.
    """
    if input_ids.dim() == 2 and input_ids.shape[0] == 1:
        input_ids = input_ids[0]
    if input_ids.dim() != 1:
        raise ValueError(f"input_ids must have shape (n,) or (1, n), got {tuple(input_ids.shape)}")
    if length < 2:
        raise ValueError(f"a window needs at least 2 tokens, got length {length}")
    if max_windows is not None and max_windows < 1:
        raise ValueError(f"max_windows must be at least 1, got {max_windows}")
    windows = [window[None] for window in input_ids.split(length) if len(window) > 1]
    if not windows:
        raise ValueError(f"nothing to score: the text has {len(input_ids)} token(s)")
    return windows[:max_windows]


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats, float32 (n,), of targets (n,) under logits (n, vocabulary) of any dtype."""
    pieces = [
        torch.nn.functional.cross_entropy(some_logits.float(), some_targets, reduction="none")
        for some_logits, some_targets in zip(logits.split(CHUNK), targets.split(CHUNK), strict=True)
    ]
    return torch.cat(pieces)


def logit_agreement(reference: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Compare two logits (n, vocabulary): ``KL(reference || other)`` in nats, float32 (n,), and whether the top-1 agrees, bool (n,)."""
    divergences, agreements = [], []
    for some_reference, some_other in zip(reference.split(CHUNK), other.split(CHUNK), strict=True):
        log_p, log_q = some_reference.float().log_softmax(-1), some_other.float().log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0))  # rounding can leave -1e-7
        agreements.append(some_reference.argmax(-1) == some_other.argmax(-1))
    return torch.cat(divergences), torch.cat(agreements)


@torch.inference_mode()
def window_logits(model: Any, window: Tensor) -> Tensor:
    """Run one window (1, length) without a cache and return its logits (length, vocabulary)."""
    return model(input_ids=window.to(model.device), use_cache=False).logits[0]


def perplexity(
    model: Any,
    input_ids: Tensor,
    length: int,
    *,
    max_windows: int | None = None,
    progress: Callable[[Iterable[Tensor]], Iterable[Tensor]] = iter,
) -> Perplexity:
    """Score ids (n,) or (1, n) in windows of ``length`` tokens; ``progress`` may wrap the windows in a bar.

    Raises ``ValueError`` as ``fixed_windows`` does, and when a window is longer than the model's positions.
    """
    check_positions(model, length)
    windows = fixed_windows(input_ids, length, max_windows)
    nll, tokens = [], []
    for window in progress(windows):
        targets = window[0, 1:].to(model.device)
        nll.append(token_nll(window_logits(model, window)[:-1], targets).double().mean().item())
        tokens.append(len(targets))
    return Perplexity(tuple(nll), tuple(tokens))


def check_positions(model: Any, length: int) -> None:
    """Raise ``ValueError`` when ``length`` is more tokens than the model has positions for."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ValueError(f"length {length} is more than the model's {positions} positions")


@contextmanager
def using_implementation(model: Any, name: str, tau: float | None = None) -> Iterator[None]:
    """Run the model with one attention implementation ("mala" with tau, by default 1); what was before is always put back."""
    if name == "mala":
        with mala_attention(model, tau=1.0 if tau is None else tau):
            yield
        return
    original = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(original)


def compare_implementations(
    model: Any,
    input_ids: Tensor,
    lengths: Iterable[int],
    *,
    implementations: Iterable[str] = ("sdpa", "mala"),
    taus: Iterable[float] = (1.0,),
    max_windows: int | None = None,
    progress: Callable[[Iterable[Tensor]], Iterable[Tensor]] = iter,
) -> Iterator[dict[str, Any]]:
    """Yield one row per length and implementation, "mala" once per tau: length, implementation, tau, windows, tokens, nll, ppl.

    The model's own implementation and settings are back after each row, also after an error.
    """
    for length in lengths:
        for name in implementations:
            for tau in taus if name == "mala" else (None,):
                with using_implementation(model, name, tau):
                    score = perplexity(model, input_ids, length, max_windows=max_windows, progress=progress)
                yield {
                    "length": length,
                    "implementation": name,
                    "tau": tau,
                    "windows": len(score.window_nll),
                    "tokens": score.tokens,
                    "nll": score.nll,
                    "ppl": score.ppl,
                    "window_nll": list(score.window_nll),
                }

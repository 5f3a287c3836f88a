# SPDX-License-Identifier: Apache-2.0
"""What a look at an earlier call found: for calls that are too short to be looked at each time, or are recorded in a CUDA graph.

On the assumption that a layer which keeps nearly every tile of one prompt keeps nearly every tile of the next, every REPEATS-th call of
a layer and length is looked at and the others go its way. All ways satisfy the rule, but their bits differ, so where a gradient is
taken, and a recomputation has to go the same way again, nothing is remembered. A layer in training mode counts as one: a reentrant
checkpoint computes it without a gradient first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Optional

import torch
from torch import Tensor

from .query_tile import Settings
from .visibility import Sequences
from .work import Choice

REPEATS = 61  # a prime: layers whose calls cannot be told apart take turns at being looked at
MAX_ENTRIES = 4096

_layer: ContextVar[Optional[int]] = ContextVar("mala_layer", default=None)
_trains: ContextVar[bool] = ContextVar("mala_trains", default=False)


@contextmanager
def asked_by(layer: object) -> Iterator[None]:
    """Calls in here are those of ``layer``; elsewhere calls of one shape share what is remembered."""
    before, trained_before = _layer.set(id(layer)), _trains.set(bool(getattr(layer, "training", False)))
    try:
        yield
    finally:
        _layer.reset(before)
        _trains.reset(trained_before)


def memory_key(q: Tensor, k: Tensor, settings: Settings, sequences: Sequences, may_be: tuple[str, ...]) -> tuple:
    """What calls have in common that go the same way: all but their content, and lengths up to a power of two."""
    lengths = sequences.max_seqlen_q.bit_length(), sequences.max_seqlen_k.bit_length()
    return _layer.get(), q.shape[2:], k.shape[2], q.dtype, q.device, settings, lengths, may_be


class ChoiceMemory:
    """Choices by key, each for ``REPEATS`` calls with the one that was looked at."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple, tuple[list[Choice], int]] = OrderedDict()

    def recall(self, key: tuple, counts: bool = True) -> Optional[list[Choice]]:
        """What was stored; None where nothing was, or for too many calls. ``counts``: this is one of them."""
        choices, left = self._found.get(key, (None, 0))
        if choices is None or (counts and left == 0):
            return None
        if counts:
            self._found[key] = choices, left - 1
        return choices

    def store(self, key: tuple, choices: list[Choice]) -> None:
        """Remember what a look found."""
        self._found.pop(key, None)
        self._found[key] = choices, REPEATS - 1
        if len(self._found) > MAX_ENTRIES:
            self._found.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._found.clear()


memory = ChoiceMemory()


def remembers(*tensors: Tensor) -> bool:
    """Whether calls on these tensors may go the way of an earlier one: no gradient is taken, and no layer in training mode asks."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    return torch.compiler.is_compiling() or not _trains.get()

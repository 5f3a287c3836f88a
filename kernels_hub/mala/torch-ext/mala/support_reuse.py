# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing that searches once: the recomputed forward walks the tiles that the first one found.

    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=reuse_support)

Kept between the two are the supports, 1 bit per tile. The recomputed values are the same bits with or without them.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Optional

import torch
from torch import Tensor


def reuse_support() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The ``context_fn`` of a non-reentrant ``torch.utils.checkpoint``: (context of the first forward, of its recomputation).

    Raises:
        ValueError: in a compiled graph, where the compiler recomputes and runs no contexts.
    """
    if torch.compiler.is_compiling():
        raise ValueError("reuse_support has no meaning in a compiled graph: checkpoint there without context_fn")
    supports: list[Tensor] = []
    return _Recording(supports), _Replaying(supports)


class _Active(threading.local):
    """The context of this thread's forward; a GPU's recomputation runs in a thread of autograd's."""

    context: Optional[_Context] = None


_active = _Active()


class _Context:
    """One of the two contexts; may be entered more than once, as a graph that is kept is recomputed for each backward."""

    def __init__(self, supports: list[Tensor]):
        self.supports = supports
        self.outer: Optional[_Context] = None

    def __enter__(self) -> None:
        self.outer, _active.context = _active.context, self

    def __exit__(self, error_type, *unused) -> None:
        _active.context, self.outer = self.outer, None


class _Recording(_Context):
    """Keeps the support of each call."""


class _Replaying(_Context):
    """Hands the supports out in the order in which they came."""

    def __enter__(self) -> None:
        super().__enter__()
        self.next = 0

    def __exit__(self, error_type, *unused) -> None:
        super().__exit__(error_type)
        if error_type is None and self.next != len(
            self.supports
        ):  # checkpoint leaves by an error as soon as it has enough
            raise ValueError(
                f"the recomputation made {self.next} calls of MALA, the forward made {len(self.supports)}: reuse_support needs "
                "a forward that does the same both times"
            )


def records_support() -> bool:
    """Whether this forward has to find its support for a later one."""
    return not torch.compiler.is_compiling() and isinstance(_active.context, _Recording)


def is_reusing_support() -> bool:
    """Whether this forward is one of the two."""
    return not torch.compiler.is_compiling() and _active.context is not None


def record_support(support: Tensor) -> None:
    """Keep what this call found."""
    assert _active.context is not None
    _active.context.supports.append(support)


def replayed_support(shape: tuple[int, ...], device: torch.device) -> Optional[Tensor]:
    """What the first forward found in this call; None outside a recomputation.

    Raises:
        ValueError: if the first forward made another call here, or none.
    """
    if torch.compiler.is_compiling() or not isinstance(_active.context, _Replaying):
        return None
    replaying = _active.context
    if replaying.next == len(replaying.supports):
        raise ValueError(
            f"the recomputation makes more calls of MALA than the forward, which made {len(replaying.supports)}: "
            "reuse_support needs a forward that does the same both times"
        )
    support = replaying.supports[replaying.next]
    if support.shape != shape or support.device != device:
        raise ValueError(
            f"the recomputation's call {replaying.next} of MALA needs a support {shape} on {device}, the forward's was "
            f"{tuple(support.shape)} on {support.device}: reuse_support needs a forward that does the same both times"
        )
    replaying.next += 1
    return support

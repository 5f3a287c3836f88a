# SPDX-License-Identifier: Apache-2.0
"""Layers of a cache that come and go between CPU and GPU: a GPU that is late, and streams that know what was done before what."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

LATE = 10_000_000  # cycles, about 5 ms: longer than the host takes for a layer


@contextmanager
def late(model) -> Iterator[None]:
    """The GPU does nothing for a while before each attention, so that whatever does not wait for it comes too early."""
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda *_: torch.cuda._sleep(LATE)) for layer in model.model.layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Machine:
    """The host, a GPU's streams, and what went wrong. ``current`` is the stream that new work goes to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, own_stream: bool):
        self.host, self.faults = set(), []
        self.default = Stream(self)
        self.current = Stream(self) if own_stream else self.default
        for module in (torch, torch.cuda):
            monkeypatch.setattr(module, "Stream", lambda *_, **__: Stream(self))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: self.default)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.current)

    def work(self, what: str, *earlier: set[object]) -> None:
        """Work on the current stream, which must know all ``earlier`` work, and is then part of it."""
        self.current.known |= self.host
        self.expect(what, self.current.known, *earlier)
        done = object()
        for known in (self.current.known, *earlier):
            known.add(done)

    def expect(self, what: str, known: set[object], *earlier: set[object]) -> None:
        """A fault unless all ``earlier`` work is known."""
        if not known.issuperset(set().union(*earlier)):
            self.faults.append(what)


class Stream:
    """``known``: the work that is over when this stream's next piece begins."""

    device = torch.device("cpu")

    def __init__(self, machine: Machine):
        self.machine, self.known = machine, set()

    def wait_stream(self, other: Stream) -> None:
        self.known |= self.machine.host | other.known

    def synchronize(self) -> None:
        self.machine.host |= self.known

    def __enter__(self) -> None:
        self.before, self.machine.current = self.machine.current, self

    def __exit__(self, *_) -> None:
        self.machine.current = self.before


class Layer:
    """One of a cache, which comes and goes as any does, and reports each access to its content and each return of its memory."""

    is_sliding = False

    def __init__(self, machine: Machine, index: int):
        self.machine, self.index = machine, index
        self.content: set[object] = set()  # all work on it, wherever it lay
        self.keys = self.values = None  # on the GPU
        self.users: set[object] = set()  # work on this memory

    def _take_memory(self) -> None:
        self.keys, self.users = torch.empty(1), set()
        owner, users, what = self.machine.current, self.users, f"memory of layer {self.index} is given back in use"
        weakref.finalize(self.keys, lambda: self.machine.expect(what, owner.known, users))

    def prefetch(self) -> None:
        if self.content and self.keys is None:
            self._take_memory()
            self.machine.work(f"prefetch of layer {self.index}", self.content, self.users)

    def update(self, key_states, value_states, *args, **kwargs):
        if self.keys is None:
            assert not self.content, "it lies on the CPU"
            self._take_memory()
        self.machine.work(f"update of layer {self.index}", self.content, self.users)
        return self.keys, self.users

    def attend(self, users: set[object]) -> None:
        """Read what the update returned."""
        self.machine.work(f"attention of layer {self.index}", users)

    def offload(self) -> None:
        self.machine.work(f"offload of layer {self.index}", self.content, self.users)
        self.keys = None

    def read(self, *args) -> None:
        """By the host or the current stream, whichever has it."""
        self.machine.expect(f"the host reads layer {self.index}", self.machine.host, self.content)
        self.machine.work(f"reading layer {self.index}", self.content)

    reset = reorder_cache = batch_repeat_interleave = batch_select_indices = read

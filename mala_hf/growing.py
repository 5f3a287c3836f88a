# SPDX-License-Identifier: Apache-2.0
"""Tensors that grow by a few tokens at a time without being copied each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROWTH = 1.25  # of the tokens that are needed: a token is copied at most five times, and at most a fifth of the room is not used
GRANULE = 128  # tokens


@dataclass
class GrowingTensors:
    """Buffers (batch, heads, room, ...) of equal room, of which the first ``length`` tokens count."""

    buffers: list[Tensor]
    length: int = 0

    @classmethod
    def like(cls, tensors: Sequence[Tensor]) -> GrowingTensors:
        """Without room, for tokens like those of ``tensors`` (batch, heads, tokens, ...)."""
        return cls([x.new_empty(*x.shape[:2], 0, *x.shape[3:]) for x in tensors])

    @property
    def room(self) -> int:
        """Tokens that fit."""
        return self.buffers[0].shape[2]

    def views(self) -> list[Tensor]:
        """The tokens that count, as views of the buffers."""
        return [x[:, :, : self.length] for x in self.buffers]

    def make_room(self, new: int) -> None:
        """For ``new`` more tokens: larger buffers where these are full, one after another."""
        needed = self.length + new
        frozen = self.buffers[0].is_inference() and not torch.is_inference_mode_enabled()
        if needed <= self.room and not frozen:
            return
        room = -(-int(needed * GROWTH) // GRANULE) * GRANULE
        for place, old in enumerate(self.buffers):
            self.buffers[place] = self._moved(old[:, :, : self.length], old.shape[0], room)

    def select(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``, in that order, each as often as it is named. Bool (batch,) or int."""
        for place, old in enumerate(self.buffers):
            chosen = indices.to(old.device)
            chosen = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen
            new = old.new_empty(len(chosen), *old.shape[1:])
            torch.index_select(old[:, :, : self.length], 0, chosen, out=new[:, :, : self.length])
            self.buffers[place] = new

    def to(self, device: torch.device | str) -> None:
        """Move to a device, reserve and all, in the order of the current stream and without waiting for it.

        What comes from a GPU is memory of that GPU's current stream, and complete on the CPU once that stream has been waited for.
        """
        self.buffers = [x.to(device, non_blocking=True) for x in self.buffers]

    @staticmethod
    def _moved(x: Tensor, batch: int, room: int) -> Tensor:
        new = x.new_empty(batch, x.shape[1], room, *x.shape[3:])
        new[:, :, : x.shape[2]] = x
        return new

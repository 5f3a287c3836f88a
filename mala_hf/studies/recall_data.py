# SPDX-License-Identifier: Apache-2.0
"""Multi-query associative recall, drawn anew for every batch (Arora et al., 2023, Zoology, arXiv 2312.04927).

A sequence begins with its key-value pairs, key then value, all keys different and all values different. Then every key comes once more,
at an even distance whose probability falls as a power of it, and what follows there must be its value. All other tokens are random, so
that a longer sequence holds more false occurrences of a key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SHORTER = ((64, 4), (128, 8), (256, 16), (256, 32), (256, 64))  # lengths and pairs of Zoology's training


@dataclass(frozen=True)
class RecallTask:
    """Lengths in tokens. Keys are of the lower half of the vocabulary without 0, values of the upper half."""

    seqlen: int
    pairs: int = 256
    vocab_size: int = 8192
    power: float = 0.01

    def __post_init__(self) -> None:
        if self.seqlen % 2 or self.seqlen < 4 * self.pairs or self.pairs < 1:
            raise ValueError(f"a length must be even and hold its {self.pairs} pairs twice, got {self.seqlen}")
        if self.vocab_size % 2 or self.pairs >= self.vocab_size // 2:
            raise ValueError(f"the vocabulary must be even and hold {self.pairs} keys, got {self.vocab_size}")

    def shorter(self) -> list[RecallTask]:
        """The mix of shorter and easier tasks that Zoology trains on, as far as they are no longer and have no more pairs."""
        return [
            replace(self, seqlen=seqlen, pairs=pairs)
            for seqlen, pairs in SHORTER
            if seqlen <= self.seqlen and pairs <= self.pairs
        ]


def recall_batch(task: RecallTask, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """tokens (batch, seqlen), and for each of ``pairs`` queries its place and the value that must follow, (batch, pairs); int64."""
    device, half = generator.device, task.vocab_size // 2

    def drawn(count: int, weights: Tensor) -> Tensor:
        """``count`` different numbers of each row in the order of drawing, by weight: the largest of perturbed logarithms."""
        uniform = torch.rand(batch, len(weights), generator=generator, device=device).clamp(min=1e-30)
        return (weights.log() - (-uniform.log()).log()).topk(count).indices

    keys = 1 + drawn(task.pairs, torch.ones(half - 1, device=device))
    values = half + drawn(task.pairs, torch.ones(half, device=device))
    distances = torch.arange(1, (task.seqlen - 2 * task.pairs) // 2 + 1, device=device)
    places = 2 * task.pairs + 2 * drawn(task.pairs, distances ** (task.power - 1.0))
    tokens = torch.randint(task.vocab_size, (batch, task.seqlen), generator=generator, device=device)
    tokens[:, 0 : 2 * task.pairs : 2], tokens[:, 1 : 2 * task.pairs : 2] = keys, values
    return tokens.scatter_(1, places, keys), places, values

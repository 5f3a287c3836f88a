# SPDX-License-Identifier: Apache-2.0
"""What the runs of the scaling study share: stages of short and longer context, rates, and what is measured when."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BASE_HIDDEN = 256  # the width whose rate is the plan's
FINAL_RATE = 0.1  # of the peak


@dataclass(frozen=True)
class Stage:
    """``steps`` of ``batch`` sequences of ``seqlen`` tokens."""

    seqlen: int
    batch: int
    steps: int

    @classmethod
    def parse(cls, text: str) -> Stage:
        """Read SEQLENxBATCHxSTEPS; ``ValueError`` for anything else."""
        parts = text.split("x")
        if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ValueError(f"a stage is SEQLENxBATCHxSTEPS, got {text!r}")
        return cls(*map(int, parts))

    def windows_at(self, windows: Tensor, step: int, seed: int) -> Tensor:
        """The step's windows (batch, seqlen): passes over all of them, each in a random order of its own."""
        places = torch.arange(step * self.batch, (step + 1) * self.batch)
        orders = {
            number: torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed + number))
            for number in (places // len(windows)).unique().tolist()
        }
        return windows[torch.stack([orders[place // len(windows)][place % len(windows)] for place in places.tolist()])]


@dataclass(frozen=True)
class Plan:
    """What all runs share. ``every``: steps between measurements of the work; ``lengths``: of the final evaluation."""

    stages: tuple[Stage, ...]
    lengths: tuple[int, ...]
    every: int = 25
    held_out_tokens: int = 65536
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup: float = 0.05  # of all steps
    dtype: str = "float32"
    seed: int = 0

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def positions(self) -> int:
        """The longest sequence."""
        return max(*self.lengths, *(stage.seqlen for stage in self.stages))

    def place(self, step: int) -> tuple[int, int]:
        """Number of the stage, and the step in it."""
        for number, stage in enumerate(self.stages):
            if step < stage.steps:
                return number, step
            step -= stage.steps
        return len(self.stages), step

    def rate(self, step: int, hidden: int) -> float:
        """The learning rate of a step: smaller for wider models."""
        peak, warmup = self.learning_rate * BASE_HIDDEN / hidden, max(1, round(self.warmup * self.steps))
        if step < warmup:
            return peak * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return peak * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2)

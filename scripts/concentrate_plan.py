# SPDX-License-Identifier: Apache-2.0
"""What an arm of the concentration study is, and the plan that all arms share."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from log_scaled_queries import log_scaled_queries
from training_runs import RULE, settings_in

START = "start"


@dataclass(frozen=True)
class Arm:
    """One way to train: ``weight`` of the term, its ``temperature``, ``base`` of length-scaled scores; None for neither.

    The label "start" does not train.
    """

    label: str
    weight: float | None = None
    temperature: float = 2.0
    base: float | None = None

    @classmethod
    def parse(cls, label: str) -> Arm:
        """Read start, mala or mala:KEY=NUMBER,...; ``ValueError`` for anything else."""
        try:
            name, settings = settings_in(label)
            arm = cls(label, **{key: float(value) for key, value in settings.items()})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{label!r} has other settings than weight, temperature and base: {error}") from error
        if name not in ("mala", START) or (name == START and arm != cls(label, base=arm.base)):
            raise ValueError(f"an arm is start, mala or mala:KEY=NUMBER,..., got {label!r}")
        return arm

    @property
    def folder(self) -> str:
        """Its label as a file's name."""
        return re.sub(r"[^\w.]+", "-", self.label)

    @contextmanager
    def scaling(self, model: Any) -> Any:
        """Scores as the arm has them, in training and after."""
        with ExitStack() as stack:
            if self.base is not None:
                stack.enter_context(log_scaled_queries(model, self.base))
            yield


@dataclass(frozen=True)
class Plan:
    """What all arms share. ``work_lengths``: of the sequences whose work is measured; ``windows``: held-out ones of each text."""

    steps: int
    batch: int
    seqlen: int
    every: int
    work_lengths: tuple[int, ...]
    windows: int = 8
    learning_rate: float = 1e-4
    warmup_steps: int = 10
    dtype: str = "float32"
    seed: int = 0
    tile: tuple[int, int] | None = None  # None: the kernels' own
    ruler_tasks: tuple[str, ...] = ()
    ruler_length: int = 4096
    ruler_samples: int = 10

    def __post_init__(self) -> None:
        if min(self.batch, self.every, self.windows, self.ruler_samples) < 1 or self.steps < 0 or self.seqlen < 2:
            raise ValueError(f"sizes must be at least 1, got {self}")

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of MalaConfig."""
        return RULE | ({} if self.tile is None else {"tile": list(self.tile)})

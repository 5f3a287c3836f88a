# SPDX-License-Identifier: Apache-2.0
"""One run of the associative recall: a method, a length, a width, a seed."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .recall_data import RecallTask, recall_batch
from .recall_model import CEILING, RecallModel, attention_layer

PACE_STEPS = (10, 30)  # between which a run's pace is taken
LOOK_STEPS = 10  # between looks at the clock
CURVE_POINTS = 20


@dataclass(frozen=True)
class Recipe:
    """What all runs of a sweep have in common.

    Training begins with ``short_steps`` on the shorter tasks of ``RecallTask.shorter`` in turn, ``short_tokens`` tokens each: there it
    learns to search for keys, which takes many times longer on long sequences alone. ``steps`` on ``batch`` sequences of the task come
    then. The learning rate is that of a width of 64 and falls with the root of the width.
    """

    short_steps: int = 300
    short_tokens: int = 16384
    steps: int = 200
    batch: int = 8
    rate: float = 1e-2
    warmup: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0
    pairs: int = 256
    vocab_size: int = 8192
    ceiling: int = CEILING
    test_sequences: int = 64

    def rate_at(self, step: int, d_model: int) -> float:
        """Linear warm-up, constant on the shorter tasks, then a cosine to a tenth."""
        share = max(0.0, (step - self.short_steps) / self.steps)
        return (
            (64 / d_model) ** 0.5
            * self.rate
            * min(1.0, (step + 1) / self.warmup)
            * (0.55 + 0.45 * math.cos(math.pi * share))
        )


@dataclass(frozen=True)
class Cell:
    """A run of the sweep."""

    method: str
    seqlen: int
    d_model: int
    seed: int


class OutOfTime(Exception):
    """A run that would end after its deadline."""


def train_cell(cell: Cell, recipe: Recipe, device: torch.device, deadline: float | None = None) -> dict[str, Any]:
    """Train, test on sequences that training never saw, and return the row: accuracy, slots, parameters, curve, seconds.

    deadline: of ``time.time()``. Raises :class:`OutOfTime` when it passes, or the pace of the first steps says that it will be missed.
    """
    torch.manual_seed(cell.seed)
    task = RecallTask(cell.seqlen, recipe.pairs, recipe.vocab_size)
    attention, slots = attention_layer(cell.method, cell.d_model, cell.seqlen, recipe.ceiling)
    model = RecallModel(recipe.vocab_size, cell.d_model, attention).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, weight_decay=recipe.weight_decay, betas=(0.9, 0.98), fused=device.type == "cuda"
    )
    generator = torch.Generator(device).manual_seed(cell.seed)
    shorter = task.shorter() if recipe.short_steps else []
    clock = Clock(deadline)
    hits = []
    for step in range(recipe.short_steps + recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step, cell.d_model)
        if step < recipe.short_steps:
            one = shorter[step % len(shorter)]
            hit = training_step(
                model, optimizer, one, max(1, recipe.short_tokens // one.seqlen), recipe.clip, generator
            )
            clock.look(step, hit)
        else:
            hits.append(training_step(model, optimizer, task, recipe.batch, recipe.clip, generator))
            clock.check(len(hits), recipe.steps, hits[-1])
            clock.look(step, hits[-1])
    stride = max(1, recipe.steps // CURVE_POINTS)
    curve = torch.stack(hits).unfold(0, stride, stride).mean(1)
    accuracy = measured_accuracy(model, task, recipe, device)
    return {
        **asdict(cell),
        "accuracy": accuracy,
        "key_slots_per_query": getattr(attention, "key_slots_per_query", slots),
        "attention_parameters": sum(x.numel() for x in attention.parameters()),
        "training_accuracy": [round(x, 4) for x in curve.tolist()],
        "seconds": time.time() - clock.start,
    }


class Clock:
    """Gives a run up as soon as its pace says that it would miss its deadline (of ``time.time()``; None: there is none)."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline, self.start, self.first = deadline, time.time(), 0.0

    def look(self, step: int, result: torch.Tensor) -> None:
        """At every ``LOOK_STEPS``-th step, whose result is given. Raises :class:`OutOfTime` when the deadline has passed."""
        if self.deadline is None or step % LOOK_STEPS:
            return
        result.item()  # waits for the device
        if time.time() > self.deadline:
            raise OutOfTime(f"the deadline passed at step {step}")

    def check(self, done: int, steps: int, result: torch.Tensor) -> None:
        """After ``done`` of so many steps, of which the last one's result is given. Raises :class:`OutOfTime`."""
        if self.deadline is None or done not in PACE_STEPS:
            return
        result.item()  # waits for the device
        now = time.time()
        left = (steps - done) * (now - self.first) / (PACE_STEPS[1] - PACE_STEPS[0])
        if done == PACE_STEPS[1] and now + left > self.deadline:
            raise OutOfTime(f"{left:.0f} seconds more would end after the deadline")
        self.first = now


def training_step(
    model: RecallModel,
    optimizer: torch.optim.Optimizer,
    task: RecallTask,
    batch: int,
    clip: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """One step on fresh sequences; the share of its queries that were answered, on the device."""
    tokens, places, values = recall_batch(task, batch, generator)
    with torch.autocast(generator.device.type, torch.bfloat16, enabled=generator.device.type == "cuda"):
        logits = model(tokens, places)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), values.flatten()) + model.auxiliary_loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return (logits.argmax(-1) == values).float().mean().detach()


@torch.no_grad()
def measured_accuracy(model: RecallModel, task: RecallTask, recipe: Recipe, device: torch.device) -> float:
    """Share of the queries answered in ``test_sequences`` sequences, the same ones for every run of a length."""
    model.eval()
    generator, right, batches = torch.Generator(device).manual_seed(2**31), 0.0, 0
    for _ in range(0, recipe.test_sequences, recipe.batch):
        tokens, places, values = recall_batch(task, recipe.batch, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            right += (model(tokens, places).argmax(-1) == values).float().mean().item()
        batches += 1
    return right / batches

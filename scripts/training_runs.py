# SPDX-License-Identifier: Apache-2.0
"""One fine-tuning run with one attention, and what is measured of it.

The loop is Transformers' Trainer on one device. Weights are float32; bfloat16, where asked for, is
autocast's. AdamW, gradients clipped to norm 1, a constant rate after the warm-up.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from mala_hf import MalaConfig, mala_attention, record_work
from mala_hf.perplexity import perplexity, using_implementation

PROGRESS_LINES = 15  # per attention
RULE = {"discovery": "fused"}  # what is compared is the rule, not the dense kernels that may stand in for it
FIRST_STEPS = 3  # left out of the step time: kernels are compiled, memory is touched


def settings_in(label: str) -> tuple[str, dict[str, Any]]:
    """The name and the settings of NAME or NAME:KEY=VALUE,... with JSON values; ``ValueError`` for anything else."""
    name, _, listed = label.partition(":")
    try:
        return name, json.loads("{" + re.sub(r"(\w+)=", r'"\1":', listed) + "}")
    except ValueError as error:
        raise ValueError(f"{label!r}: {listed!r} is not KEY=VALUE,... with JSON values: {error}") from error


@dataclass(frozen=True)
class Attention:
    """One attention to train with; ``settings`` are fields of MalaConfig, and only "mala" has any."""

    label: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, label: str) -> Attention:
        """Read NAME or mala:KEY=VALUE,... with JSON values; ``ValueError`` for anything else."""
        name, settings = settings_in(label)
        if name not in ("sdpa", "eager", "mala") or (settings and name != "mala"):
            raise ValueError(f"an attention is sdpa, eager, mala or mala:KEY=VALUE,..., got {label!r}")
        MalaConfig.from_dict(settings)
        return cls(label, name, settings)

    def of(self, model: Any) -> contextlib.AbstractContextManager:
        """Run ``model`` with this attention inside a ``with`` block."""
        return (
            mala_attention(model, **RULE | self.settings)
            if self.name == "mala"
            else using_implementation(model, self.name)
        )


@dataclass(frozen=True)
class Settings:
    """What all runs share; ``dtype`` is that of autocast, the weights stay in float32."""

    steps: int
    batch: int
    seqlen: int
    learning_rate: float = 5e-5
    warmup_steps: int = 10
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.batch) < 1 or self.seqlen < 2 or self.warmup_steps < 0:
            raise ValueError(
                f"steps and batch must be at least 1, seqlen at least 2, warm-up steps at least 0, got {self}"
            )
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be a finite number above 0, got {self.learning_rate}")


class Windows(torch.utils.data.IterableDataset):
    """Windows (n, seqlen) of token ids in passes of a seeded random order, endless: the same for every run."""

    def __init__(self, windows: Tensor, seed: int) -> None:
        self.windows, self.seed = windows, seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            for index in torch.randperm(len(self.windows), generator=generator).tolist():
                yield {"input_ids": self.windows[index], "labels": self.windows[index]}


class Curves(TrainerCallback):
    """Keeps loss and gradient norm of every step and when it ended; prints some of them."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.loss: list[float] = []
        self.grad_norm: list[float] = []
        self.ended: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Trainer has read the loss from the device before it logs, so the step is over."""
        if "loss" not in logs:
            return
        self.ended.append(time.perf_counter())
        self.loss.append(logs["loss"])
        self.grad_norm.append(logs["grad_norm"])
        if not math.isfinite(logs["loss"]):
            raise ValueError(f"{self.label}: the loss is {logs['loss']} at step {state.global_step}")
        if state.global_step % -(-args.max_steps // PROGRESS_LINES) == 0:
            print(
                f"{self.label:<16} step {state.global_step:>5} of {args.max_steps}  loss {logs['loss']:.4f}  "
                f"gradient norm {logs['grad_norm']:.3f}  {self.step_seconds:.3f} s a step",
                flush=True,
            )

    @property
    def step_seconds(self) -> float:
        """Median time of a step, from the end of the one before; the first steps count only where there are no others."""
        ended = self.ended[min(FIRST_STEPS, max(len(self.ended) - 2, 0)) :]
        times = [after - before for before, after in itertools.pairwise(ended)]
        return statistics.median(times) if times else math.nan


def text_windows(tokenizer: Any, text: str, seqlen: int, held_out: int) -> tuple[Tensor, Tensor]:
    """Whole windows of the text: all but the last ``held_out`` to train on, those to evaluate on, both (n, seqlen)."""
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids[0]
    windows = ids[: len(ids) // seqlen * seqlen].view(-1, seqlen)
    if held_out < 1 or len(windows) <= held_out:
        raise ValueError(f"{len(windows)} windows of {seqlen} tokens cannot be split into some and {held_out} held out")
    return windows[:-held_out], windows[-held_out:]


def training_arguments(settings: Any, folder: str, on_gpu: bool, **more: Any) -> TrainingArguments:
    """Trainer's arguments; ``settings`` has steps, batch, learning_rate, warmup_steps, seed and dtype, as :class:`Settings`."""
    return TrainingArguments(
        output_dir=folder,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings.warmup_steps,
        seed=settings.seed,
        bf16=settings.dtype == "bfloat16",
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
        **more,
    )


def fine_tune(model: Any, windows: Tensor, attention: Attention, settings: Settings) -> dict[str, Any]:
    """Train ``model`` in place with the attention; return loss and gradient norm of every step, time and memory.

    ``peak_bytes`` is the most memory that torch held on the GPU, weights and optimizer included; None on a CPU.
    """
    curves = Curves(attention.label)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        gc.collect()  # the optimizer of the run before lives in reference cycles
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, attention.of(model):
        arguments = training_arguments(settings, folder, on_gpu)
        trainer = Trainer(model, arguments, train_dataset=Windows(windows, settings.seed), callbacks=[curves])
        trainer.remove_callback(PrinterCallback)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    return {
        "attention": attention.label,
        "loss": curves.loss,
        "grad_norm": curves.grad_norm,
        "seconds": seconds,
        "steps_per_second": None if math.isnan(curves.step_seconds) else 1 / curves.step_seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def held_out_loss(model: Any, windows: Tensor) -> dict[str, float]:
    """Nats per token of windows (n, seqlen) in float32, with full attention and with "mala" at tau = 1."""
    model.eval()
    losses = {}
    for name in ("sdpa", "mala"):
        with using_implementation(model, name):
            losses[name] = perplexity(model, windows.flatten(), windows.shape[1]).nll
    return losses


@torch.inference_mode()
def work_of(model: Any, windows: Tensor, attention: Attention, dtype: str) -> dict[str, Any]:
    """Share of post-score work of one forward in the precision of the training; at tau = 1 for an exact attention."""
    settings = attention.settings if attention.name == "mala" else {}
    autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == "bfloat16")
    with mala_attention(model, **RULE | settings), record_work(model) as report, autocast:
        model.eval()(windows.to(model.device), use_cache=False)
    counted = [layer for layer in report.layers.values() if not layer.is_dense]
    return {
        "tau": settings.get("tau", 1.0),
        "tiles": sorted(list(tile) for tile in set().union(*(layer.tiles for layer in counted))),
        "work_fraction": report.work_fraction,
        "lowest_head": min((layer.work_fraction.min().item() for layer in counted), default=1.0),
        "by_layer": [1.0 if layer.is_dense else layer.work_fraction.mean().item() for layer in report.layers.values()],
    }


def compare(
    model: Any, train: Tensor, held_out: Tensor, attentions: list[Attention], settings: Settings
) -> Iterator[dict[str, Any]]:
    """Yield one run per attention, each from the weights that ``model`` had at the start."""
    initial = {name: weight.detach().to("cpu", copy=True) for name, weight in model.state_dict().items()}
    loss_before = held_out_loss(model, held_out)
    for attention in attentions:
        model.load_state_dict(initial)
        some = held_out[: settings.batch]
        work_before = work_of(model, some, attention, settings.dtype)
        run = fine_tune(model, train, attention, settings)
        yield {
            **run,
            "held_out_before": loss_before,
            "held_out_after": held_out_loss(model, held_out),
            "work_before": work_before,
            "work_after": work_of(model, some, attention, settings.dtype),
        }

# SPDX-License-Identifier: Apache-2.0
"""One run of the scaling study: a model of one size trained with one attention, short context first, then longer; FLOPs as it goes.

AdamW, one cosine over all stages after a linear warm-up, gradients clipped to norm 1, weights in float32 and bfloat16 by autocast where
asked for. Which windows a step sees follows from its number alone, so a run that stops goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from scaling_models import Size, Trained
from scaling_plan import Plan, Stage
from stored_results import write_whole
from study_data import TRAIN, windows_of
from torch import Tensor

from mala_hf import record_work
from mala_hf.flops import AttentionFlops, ModelShape
from mala_hf.perplexity import perplexity

STATE, RESULT = "state.pt", "result.json"
STORE_SECONDS = 60.0  # of training between checkpoints


class Run:
    """A model in training, and what was measured so far: ``work`` and ``loss`` by step, ``stages`` done, FLOPs of each kind."""

    def __init__(self, size: Size, attention: Trained, plan: Plan, vocabulary: int, device: torch.device) -> None:
        self.size, self.attention, self.plan, self.device = size, attention, plan, device
        self.model = size.build(vocabulary, plan.positions, plan.seed).to(device)
        self.shape = ModelShape.of(self.model.config)
        decayed = [weight for weight in self.model.parameters() if weight.ndim > 1]
        others = [weight for weight in self.model.parameters() if weight.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}],
            betas=(0.9, 0.95), fused=device.type == "cuda",
        )  # fmt: skip
        self.step, self.seconds = 0, 0.0
        self.facts: dict[str, Any] = {"loss": [], "work": [], "stages": []}
        self.attention_flops: dict[str, AttentionFlops] = {}
        self._slots = (0.0, 0.0)  # visible and retained of the last measured step

    def train(
        self,
        windows: Mapping[int, Tensor],
        texts: Mapping[str, Tensor],
        deadline: float,
        on_measured: Callable[[], None] = lambda: None,
    ) -> bool:
        """Take the steps that are left until ``time.monotonic()`` passes the deadline; whether all are done.

        on_measured: called after each step whose loss was read.
        """
        with self.attention.of(self.model):
            while self.step < self.plan.steps:
                if time.monotonic() > deadline:
                    return False
                began = time.monotonic()
                number, own = self.plan.place(self.step)
                stage = self.plan.stages[number]
                measured = self._take_step(stage, own, stage.windows_at(windows[stage.seqlen], own, self.plan.seed))
                self.step += 1
                if own + 1 == stage.steps:
                    self._sync()
                    self.seconds += time.monotonic() - began
                    self.facts["stages"].append(
                        asdict(stage) | self.totals() | {"nll": self.held_out(texts, stage.seqlen)}
                    )
                else:
                    self.seconds += time.monotonic() - began
                if measured:
                    on_measured()
        return True

    def _take_step(self, stage: Stage, own: int, ids: Tensor) -> bool:
        """Whether the loss was read."""
        ids = ids.to(self.device, non_blocking=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate(self.step, self.size.hidden)
        measured = own % self.plan.every == 0 or own + 1 == stage.steps
        self.model.train()
        loss = self._forward(ids, measured)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if measured:
            value = loss.item()
            if not math.isfinite(value):
                raise ValueError(f"the loss is {value} at step {self.step}")
            self.facts["loss"].append([self.step, round(value, 5)])
        for name, flops in self.attention.flops(self.model, *ids.shape, self._slots).items():
            self.attention_flops[name] = self.attention_flops.get(name, AttentionFlops()) + flops
        return measured

    def _forward(self, ids: Tensor, measured: bool) -> Tensor:
        """The loss; a measured step of MALA says what it retained, other attentions see every slot."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.plan.dtype == "bfloat16"):
            if not measured:
                return self.model(input_ids=ids, labels=ids, use_cache=False).loss
            if self.attention.name == "mala":
                with record_work(self.model) as report:
                    loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
                self._slots = slots_of(report)
            else:
                loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
                visible = float(len(ids) * self.shape.causal_slots(ids.shape[1], self.default_tile()))
                self._slots = (visible, visible)
        visible, retained = self._slots
        self.facts["work"].append([self.step, ids.shape[1], round(retained / visible, 5)])
        return loss

    def default_tile(self) -> tuple[int, int]:
        """The tile that MALA would use, so that both count the same visible slots."""
        from mala_hf.ops.tile_config import DECODE_ROWS, tile_config

        dtype = getattr(torch, self.plan.dtype)
        return tile_config(self.shape.head_dim, self.shape.head_dim, dtype, DECODE_ROWS + 1).tile

    def totals(self) -> dict[str, Any]:
        """Step, tokens, seconds of training, and FLOPs so far: of the matrices, and of attention by kind of backward."""
        tokens = 0
        for number, stage in enumerate(self.plan.stages):
            reached, own = self.plan.place(self.step)
            tokens += (
                stage.seqlen * stage.batch * (stage.steps if number < reached else own if number == reached else 0)
            )
        linear = 3 * tokens * self.shape.linear_flops_per_token
        return {
            "step": self.step,
            "tokens": tokens,
            "seconds": self.seconds,
            "linear_flops": linear,
            "attention_flops": {name: asdict(flops) for name, flops in self.attention_flops.items()},
            "training_flops": {name: linear + flops.total for name, flops in self.attention_flops.items()},
        }

    def held_out(self, texts: Mapping[str, Tensor], length: int) -> dict[str, dict[str, float]]:
        """Nats per token of each text in windows of a length: with the attention of the training, with SDPA and with MALA."""
        self.model.eval()
        readers = {self.attention.label: self.attention} | {name: Trained.parse(name) for name in ("sdpa", "mala")}
        found: dict[str, dict[str, float]] = {}
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.plan.dtype == "bfloat16")
        for text, ids in texts.items():
            windows = windows_of(ids[: max(length, self.plan.held_out_tokens)], length)
            found[text] = {}
            for name, reader in readers.items():
                with reader.of(self.model), autocast:
                    found[text][name] = perplexity(self.model, windows.flatten(), length).nll
        self.model.train()
        return found

    @torch.no_grad()
    def work_by_length(self, texts: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """What MALA retains of each text by length, whatever the training's attention: all layers, and layer by layer."""
        self.model.eval()
        found: dict[str, dict[str, Any]] = {}
        reader = self.attention if self.attention.name == "mala" else Trained.parse("mala")
        for text, ids in texts.items():
            found[text] = {}
            for length in self.plan.lengths:
                windows = windows_of(ids[: max(length, self.plan.held_out_tokens // 4)], length)
                autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.plan.dtype == "bfloat16")
                with reader.of(self.model), record_work(self.model) as report, autocast:
                    for window in windows:
                        self.model(input_ids=window[None].to(self.device), use_cache=False, logits_to_keep=1)
                layers = [round(float(layer.work_fraction.mean()), 4) for layer in report.layers.values()]
                found[text][str(length)] = {"work_fraction": report.work_fraction, "by_layer": layers}
        return found

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def save(self, path: Path) -> None:
        """Everything that training needs to go on."""
        scratch = path.with_suffix(".tmp")
        torch.save(
            {
                "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                "seconds": self.seconds, "facts": self.facts, "slots": self._slots,
                "attention_flops": {name: asdict(flops) for name, flops in self.attention_flops.items()},
            },
            scratch,
        )  # fmt: skip
        scratch.replace(path)

    def load(self, path: Path) -> None:
        """Go on from what ``save`` wrote."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.facts = state["step"], state["seconds"], state["facts"]
        self._slots = tuple(state["slots"])
        self.attention_flops = {name: AttentionFlops(**one) for name, one in state["attention_flops"].items()}


def slots_of(report: Any) -> tuple[float, float]:
    """Visible and retained key slots of a recorded forward, over all sequences, heads, rows and layers."""
    layers = report.layers.values()
    visible = sum(float(layer.visible_slots_per_query.sum()) * layer.rows for layer in layers)
    return visible, sum(float(layer.key_slots_per_query.sum()) * layer.rows for layer in layers)


def run_one(
    size_name: str, label: str, plan: Plan, parts: Mapping[str, Tensor], vocabulary: int, device: torch.device,
    folder: Path, deadline: float,
) -> tuple[dict[str, Any], Run]:  # fmt: skip
    """Train one size with one attention as far as the time goes and evaluate; ``complete`` when nothing is missing."""
    run = Run(Size.parse(size_name), Trained.parse(label), plan, vocabulary, device)
    state = folder / STATE
    if state.exists():
        run.load(state)
    windows = {stage.seqlen: windows_of(parts[TRAIN], stage.seqlen) for stage in plan.stages}
    texts = {name: ids for name, ids in parts.items() if name != TRAIN}
    folder.mkdir(parents=True, exist_ok=True)
    name, stored = f"{size_name}/{label}", run.seconds

    def result(final: dict[str, Any] | None = None) -> dict[str, Any]:
        found = {
            "size": size_name,
            "attention": label,
            "parameters": sum(weight.numel() for weight in run.model.parameters()),
            "complete": final is not None,
            "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
            **run.totals(),
            **run.facts,
            "final": final,
        }
        write_whole(folder / RESULT, json.dumps(found))
        return found

    def on_measured() -> None:
        nonlocal stored
        print(
            f"{name} step {run.step} of {plan.steps} loss {run.facts['loss'][-1][1]:.4f} {run.seconds:.0f} s",
            flush=True,
        )
        if run.seconds - stored >= STORE_SECONDS:
            run.save(state)
            result()
            stored = run.seconds

    done = run.train(windows, texts, deadline, on_measured)
    run.save(state)
    found = result()
    if done:
        print(f"{name} is trained, {run.seconds:.0f} s", flush=True)
        evaluated = {str(length): run.held_out(texts, length) for length in plan.lengths}
        found = result({"nll": evaluated, "work": run.work_by_length(texts)})
    return found, run

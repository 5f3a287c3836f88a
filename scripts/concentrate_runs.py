# SPDX-License-Identifier: Apache-2.0
"""One arm of the concentration study: a fine-tuning with MALA, what is measured on the way, and RULER at its end.

Points and answers are stored as they come and training is checkpointed when its time is up, so a run goes on where it stopped.
"""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from concentrate_plan import START, Arm, Plan
from stored_results import write_whole
from study_data import TRAIN, windows_of
from torch import Tensor
from training_runs import Attention, Curves, Windows, training_arguments, work_of
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from mala_hf.concentration import LOGGED, ConcentrationCallback
from mala_hf.implementations import Implementation, using_implementation
from mala_hf.info import device_name
from mala_hf.patch import mala_attention
from mala_hf.perplexity import perplexity
from mala_hf.ruler.evaluation import RulerSettings, evaluate
from mala_hf.ruler.sample_file import NAME as SAMPLES
from mala_hf.ruler.summary import summarize

POINTS, RULER, RESULT = "points.json", "ruler.json", "result.json"


class Measure(TrainerCallback):
    """A point of the curve at step 0, every ``plan.every`` steps and at the end; none twice."""

    def __init__(
        self, model: Any, texts: Mapping[str, Tensor], plan: Plan, folder: Path, on_point: Callable[[], None]
    ) -> None:
        self.model, self.texts, self.plan, self.path, self.on_point = model, texts, plan, folder / POINTS, on_point
        self.points: list[dict[str, Any]] = json.loads(self.path.read_text("utf-8")) if self.path.exists() else []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The start, unless this goes on."""
        if state.global_step == 0:
            self.at(0, None)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """A step has ended."""
        if (
            logs
            and "loss" in logs
            and (state.global_step % self.plan.every == 0 or state.global_step == args.max_steps)
        ):
            self.at(state.global_step, logs)
            control.should_save = True  # a run that is stopped goes on from its last point

    def at(self, step: int, logs: Any) -> None:
        """Measure and store, unless that step is there."""
        if any(point["step"] == step for point in self.points):
            return
        was_training = self.model.training
        point = {"step": step, "tokens": step * self.plan.batch * self.plan.seqlen}
        point |= {name: logs[name] for name in ("loss", LOGGED) if logs and name in logs}
        self.points.append(point | measure(self.model, self.texts, self.plan))
        self.model.train(was_training)
        write_whole(self.path, json.dumps(self.points))
        self.on_point()


def measure(model: Any, texts: Mapping[str, Tensor], plan: Plan) -> dict[str, Any]:
    """Nats per token of each text (n, ids) with full attention and MALA, and MALA's work by text and length, at tau = 1."""
    model.eval()
    autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=plan.dtype == "bfloat16")
    nll: dict[str, dict[str, float]] = {}
    work: dict[str, dict[str, Any]] = {}
    for name, ids in texts.items():
        windows = windows_of(ids, plan.seqlen, plan.windows)
        nll[name] = {}
        with torch.inference_mode(), autocast:
            with using_implementation(model, "sdpa"):
                nll[name]["sdpa"] = perplexity(model, windows.flatten(), plan.seqlen).nll
            with mala_attention(model, **plan.settings):
                nll[name]["mala"] = perplexity(model, windows.flatten(), plan.seqlen).nll
        attention = Attention("mala", "mala", plan.settings)
        work[name] = {}
        for length in plan.work_lengths:
            some = windows_of(ids, length, max(1, plan.windows * plan.seqlen // length // 2))
            found = [work_of(model, window[None], attention, plan.dtype) for window in some]
            layers = torch.tensor([one["by_layer"] for one in found]).mean(0)
            work[name][str(length)] = {
                "work_fraction": sum(one["work_fraction"] for one in found) / len(found),
                "by_layer": [round(x, 4) for x in layers.tolist()],
                "tiles": found[0]["tiles"],
            }
    return {"nll": nll, "work": work}


class Deadline(TrainerCallback):
    """Stops training, with a checkpoint, when ``time.monotonic()`` passes ``moment``."""

    def __init__(self, moment: float) -> None:
        self.moment = moment

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Look at the clock."""
        if time.monotonic() > self.moment:
            control.should_save = control.should_training_stop = True
        return control


def train(
    model: Any,
    arm: Arm,
    parts: Mapping[str, Tensor],
    plan: Plan,
    folder: Path,
    deadline: float,
    on_point: Callable[[], None],
) -> bool:
    """Train, from the last checkpoint in the folder if there is one; whether all steps are done."""
    texts = {name: ids for name, ids in parts.items() if name != TRAIN}
    gauge = Measure(model, texts, plan, folder, on_point)
    if arm.label.startswith(START) or not plan.steps:
        gauge.at(0, None)
        return True
    on_gpu = model.device.type == "cuda"
    arguments = training_arguments(plan, str(folder / "state"), on_gpu, save_total_limit=1)
    callbacks: list[TrainerCallback] = []
    if arm.weight is not None:
        callbacks.append(ConcentrationCallback(arm.weight, temperature=arm.temperature, tile=plan.tile))
    callbacks += [Curves(arm.label), gauge, Deadline(deadline)]
    dataset = Windows(windows_of(parts[TRAIN], plan.seqlen), plan.seed)
    last = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None
    with mala_attention(model, **plan.settings):
        trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=last)
        done = trainer.state.global_step >= plan.steps
    if done:
        trainer.save_state()
    return done


def ruler(model: Any, tokenizer: Any, plan: Plan, data: Path, folder: Path) -> dict[str, Any]:
    """Scores of the trained model with full attention and MALA on the prepared samples; ``model`` is cast to the study's dtype."""
    output = folder / "ruler"
    output.mkdir(parents=True, exist_ok=True)
    if not (output / SAMPLES).exists():
        shutil.copy(data / SAMPLES, output / "samples.tmp").replace(output / SAMPLES)
    implementations = (Implementation("sdpa"), Implementation("mala"))
    model.config.get_text_config().mala = plan.settings
    settings = RulerSettings(
        output=output,
        tasks=plan.ruler_tasks,
        lengths=(plan.ruler_length,),
        implementations=implementations,
        num_samples=plan.ruler_samples,
        batch_size=plan.ruler_samples * len(plan.ruler_tasks),
        model=folder.name,
        device=str(model.device),
    )
    model = model.to(getattr(torch, plan.dtype)).eval()
    gc.collect()  # the optimizer lives in reference cycles; other arms want its memory
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    found = evaluate(settings, make_bar=no_bar, notice=print, loaded=(model, tokenizer))
    assert found is not None  # one process
    prompts, answers, _ = found
    return {key: value for key, value in summarize(prompts, answers, implementations).items() if key != "needles"}


@contextmanager
def no_bar(total: int, unit: str) -> Any:
    """A progress bar that shows nothing."""
    yield _NoBar()


class _NoBar:
    def update(self, n: int) -> None:
        """Nothing is drawn."""


def run_arm(
    model: Any,
    tokenizer: Any,
    arm: Arm,
    parts: Mapping[str, Tensor],
    plan: Plan,
    data: Path,
    folder: Path,
    deadline: float,
) -> dict[str, Any]:
    """Train and evaluate as far as the time goes; what is there so far, ``complete`` when nothing is missing."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    scores = folder / RULER

    def result(complete: bool = False) -> dict[str, Any]:
        points = json.loads((folder / POINTS).read_text("utf-8"))
        found = {
            **asdict(arm),
            "complete": complete,
            "seconds": time.monotonic() - started,
            "peak_bytes": torch.cuda.max_memory_allocated() if model.device.type == "cuda" else None,
            "points": points,
            "ruler": json.loads(scores.read_text("utf-8")) if scores.exists() else None,
        }
        write_whole(folder / RESULT, json.dumps(found | {"device": device_name(model.device)}))
        return found

    def on_point() -> None:
        print(line_of(result()), flush=True)

    with arm.scaling(model):
        done = train(model, arm, parts, plan, folder, deadline, on_point)
        if done and plan.ruler_tasks and not scores.exists() and time.monotonic() < deadline:
            result()
            write_whole(scores, json.dumps(ruler(model, tokenizer, plan, data, folder)))
    return result(done and (scores.exists() or not plan.ruler_tasks))


def line_of(run: dict[str, Any]) -> str:
    """One arm's last point, in a line."""
    point = run["points"][-1]
    parts = [f"{run['label']:<24} step {point['step']:>5} {run['seconds']:.0f} s"]
    for text, nll in point["nll"].items():
        work = ", ".join(f"{n}: {one['work_fraction']:.1%}" for n, one in point["work"][text].items())
        parts.append(f"{text} nll {nll['sdpa']:.4f} (mala {nll['mala']:.4f}), work {work}")
    if run["ruler"]:
        parts.append(
            "RULER " + ", ".join(f"{row['implementation']} {row['score']:.1f}" for row in run["ruler"]["lengths"][:2])
        )
    return "  ".join(parts) + ("" if run["complete"] else "  (unfinished)")

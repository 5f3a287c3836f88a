# SPDX-License-Identifier: Apache-2.0
"""A conversion's RULER: samples of what ships with the package, drawn before anything is measured, and answered by both attentions."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .convert_bench import Bench, Evidence
from .implementations import Implementation
from .perplexity import check_positions

CORPORA = "builtin"  # the same everywhere, and without a network


def draw_ruler(bench: Bench, evidence: Evidence) -> Path:
    """Draw the samples, or find them drawn; return their file.

    Raises ``ValueError`` for a task that has no sample so short, and a prompt that leaves the model no room for its answer.
    """
    from .ruler.sample_file import NAME, Wanted, prepare

    wanted = Wanted(evidence.ruler_tasks, (bench.length,), evidence.ruler_samples, corpora=CORPORA)
    path = bench.store.path("samples", _wanted(evidence)).with_suffix("") / NAME
    try:
        for prompt in prepare(path, wanted, bench.tokenizer, notice=bench.say):
            check_positions(bench.model, len(prompt.ids) + prompt.answer_tokens - 1)
    except ValueError as error:
        raise ValueError(f"{error}; choose another length, or 0 samples of RULER") from error
    return path


def score_ruler(
    bench: Bench, evidence: Evidence, implementations: Sequence[Implementation], settings: dict[str, Any], name: str
) -> dict[str, Any]:
    """Return RULER's scores (``ruler.summary``); answers are kept batch by batch, apart for other ``settings``."""
    from tqdm.auto import tqdm

    from .ruler.evaluation import RulerSettings, evaluate
    from .ruler.summary import summarize

    settings = settings | _wanted(evidence)
    output = bench.store.path("ruler", settings).with_suffix("")

    def measure() -> dict[str, Any]:
        tasks = ", ".join(evidence.ruler_tasks)
        bench.say(f"RULER at {bench.length} tokens, before and after: {evidence.ruler_samples} samples each of {tasks}")
        samples = draw_ruler(bench, evidence)
        output.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(samples, output / samples.name)
        ruler = RulerSettings(
            output=output,
            tasks=evidence.ruler_tasks,
            lengths=(bench.length,),
            implementations=tuple(implementations),
            num_samples=evidence.ruler_samples,
            batch_size=min(evidence.ruler_samples, 8),
            corpora=CORPORA,
            model=name,
        )
        found = evaluate(
            ruler,
            make_bar=lambda total, unit: tqdm(total=total, desc=unit, unit="", disable=bench.quiet),
            notice=bench.say,
            loaded=(bench.model, bench.tokenizer),
        )
        assert found is not None  # of several processes the others get None; here is one
        prompts, answers, made_with = found
        return made_with | summarize(prompts, answers, implementations)

    result: dict[str, Any] = bench.store.get("ruler", settings, measure)
    return result


def _wanted(evidence: Evidence) -> dict[str, Any]:
    return {"tasks": list(evidence.ruler_tasks), "samples": evidence.ruler_samples}

# SPDX-License-Identifier: Apache-2.0
"""RULER in the model-level study: at the native length and under YaRN, its progress in lines, stopped when time is up."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mala_hf.ruler.evaluation import RulerSettings, evaluate
from mala_hf.ruler.summary import summarize

NATIVE, YARN = "ruler_native", "ruler_yarn"
LINE_SECONDS = 5.0  # between lines of progress


def positions_of(options: argparse.Namespace) -> int:
    """The native length: as asked, or what the model's config has."""
    from transformers import AutoConfig

    from mala_hf.checkpoint import offline_place

    if options.native_length:
        return int(options.native_length)
    place, files = (options.model, {}) if options.model else offline_place()
    files = {key: value for key, value in files.items() if key == "gguf_file"}
    return int(AutoConfig.from_pretrained(place, **files).get_text_config().max_position_embeddings)


def ruler_settings(options: argparse.Namespace, part: str) -> RulerSettings:
    """Native length, or ``--yarn-factor`` times it under YaRN."""
    native = positions_of(options)
    scaling, length = None, native
    if part == YARN:
        length = int(native * options.yarn_factor)
        scaling = {"rope_type": "yarn", "factor": options.yarn_factor, "original_max_position_embeddings": native}
    return RulerSettings(
        output=options.state / part,
        tasks=tuple(options.ruler_tasks),
        lengths=(length,),
        implementations=tuple(options.implementations),
        num_samples=options.ruler_samples,
        batch_size=options.batch_size,
        chat_template=options.chat_template,
        corpora=options.corpora,
        model=options.model,
        tokenizer=options.tokenizer,
        rope_scaling=scaling,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        device=options.device,
    )


class OutOfTime(Exception):
    """The budget is spent in the middle of a part."""


class ProgressLines:
    """Says how far a part is, and ends it when ``time.monotonic()`` passes ``end``: what was answered is stored by then."""

    def __init__(self, part: str, end: float = math.inf) -> None:
        self.part, self.end, self.began = part, end, time.monotonic()

    @contextmanager
    def __call__(self, total: int, unit: str) -> Iterator[ProgressLines]:
        """A bar of the evaluation."""
        self.total, self.unit, self.done, self.said = total, unit, 0, -math.inf
        yield self

    def update(self, n: int) -> None:
        """``n`` more. Raises :class:`OutOfTime`, but while samples are drawn, of which nothing is stored before the last."""
        self.done += n
        now = time.monotonic()
        if now - self.said >= LINE_SECONDS or self.done == self.total:
            print(f"{self.part}: {self.done} of {self.total} {self.unit}, {now - self.began:.0f} s", flush=True)
            self.said = now
        if self.unit == "answers" and now > self.end and self.done < self.total:
            raise OutOfTime


def ruler_rows(options: argparse.Namespace, part: str, end: float) -> Iterator[dict[str, Any]]:
    """One row for each implementation: the score of the length in percent, and those of its tasks.

    Raises :class:`OutOfTime` when ``time.monotonic()`` passes ``end``; the answers so far are in the state folder.
    """
    settings = ruler_settings(options, part)
    found = evaluate(settings, make_bar=ProgressLines(part, end), notice=print)
    assert found is not None  # one process
    prompts, answers, _ = found
    summary = summarize(prompts, answers, settings.implementations)
    for row in summary["lengths"]:
        if row["length"] is not None:
            own = [
                one
                for one in summary["tasks"]
                if (one["implementation"], one["tau"]) == (row["implementation"], row["tau"])
            ]
            yield {"part": part, **row, "tasks": {one["task"]: one["score"] for one in own}}

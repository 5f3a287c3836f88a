# SPDX-License-Identifier: Apache-2.0
"""The samples of a task, drawn for one tokenizer and length."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .corpora import Corpora
from .sampling import Draft, Run
from .tasks import find_task


@dataclass(frozen=True)
class Sample:
    """One question; a model reads ``prompt``, and what it answers is scored against ``outputs``.

    index: number of the sample, from 0. length: tokens of the prompt plus the task's ``answer_tokens``.
    answer_position: in niah the number of tokens of ``input`` before the first of ``outputs``; None in other tasks.
    """

    task: str
    index: int
    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int
    answer_position: int | None = None

    @property
    def prompt(self) -> str:
        """What goes before the answer; with a chat template, ``answer_prefix`` opens the assistant's turn instead."""
        return self.input + self.answer_prefix

    def to_json(self) -> str:
        """Write the sample as a line of RULER's own files; ``index`` is then, in niah, the character where the answer starts."""
        record = {
            "index": self.index if self.answer_position is None else self.input.index(self.outputs[0]),
            "input": self.input,
            "outputs": self.outputs,
            "length": self.length,
            "length_w_model_temp": self.length,
            "answer_prefix": self.answer_prefix,
        }
        if self.answer_position is not None:
            record["token_position_answer"] = self.answer_position
        return json.dumps(record)


def token_counter(tokenizer: Any) -> Callable[[str], int]:
    """Count the tokens of a text with a tokenizer of transformers, without special tokens; a function that counts is taken as it is.

    Raises ``ValueError`` for anything else, and for a function that returns no number or the same one for a longer text.
    """
    if hasattr(tokenizer, "tokenize"):
        return lambda text: len(tokenizer.tokenize(text))
    if not callable(tokenizer):
        got = type(tokenizer).__name__
        raise ValueError(f"tokenizer must be one of transformers or a function text -> number of tokens, got {got}")
    few, many = tokenizer("one word"), tokenizer("one word " * 100)
    if not (isinstance(few, int) and isinstance(many, int) and few < many):
        raise ValueError("tokenizer must return the number of tokens of a text, more for a longer text")
    return tokenizer


def generate(
    task: str,
    *,
    tokenizer: Any,
    length: int,
    num_samples: int,
    seed: int = 42,
    corpora: Corpora | None = None,
    reserved: int = 0,
) -> list[Sample]:
    """Draw the samples that RULER draws for the same tokenizer, length, number of samples, seed and texts.

    tokenizer: of transformers, or a function from a text to its number of tokens. length: tokens of prompt and answer together,
    and of the chat template around them, to which ``reserved`` of them go.

    Raises ``ValueError`` for an unknown task, a length that the task does not fit in, no samples or more than there are questions,
    and a text that is missing or malformed; ``OSError`` when it cannot be read; ``ImportError`` without the extra ``eval``, and
    ``LookupError`` without nltk's data.
    """
    answer_tokens = find_task(task).answer_tokens
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    room = length - reserved
    if room <= answer_tokens:
        raise ValueError(f"{task} keeps {answer_tokens} tokens for the answer, so length must be larger, got {room}")
    run = Run(task, token_counter(tokenizer), room, answer_tokens, num_samples, seed, corpora or Corpora(), reserved)
    return [_finish(run, index, draft) for index, draft in enumerate(find_task(task).draw(run))]


def _finish(run: Run, index: int, draft: Draft) -> Sample:
    position = None
    if run.task.startswith("niah"):
        position = run.count(draft.input[: draft.input.index(draft.outputs[0])])
    return Sample(run.task, index, draft.input, draft.answer_prefix, tuple(draft.outputs), run.tokens(draft), position)

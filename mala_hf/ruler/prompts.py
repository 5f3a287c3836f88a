# SPDX-License-Identifier: Apache-2.0
"""What a model reads: a sample in the model's chat template, or as it is, and its tokens."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .generation import Sample, generate
from .tasks import find_task

CHAT_TEMPLATE = ("auto", "on", "off")


@dataclass(frozen=True)
class Prompt:
    """A sample ready to be answered: all that an evaluation needs, on any machine.

    length: tokens that the sample was drawn for. text: exactly what ``ids`` are the tokens of. depths: in niah, for each of
    ``outputs``, its place in the sample, from 0 (the start) to 1; empty in other tasks.
    """

    length: int
    task: str
    index: int
    text: str
    ids: tuple[int, ...]
    outputs: tuple[str, ...]
    depths: tuple[float, ...] = ()

    @property
    def answer_tokens(self) -> int:
        """Largest number of tokens of an answer."""
        return find_task(self.task).answer_tokens

    @cached_property
    def digest(self) -> str:
        """Tells prompts apart: the start of the SHA-256 of the tokens."""
        return hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()[:16]


def uses_chat_template(tokenizer: Any, setting: str) -> bool:
    """Decide "auto": on where the tokenizer has a template. ``ValueError`` for "on" where it has none, and for another setting."""
    if setting not in CHAT_TEMPLATE:
        raise ValueError(f"the chat template is {', '.join(CHAT_TEMPLATE)}, got {setting!r}")
    if setting == "on" and not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template: use --chat-template off")
    return setting == "on" or (setting == "auto" and bool(tokenizer.chat_template))


class Prompter:
    """Writes prompts for one tokenizer, with its chat template or without.

    The answer's prefix opens the assistant's turn. Models that think are asked not to (``enable_thinking=False``), and where the
    template opens a thought all the same it is closed at once: the budgets of RULER are for answers alone.
    """

    def __init__(self, tokenizer: Any, chat: bool) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._options: dict[str, Any] = {}
        if chat and "enable_thinking" in tokenizer.get_chat_template():
            self._options["enable_thinking"] = False

    def text(self, question: str, answer_prefix: str) -> str:
        """Return the prompt for a question."""
        if not self._chat:
            return question + answer_prefix
        turns = [{"role": "user", "content": question}]
        opened = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **self._options)
        if opened.rstrip().endswith("<think>"):
            opened = opened.rstrip() + "\n</think>\n\n"
        return opened + answer_prefix

    def ids(self, text: str) -> list[int]:
        """Return its tokens; special tokens are added only where no chat template wrote them."""
        return self._tokens(text, add_special_tokens=not self._chat)

    def count(self, text: str) -> int:
        """Count the tokens of a text, without special tokens: as RULER measures samples."""
        return len(self._tokens(text, add_special_tokens=False))

    def _tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        # not verbose: texts longer than the model's context are counted on the way
        options = {"add_special_tokens": add_special_tokens, "truncation": False, "verbose": False}
        return self._tokenizer(text, **options).input_ids

    @property
    def template_tokens(self) -> int:
        """Tokens that the chat template adds to a sample."""
        question, prefix = "What is it?", " Answer:"
        if not self._chat:
            return 0
        return len(self.ids(self.text(question, prefix))) - self.count(question + prefix)

    def draw(self, task: str, *, length: int, **options: Any) -> list[Prompt]:
        """Draw samples of a task (as ``samples`` does) and write their prompts."""
        return [self._finish(sample, length) for sample in self.samples(task, length=length, **options)]

    def samples(self, task: str, *, length: int, num_samples: int, **options: Any) -> list[Sample]:
        """Draw samples of a task (``generate``'s options).

        The length holds the template too, as RULER's does; where the task does not fit beside it, the template comes on top.
        """

        def samples_beside(reserved: int) -> list[Sample]:
            fixed: dict[str, Any] = {"length": length, "num_samples": num_samples, "reserved": reserved}
            return generate(task, tokenizer=self.count, **fixed, **options)

        try:
            return samples_beside(self.template_tokens)
        except ValueError:
            if not self._chat:
                raise
            return samples_beside(0)

    def _finish(self, sample: Sample, length: int) -> Prompt:
        text = self.text(sample.input, sample.answer_prefix)
        depths: tuple[float, ...] = ()
        if sample.answer_position is not None:
            depths = tuple(round(sample.input.index(one) / len(sample.input), 4) for one in sample.outputs)
        ids = tuple(self.ids(text))
        return Prompt(length, sample.task, sample.index, text, ids, sample.outputs, depths)

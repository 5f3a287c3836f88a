# SPDX-License-Identifier: Apache-2.0
"""RULER on a model with several attention implementations, all on the same samples; resumable, on one process or many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..checkpoint import OFFLINE_MODEL, load_model, load_tokenizer
from ..implementations import Implementation, using_implementation
from ..info import device_name
from ..perplexity import check_positions
from .answer_store import AnswerStore, Key, key_of
from .answering import greedy_answers, stop_tokens
from .metrics import clean_prediction, contained
from .prompts import CHAT_TEMPLATE, Prompt
from .ranks import Ranks
from .sample_file import NAME, Wanted, prepare, read_header
from .scoring import score
from .tasks import find_task


class Bar(Protocol):
    """A progress bar, as tqdm's."""

    def update(self, n: int) -> Any:
        """Move on by ``n``."""


MakeBar = Callable[[int, str], AbstractContextManager[Bar]]  # from the number of steps and what a step is


@dataclass(frozen=True)
class RulerSettings:
    """What to evaluate; ``None`` picks the offline checkpoint, its tokenizer, and a dtype and device as ``load_model`` does.

    The folder ``output`` keeps samples and answers. Raises ``ValueError`` for what cannot be evaluated.
    """

    output: Path
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    implementations: tuple[Implementation, ...]
    num_samples: int = 20
    seed: int = 42
    batch_size: int = 8
    chat_template: str = "auto"
    corpora: str = "auto"
    model: str | None = None
    tokenizer: str | None = None
    rope_scaling: dict[str, Any] | None = None
    dtype: torch.dtype | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for task in self.tasks:
            find_task(task)
        for name, value in (("samples", self.num_samples), ("batch_size", self.batch_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name, values in (("task", self.tasks), ("length", self.lengths)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"each {name} once, and at least one: got {', '.join(map(str, values)) or 'none'}")
        for length in self.lengths:
            if length < 1:
                raise ValueError(f"a length is a number of tokens, got {length}")
        if self.chat_template not in CHAT_TEMPLATE:
            raise ValueError(f"the chat template is {', '.join(CHAT_TEMPLATE)}, got {self.chat_template!r}")

    @property
    def wanted(self) -> Wanted:
        """The samples."""
        lengths = tuple(sorted(self.lengths))
        return Wanted(self.tasks, lengths, self.num_samples, self.seed, self.chat_template, self.corpora)


def prepare_samples(
    settings: RulerSettings, tokenizer: Any = None, *, make_bar: MakeBar, notice: Callable[[str], None]
) -> list[Prompt]:
    """Draw what the samples' file in the output folder does not hold yet, and return the prompts; no model is needed."""

    def draws(groups: Sequence[tuple[int, str]]) -> Iterable[tuple[int, str]]:
        with make_bar(len(groups), "tasks drawn") as bar:
            for group in groups:
                yield group
                bar.update(1)

    tokenizer = tokenizer or load_tokenizer(settings.tokenizer or settings.model)
    return prepare(settings.output / NAME, settings.wanted, tokenizer, draws=draws, notice=notice)


def evaluate(
    settings: RulerSettings,
    *,
    make_bar: MakeBar,
    notice: Callable[[str], None],
    loaded: tuple[Any, Any] | None = None,
) -> tuple[list[Prompt], list[dict[str, Any]], dict[str, Any]] | None:
    """Answer every sample with every implementation, but for what the output folder has answers to already.

    loaded: model and tokenizer, in place of what the settings would load.

    Returns the prompts, their answers and what the answers were made with (JSON types); of several processes only in the first.
    Raises ``ValueError`` for a length beyond the model, and what loading, drawing and the store of answers raise.
    """
    ranks = Ranks.of_environment(settings.device)
    model, tokenizer = loaded or load_model(
        settings.model,
        device=ranks.device(settings.device),
        dtype=settings.dtype,
        tokenizer=settings.tokenizer,
        rope_scaling=settings.rope_scaling,
    )
    check_positions(model, max(settings.lengths))
    if not ranks.is_first:
        ranks.wait()
    prompts = prepare_samples(settings, tokenizer, make_bar=make_bar, notice=notice)
    if ranks.is_first:
        ranks.wait()  # the others go on to read what it has drawn
    for prompt in prompts:
        check_positions(model, len(prompt.ids) + prompt.answer_tokens - 1)
    made_with = {
        "model": settings.model or OFFLINE_MODEL,
        "dtype": str(model.dtype).removeprefix("torch."),
        "rope_scaling": settings.rope_scaling,
    }
    store = AnswerStore(settings.output, made_with, ranks.rank, notice if ranks.is_first else lambda _: None)
    finished = store.read()
    check_same_prompts(prompts, finished, store.folder)
    ranks.wait()  # nobody writes before all have read
    store.drop_cut_off_line()
    answer_all(model, tokenizer, prompts, settings, store, finished, ranks, make_bar)
    ranks.wait()
    if not ranks.is_first:
        return None
    wanted = {key for prompt in prompts for key in keys_of(prompt, settings.implementations)}
    answers = [answer for answer in store.merge() if key_of(answer) in wanted]
    facts = {"device": device_name(model.device), "processes": ranks.count, "batch_size": settings.batch_size}
    return prompts, answers, made_with | facts | read_header(settings.output / NAME)


def answer_all(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: RulerSettings,
    store: AnswerStore,
    finished: dict[Key, dict[str, Any]],
    ranks: Ranks,
    make_bar: MakeBar,
) -> None:
    """Answer this process's share, a batch with each implementation in turn, and store each batch when it is done.

    Which prompts make a batch does not depend on what is finished or on the number of processes.
    """
    size = settings.batch_size
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)][ranks.rank :: ranks.count]
    stop = stop_tokens(model, tokenizer)
    with make_bar(sum(map(len, batches)) * len(settings.implementations), "answers") as bar:
        for batch in batches:
            for implementation in settings.implementations:
                open_ones = [one for one in batch if keys_of(one, [implementation])[0] not in finished]
                if open_ones:
                    with using_implementation(model, implementation.name, implementation.tau):
                        answers = greedy_answers(
                            model, [one.ids for one in open_ones], [one.answer_tokens for one in open_ones], stop=stop
                        )
                    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
                    store.append(
                        record(prompt, implementation, text, len(tokens))
                        for prompt, text, tokens in zip(open_ones, texts, answers, strict=True)
                    )
                bar.update(len(batch))


def keys_of(prompt: Prompt, implementations: Iterable[Implementation]) -> list[Key]:
    """Return the keys of the answers to a prompt."""
    return [Key(prompt.length, prompt.task, prompt.index, one.name, one.tau) for one in implementations]


def record(prompt: Prompt, implementation: Implementation, text: str, tokens: int) -> dict[str, Any]:
    """Return an answer as it is stored, with its score in percent and, for each reference, whether it has it."""
    return {
        "length": prompt.length,
        "task": prompt.task,
        "index": prompt.index,
        "implementation": implementation.name,
        "tau": implementation.tau,
        "prompt": prompt.digest,
        "answer": text,
        "tokens": tokens,
        "found": contained(clean_prediction(text), prompt.outputs),
        "score": score(prompt.task, [text], [prompt.outputs]),
    }


def check_same_prompts(prompts: Iterable[Prompt], finished: dict[Key, dict[str, Any]], folder: Path) -> None:
    """Raise ``ValueError`` when an answer in the folder is to another prompt than its sample has now."""
    digests = {(prompt.length, prompt.task, prompt.index): prompt.digest for prompt in prompts}
    for key, answer in finished.items():
        digest = digests.get(key[:3])
        if digest is not None and answer.get("prompt") != digest:
            raise ValueError(
                f"{folder} has an answer to another prompt of {key.task} {key.number} at {key.length}: "
                "choose another output folder"
            )

# SPDX-License-Identifier: Apache-2.0
"""The frame that the tasks share: one stream of random draws, the search for the haystack's size, and the tries of each sample.

Whatever is measured was drawn from the same stream, also in the search and when it turns out too long: the samples of a seed
depend on the order of all draws.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

from .corpora import Corpora

T = TypeVar("T")

MAX_TRIES = 1000  # of one sample at its smallest size


@dataclass(frozen=True)
class Draft:
    """A question with its haystack, before anyone knows whether it fits; the prompt is ``input + answer_prefix``."""

    input: str
    answer_prefix: str
    outputs: list[str]


@dataclass(frozen=True)
class Run:
    """One call of ``generate``: ``count`` gives the tokens of a text, ``length`` holds the prompt and ``answer_tokens``.

    reserved: tokens beside ``length``, for a chat template; together they are the length that was asked for.
    """

    task: str
    count: Callable[[str], int]
    length: int
    answer_tokens: int
    num_samples: int
    seed: int
    corpora: Corpora
    reserved: int = 0

    @cached_property
    def rng(self) -> random.Random:
        """The stream of draws."""
        return random.Random(self.seed)

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Shuffle by a fresh generator of the seed, beside the stream: equally many items are always permuted alike."""
        items = list(items)
        random.Random(self.seed).shuffle(items)
        return items

    @property
    def is_short(self) -> bool:
        """Below 4096 tokens sizes change in smaller steps, and the lists of cwe repeat less."""
        return self.length + self.reserved < 4096

    def prompt_tokens(self, draft: Draft) -> int:
        """Tokens of the prompt."""
        return self.count(draft.input + draft.answer_prefix)

    def tokens(self, draft: Draft) -> int:
        """Tokens of the prompt and of the answer that may follow."""
        return self.prompt_tokens(draft) + self.answer_tokens

    def fits(self, draft: Draft) -> bool:
        """Whether prompt and answer stay within the length."""
        return self.tokens(draft) <= self.length

    def too_short(self, reason: str) -> ValueError:
        """Make the error for a length that the task does not fit in."""
        return ValueError(
            f"{self.task} does not fit in {self.length} tokens, {self.answer_tokens} of them for the answer: {reason}"
        )


def largest_size(draw: Callable[[int], Draft], fits: Callable[[Draft], bool], *, smallest: int, estimate: int) -> int:
    """Bisect between ``smallest`` and ``estimate`` (at least twice the smallest) for the size of the largest draft that fits.

    Drafts of a size differ in length, so a later one may be too long. When none fits, the smallest size.
    """
    low, high, best = smallest, max(estimate, 2 * smallest), smallest
    while low <= high:
        size = (low + high) // 2
        if fits(draw(size)):
            best, low = size, size + 1
        else:
            high = size - 1
    return best


def draw_fitting(draw: Callable[[int], Draft], fits: Callable[[Draft], bool], *, size: int, step: int) -> Draft | None:
    """Draw until a draft fits: a step smaller after each failure, and when there is no step left, the same size again.

    The original tries that last size for ever; here it is None after ``MAX_TRIES``.
    """
    tries = 0
    while tries < MAX_TRIES:
        draft = draw(size)
        if fits(draft):
            return draft
        if size > step:
            size -= step
        else:
            tries += 1
    return None


def draw_samples(run: Run, draw: Callable[[int, int], Draft], *, size: int, step: int) -> Iterator[Draft]:
    """Draw ``draw(index, size)`` for each sample until it fits; ``ValueError`` when it does not."""
    for index in range(run.num_samples):
        draft = draw_fitting(partial(draw, index), run.fits, size=size, step=step)
        if draft is None:
            raise run.too_short(f"none of {MAX_TRIES} prompts of the smallest size did")
        yield draft

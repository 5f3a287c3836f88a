# SPDX-License-Identifier: Apache-2.0
"""Common words extraction (cwe): ten words occur more often than the others of a numbered list; one solved list goes before."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from .sampling import Draft, Run, draw_samples, largest_size
from .words import all_words

TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
ANSWER_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
COMMON = 10
STEP = 10


def numbered(words: list[str]) -> str:
    """Format ``1. first 2. second``."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def draw_task(run: Run) -> Iterator[Draft]:
    """Draw samples; the size is the number of distinct words."""
    words = run.shuffled(all_words())
    more_words: list[str] = []

    def pool(size: int) -> list[str]:
        if size <= len(words):
            return words
        if not more_words:
            more_words.extend(
                run.corpora.read_json("english_words", lambda data: [str(word) for word in data.values()])
            )
        if size > len(more_words):
            raise ValueError(
                f"cwe at {run.length} tokens tries lists of {size} words, and english_words has {len(more_words)}"
            )
        return more_words

    def draw_list(size: int, common_times: int, uncommon_times: int) -> tuple[str, list[str]]:
        drawn = run.rng.sample(pool(size), size)
        common, uncommon = drawn[:COMMON], drawn[COMMON:]
        return numbered(run.shuffled(common * common_times + uncommon * uncommon_times)), common

    def draw(_: int, size: int) -> Draft:
        example, example_answer = draw_list(20, 3, 1) if run.is_short else draw_list(40, 10, 3)
        context, answer = draw_list(size, 6, 1) if run.is_short else draw_list(size, 30, 3)
        solved = f"{TEMPLATE.format(context=example)}{ANSWER_PREFIX} {numbered(example_answer)}"
        return Draft(f"{solved}\n{TEMPLATE.format(context=context)}", ANSWER_PREFIX, answer)

    tokens_per_word = run.prompt_tokens(draw(0, 4096)) / 4096  # one long list
    estimate = int(run.length // tokens_per_word) * 2
    size = largest_size(partial(draw, 0), run.fits, smallest=STEP, estimate=estimate)
    return draw_samples(run, draw, size=size, step=STEP)

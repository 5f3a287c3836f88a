# SPDX-License-Identifier: Apache-2.0
"""Needles in a haystack (niah): sentences that give magic values to keys, hidden in essays, noise, or needles of other keys."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from itertools import cycle, islice

from .corpora import Corpora
from .sampling import Draft, Run, draw_samples, largest_size
from .words import Keys, read_words

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
TEMPLATE = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
ANSWER_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
ONE_ANSWER_TEMPLATE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?"
)
ONE_ANSWER_PREFIX = " The special magic {kind} for {query} mentioned in the provided text is"

DEPTHS = [round(100 * i / 39) for i in range(40)]  # percent of the sentences


@cache
def word_keys() -> Keys:
    """Return ``adjective-noun`` keys."""
    return Keys(read_words("adjective"), read_words("noun"))


DRAW: dict[str, Callable[[random.Random], str]] = {
    "words": lambda rng: rng.choice(word_keys()),
    "numbers": lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


class Essay:
    """Essays up to a number of words; they start again when they are too short."""

    def __init__(self, corpora: Corpora) -> None:
        words = corpora.essay_words()
        split = corpora.split_sentences
        # most drafts of a run have the same size
        self.sentences = lru_cache(maxsize=4)(lambda size: tuple(split(" ".join(islice(cycle(words), size)).strip())))

    def hide(self, needles: list[str], size: int, rng: random.Random) -> str:
        """Put the needles, in their order, between sentences at random depths."""
        sentences = self.sentences(size)
        depths = rng.sample(DEPTHS, len(needles))
        places = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
        pieces, last = [], 0
        for place, needle in zip(places, needles, strict=True):
            pieces += [" ".join(sentences[last:place]), needle]
            last = place
        return " ".join([*pieces, " ".join(sentences[last:])])


def hide_in_lines(needles: list[str], lines: list[str], rng: random.Random) -> str:
    """Put the needles before random lines, the first needle furthest down."""
    places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


def draw_task(
    run: Run,
    *,
    haystack: str,
    keys: str = "words",
    values: str = "numbers",
    num_keys: int = 1,
    num_values: int = 1,
    num_queries: int = 1,
) -> Iterator[Draft]:
    """Draw samples: ``num_values`` needles for each of ``num_keys`` keys, of which ``num_queries`` are asked for."""
    rng = run.rng
    one_answer = num_queries * num_values == 1
    template, prefix = (ONE_ANSWER_TEMPLATE, ONE_ANSWER_PREFIX) if one_answer else (TEMPLATE, ANSWER_PREFIX)
    kind = values[:-1] if one_answer else values
    essay = Essay(run.corpora) if haystack == "essay" else None

    def needle(key: str, value: str) -> str:
        return NEEDLE.format(kind=values, key=key, value=value)

    def hide(needles: list[str], size: int) -> str:
        if essay:
            return essay.hide(needles, size, rng)
        if haystack == "noise":
            return hide_in_lines(needles, [NOISE] * size, rng)
        # keys before values: the order of the draws
        return hide_in_lines(needles, [needle(DRAW[keys](rng), DRAW[values](rng)) for _ in range(size)], rng)

    def draw(index: int, size: int) -> Draft:
        answers = []
        for _ in range(num_keys):
            key = DRAW[keys](rng)
            answers.append((key, [DRAW[values](rng) for _ in range(num_values)]))
        needles = [needle(key, value) for key, key_values in answers for value in key_values]
        context = hide(run.shuffled(needles), size)
        asked = [answers[i] for i in rng.sample(range(num_keys), num_queries)]
        names = [key for key, _ in asked]
        query = f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]
        return Draft(
            template.format(kind=kind, query=query, context=context),
            prefix.format(kind=kind, query=query),
            [value for _, key_values in asked for value in key_values],
        )

    step = 500 if essay else 5 if run.is_short else 25
    tokens_per_unit = run.prompt_tokens(draw(0, step)) / step
    estimate = int(run.length / tokens_per_unit * 3)
    size = largest_size(partial(draw, 0), run.fits, smallest=step, estimate=estimate)
    return draw_samples(run, draw, size=size, step=step)

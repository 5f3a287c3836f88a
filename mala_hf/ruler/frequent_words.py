# SPDX-License-Identifier: Apache-2.0
"""Frequent words extraction (fwe): the three most frequent coded words of a text whose frequencies fall by a zeta distribution."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator

from .sampling import Draft, Run

TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
ANSWER_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
LETTERS = 6
ANSWERS = 3
ALPHA = 2.0
ZETA = math.pi**2 / 6  # of ALPHA


def draw_task(run: Run) -> Iterator[Draft]:
    """Draw samples with a new vocabulary each; the most frequent "word" is three dots, and the next three are the answer.

    The size is the number of words. One vocabulary decides it; a sample that is longer gets a step fewer, again and again.
    """
    budget = run.length - run.answer_tokens
    vocabulary_size, step = budget // 50, budget // 32
    if vocabulary_size <= ANSWERS:
        raise run.too_short(f"it needs {50 * (ANSWERS + 1)} for the prompt")

    def draw_word() -> str:
        return "".join(run.rng.choices(string.ascii_lowercase, k=LETTERS))

    def draw_vocabulary() -> list[str]:
        drawn = [draw_word() for _ in range(vocabulary_size)]
        while len(set(drawn)) < vocabulary_size:
            drawn.append(draw_word())
        return ["...", *run.shuffled(sorted(set(drawn)))[1:]]

    def write(vocabulary: list[str], size: int) -> Draft:
        text = []
        for rank, word in enumerate(vocabulary, 1):
            text += [word] * int(size * rank**-ALPHA / ZETA)
        return Draft(TEMPLATE.format(context=" ".join(run.shuffled(text))), ANSWER_PREFIX, vocabulary[1 : ANSWERS + 1])

    vocabulary = draw_vocabulary()
    size = budget // LETTERS
    while run.tokens(write(vocabulary, size)) < run.length:
        size += step
    size -= step
    for _ in range(run.num_samples):
        vocabulary, used = draw_vocabulary(), size
        while not run.fits(draft := write(vocabulary, used)):
            used -= step
            if used <= 0:
                raise run.too_short("no prompt did that has any coded word")
        yield draft

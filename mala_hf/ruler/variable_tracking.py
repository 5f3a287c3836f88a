# SPDX-License-Identifier: Apache-2.0
"""Variable tracking (vt): a chain of assignments hidden in noise, and all variables that hold its value; a solved one goes before."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from .niah import NOISE
from .sampling import Draft, Run, draw_fitting, draw_samples, largest_size

TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above."
)
ANSWER_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {query}, they are: "
)
VARIABLES = 5  # of the one chain: four hops
EXAMPLE_LENGTH = 500  # tokens, without its answer
EXAMPLE_VALUE = "12345"  # never seen: each sample replaces it


def draw_name(rng: random.Random, letters: int) -> str:
    """Draw capital letters."""
    return "".join(rng.choices(string.ascii_uppercase, k=letters))


def draw_chain(run: Run, size: int, *, letters: int, value: str) -> Draft:
    """Draw the names of a chain and hide its assignments, in order, between ``size`` sentences of noise."""
    if size < VARIABLES:
        raise run.too_short(f"no prompt did that has one sentence of noise for each of {VARIABLES} variables")
    names = [draw_name(run.rng, letters) for _ in range(VARIABLES)]
    while len(set(names)) < VARIABLES:
        names.append(draw_name(run.rng, letters))
    names = list(dict.fromkeys(names))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    lines = [NOISE] * size
    for i, place in enumerate(sorted(run.rng.sample(range(size), VARIABLES))):
        lines.insert(place + i, chain[i])
    prompt = TEMPLATE.format(context="\n".join(lines), query=value)
    return Draft(prompt, ANSWER_PREFIX.format(count=VARIABLES, query=value), names)


def draw_example(run: Run) -> str:
    """Draw the solved chain, whose noise stays the same in all samples."""

    def draw(size: int) -> Draft:
        return draw_chain(run, size, letters=3, value=EXAMPLE_VALUE)

    def fits(draft: Draft) -> bool:
        return run.prompt_tokens(draft) <= EXAMPLE_LENGTH

    step = 5
    tokens_per_line = run.prompt_tokens(draw(step)) / step
    size = largest_size(draw, fits, smallest=step, estimate=int(EXAMPLE_LENGTH / tokens_per_line * 3))
    draft = draw_fitting(draw, fits, size=size, step=step)
    if draft is None:
        raise ValueError(f"vt: the solved example does not fit in {EXAMPLE_LENGTH} tokens of this tokenizer")
    return f"{draft.input}{draft.answer_prefix} {' '.join(draft.outputs)}\n\n"


def renamed(example: str, rng: random.Random, value: str) -> str:
    """Give the solved chain another value and other names."""
    example = example.replace(EXAMPLE_VALUE, value)
    names = example.rsplit(":", 1)[1].split()
    for name in names:
        example = example.replace(name, draw_name(rng, len(name)))
    return example


def draw_task(run: Run) -> Iterator[Draft]:
    """Draw samples; the size is the number of sentences of noise. Values come from a second stream, numpy's legacy one."""
    values = np.random.RandomState(run.seed)

    def draw_value() -> str:
        return str(values.randint(10_000, 99_999))

    def draw_question(size: int) -> Draft:
        return draw_chain(run, size, letters=5, value=draw_value())

    def draw(_: int, size: int) -> Draft:
        question = draw_question(size)
        return Draft(renamed(example, run.rng, draw_value()) + question.input, question.answer_prefix, question.outputs)

    def fits_with_example(question: Draft) -> bool:
        return example_tokens + run.tokens(question) <= run.length

    example = draw_example(run)
    example_tokens = run.count(example.removesuffix("\n"))  # the original adds the last one afterwards
    step = 5 if run.is_short else 10
    tokens_per_line = run.prompt_tokens(draw_question(step)) / step
    estimate = int(run.length / tokens_per_line * 3)
    size = largest_size(draw_question, fits_with_example, smallest=step, estimate=estimate)
    return draw_samples(run, draw, size=size, step=step)

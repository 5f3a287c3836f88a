# SPDX-License-Identifier: Apache-2.0
"""What stands in for RULER's texts where there is no network: a novel for the essays, and questions about invented places and people.

The questions are made by a fixed rule, in the form of SQuAD 2.0 and HotpotQA. Scores on them compare attentions of one model; they
are not comparable with published ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from ..text import default_text
from .corpora import words_of

QUESTIONS = 500  # of each data set: as many as RULER's samples of a task
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in ("a", "e", "i", "o", "u")]
TRADES = ("salt", "wool", "glass", "timber", "honey", "copper", "paper", "cider", "marble", "linen")
PARTS = ("north", "south", "east", "west")


def essay_words() -> list[str]:
    """Return the words of the novel that ships with the package."""
    return words_of(default_text())


def squad() -> dict[str, Any]:
    """Return one paragraph a town and one question each, whose answer is the river that it lies on."""
    rng = random.Random(1)
    names = _names(rng)
    articles = []
    for _ in range(QUESTIONS):
        town, river = next(names), next(names)
        founder = f"{next(names)} {next(names)}"
        context = (
            f"{town} is a town on the {rng.choice(PARTS)} bank of the river {river}. It was founded in "
            f"{rng.randint(1100, 1800)} by {founder}, and has lived by its trade in {rng.choice(TRADES)} ever since. "
            f"Its market is held every {rng.choice(('Monday', 'Wednesday', 'Saturday'))} in front of the town hall, "
            f"which has {rng.randint(3, 90)} windows."
        )
        question = {
            "question": f"On the bank of which river is the town of {town}?",
            "answers": [{"text": river}],
            "is_impossible": False,
        }
        articles.append({"title": town, "paragraphs": [{"context": context, "qas": [question]}]})
    return {"data": articles}


def hotpotqa() -> list[dict[str, Any]]:
    """Return questions that need two paragraphs, a person's and a village's, among those of eight other people and villages."""
    rng = random.Random(2)
    names = _names(rng)
    people, villages, questions = [], [], []
    for _ in range(QUESTIONS):
        person, village, river = f"{next(names)} {next(names)}", next(names), next(names)
        people.append(
            [
                person,
                [
                    f"{person} was a merchant of {rng.choice(TRADES)} who was born in the village of {village}.",
                    f" The family had {rng.randint(2, 12)} children and moved often.",
                ],
            ]
        )
        villages.append(
            [
                village,
                [
                    f"{village} is a village of {rng.randint(80, 900)} people.",
                    f" It lies on the {rng.choice(PARTS)} bank of the river {river}, where a ferry crosses twice a day.",
                ],
            ]
        )
        questions.append((f"On which river lies the village where {person} was born?", river))
    found = []
    for number, (question, answer) in enumerate(questions):
        others = rng.sample([other for other in range(QUESTIONS) if other != number], 8)
        context = [people[number], villages[number]]
        context += [people[other] for other in others[:4]] + [villages[other] for other in others[4:]]
        rng.shuffle(context)
        found.append({"question": question, "answer": answer, "context": context})
    return found


def _names(rng: random.Random) -> Iterator[str]:
    """Yield invented names, each once."""
    seen: set[str] = set()
    while True:
        name = "".join(rng.choices(SYLLABLES, k=3)).capitalize()
        if name not in seen:
            seen.add(name)
            yield name

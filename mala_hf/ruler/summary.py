# SPDX-License-Identifier: Apache-2.0
"""Scores by task and length, their differences with confidence intervals, and needles found by depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from ..bootstrap import paired_difference
from ..implementations import Implementation
from .prompts import Prompt
from .scoring import score
from .tasks import TASKS

DEPTH_BINS = 10
Answers = list[dict[str, Any]]
Group = tuple[int, str]  # length and task


def summarize(
    prompts: Sequence[Prompt], answers: Answers, implementations: Sequence[Implementation]
) -> dict[str, list[dict[str, Any]]]:
    """Return ``tasks`` (a score in percent for each task, length and implementation), ``lengths`` and ``needles``.

    The score of a length is the unweighted mean over its tasks, as RULER's; the entry with length None is the mean over lengths.
    All but the first implementation have their ``difference`` from it in points, a 95 % interval by paired bootstrap over samples
    within each task and length, and the share of ``same_answers``.
    """
    groups = sorted(
        {(one.length, one.task) for one in prompts}, key=lambda group: (group[0], list(TASKS).index(group[1]))
    )
    by_prompt = {(one.length, one.task, one.index): one for one in prompts}
    grouped: dict[Implementation, dict[Group, Answers]] = {one: defaultdict(list) for one in implementations}
    for answer in sorted(answers, key=lambda one: one["index"]):
        implementation = Implementation(answer["implementation"], answer["tau"])
        grouped[implementation][answer["length"], answer["task"]].append(answer)

    tasks, lengths, needles = [], [], []
    for implementation, of_group in grouped.items():
        scores: dict[Group, float] = {}
        found: dict[tuple[int, int], list[bool]] = defaultdict(list)
        for length, task in groups:
            asked = [by_prompt[length, task, answer["index"]] for answer in of_group[length, task]]
            texts = [answer["answer"] for answer in of_group[length, task]]
            scores[length, task] = score(task, texts, [one.outputs for one in asked])
            scored = {"task": task, "samples": len(asked), "score": scores[length, task]}
            tasks.append(_named(implementation, length) | scored)
            for prompt, answer in zip(asked, of_group[length, task], strict=True):
                for depth, hit in zip(prompt.depths, answer["found"], strict=bool(prompt.depths)):
                    found[length, min(int(depth * DEPTH_BINS), DEPTH_BINS - 1)].append(hit)
        for (length, place), hits in sorted(found.items()):
            depths = {"depth": [place / DEPTH_BINS, (place + 1) / DEPTH_BINS]}
            needles.append(_named(implementation, length) | depths | {"needles": len(hits), "found": fmean(hits)})
        for of_length in [*dict.fromkeys(length for length, _ in groups), None]:
            some = [group for group in groups if of_length in (None, group[0])]
            row = _named(implementation, of_length) | {"score": fmean(scores[one] for one in some)}
            if implementation != implementations[0]:
                row |= compare([of_group[one] for one in some], [grouped[implementations[0]][one] for one in some])
            lengths.append(row)
    return {"tasks": tasks, "lengths": lengths, "needles": needles}


def compare(ours: Sequence[Answers], theirs: Sequence[Answers]) -> dict[str, Any]:
    """Compare the answers of two implementations to the same samples, group by group."""
    pairs = [list(zip(one, other, strict=True)) for one, other in zip(ours, theirs, strict=True)]
    differences = [[one["score"] - other["score"] for one, other in group] for group in pairs]
    return {
        "difference": paired_difference(differences).to_dict(),
        "same_answers": fmean(one["answer"] == other["answer"] for one, other in chain(*pairs)),
    }


def _named(implementation: Implementation, length: int | None) -> dict[str, Any]:
    return {"implementation": implementation.name, "tau": implementation.tau, "length": length}

# SPDX-License-Identifier: Apache-2.0
"""The 13 tasks with RULER's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from . import common_words, frequent_words, niah, question_answering, variable_tracking
from .metrics import Metric, string_match_all, string_match_part
from .sampling import Draft, Run


@dataclass(frozen=True)
class Task:
    """How a task is drawn, how many tokens its answer may have, and how it is scored."""

    draw: Callable[[Run], Iterator[Draft]]
    answer_tokens: int
    metric: Metric = string_match_all


def _niah(**options: Any) -> Task:
    return Task(partial(niah.draw_task, **options), answer_tokens=128)


def _qa(corpus: str) -> Task:
    return Task(partial(question_answering.draw_task, corpus=corpus), answer_tokens=32, metric=string_match_part)


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "niah_single_1": _niah(haystack="noise"),
        "niah_single_2": _niah(haystack="essay"),
        "niah_single_3": _niah(haystack="essay", values="uuids"),
        "niah_multikey_1": _niah(haystack="essay", num_keys=4),
        "niah_multikey_2": _niah(haystack="needle"),
        "niah_multikey_3": _niah(haystack="needle", keys="uuids", values="uuids"),
        "niah_multivalue": _niah(haystack="essay", num_values=4),
        "niah_multiquery": _niah(haystack="essay", num_keys=4, num_queries=4),
        "vt": Task(variable_tracking.draw_task, answer_tokens=30),
        "cwe": Task(common_words.draw_task, answer_tokens=120),
        "fwe": Task(frequent_words.draw_task, answer_tokens=50),
        "qa_1": _qa("squad"),
        "qa_2": _qa("hotpotqa"),
    }
)


def find_task(name: str) -> Task:
    """Return the task of that name; ``ValueError`` lists the names otherwise."""
    if name not in TASKS:
        raise ValueError(f"unknown RULER task {name!r}; the tasks are {', '.join(TASKS)}")
    return TASKS[name]

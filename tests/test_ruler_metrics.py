# SPDX-License-Identifier: Apache-2.0
"""What counts as an answer, and what the score of a task is."""

from __future__ import annotations

import pytest

from mala_hf.ruler import TASKS, clean_prediction, score

ANY = ("qa_1", "qa_2")
ALL = [task for task in TASKS if task not in ANY]


@pytest.mark.parametrize("task", ALL)
def test_most_tasks_score_the_share_of_references_found(task):
    assert score(task, ["The answers are 11 and 22."], [["11", "22", "33"]]) == 66.67


@pytest.mark.parametrize("task", ANY)
def test_question_answering_needs_any_one_reference(task):
    assert score(task, ["In FRANCE."], [["Germany", "France"]]) == 100.0
    assert score(task, ["In Spain."], [["Germany", "France"]]) == 0.0


def test_a_score_is_the_mean_over_samples_whatever_the_number_of_references():
    assert score("vt", ["a b", "c", ""], [["a", "b"], ["c", "d"], ["e"]]) == 50.0
    assert score("qa_1", ["a", "b", "c"], [["a", "x"], ["b"], ["y"]]) == 66.67


def test_references_count_inside_longer_words():
    assert score("cwe", ["seabass 12345678"], [["bass", "234"]]) == 100.0


def test_case_does_not_matter_on_either_side():
    assert score("cwe", ["tv ÉCOLE"], [["TV", "école"]]) == 100.0


def test_control_characters_become_newlines_and_ends_are_stripped():
    assert clean_prediction(" \tGay\tStreet\x00\x1f \n") == "Gay\nStreet"
    assert clean_prediction("\x7fno-break\u00a0space") == "\x7fno-break\u00a0space"
    assert score("qa_1", ["Gay\tStreet"], [["Gay Street"]]) == 0.0


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        (["a"], [["a"], ["b"]], "1 predictions for 2 samples"),
        ([], [], "nothing to score"),
        (["a"], [[]], "at least one reference"),
        (["a"], ["a"], "list of at least one reference"),
    ],
    ids=["unequal", "empty", "no reference", "text for a list"],
)
def test_what_cannot_be_scored_is_refused(predictions, references, message):
    with pytest.raises(ValueError, match=message):
        score("vt", predictions, references)


def test_an_unknown_task_is_refused_with_the_names():
    with pytest.raises(ValueError, match="unknown RULER task 'niah'; the tasks are niah_single_1, "):
        score("niah", ["a"], [["a"]])

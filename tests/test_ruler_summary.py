# SPDX-License-Identifier: Apache-2.0
"""Scores, differences and needles agree with hand-made answers; intervals cover what they should."""

from __future__ import annotations

import random

import pytest

from mala_hf.bootstrap import paired_difference
from mala_hf.implementations import Implementation, implementations_of
from mala_hf.ruler.evaluation import record
from mala_hf.ruler.prompts import Prompt
from mala_hf.ruler.summary import summarize

SDPA, MALA = Implementation("sdpa"), Implementation("mala", 1.0)


def prompts() -> list[Prompt]:
    found = []
    for length in (1024, 2048):
        for index in range(2):
            found.append(Prompt(length, "niah_multivalue", index, "", (), ("one", "two"), (0.05 + index / 2, 0.99)))
            found.append(Prompt(length, "qa_1", index, "", (), ("Anne", "Anne Elliot")))
    return found


def answers() -> list[dict]:
    """Full attention knows all but the second needle of sample 1; MALA also misses everything at 2048 in niah."""
    found = []
    for prompt in prompts():
        full = "Anne." if prompt.task == "qa_1" else "one" if prompt.index else "one two"
        mala = "nothing" if (prompt.task, prompt.length) == ("niah_multivalue", 2048) else full
        found += [record(prompt, SDPA, full, 3), record(prompt, MALA, mala, 3)]
    return found


@pytest.fixture(scope="module")
def result() -> dict:
    shuffled = answers()
    random.Random(0).shuffle(shuffled)
    return summarize(prompts(), shuffled, [SDPA, MALA])


def test_tasks_have_rulers_scores_in_the_order_of_the_tasks(result):
    rows = [(row["implementation"], row["length"], row["task"], row["score"]) for row in result["tasks"]]
    assert rows == [
        ("sdpa", 1024, "niah_multivalue", 75.0),
        ("sdpa", 1024, "qa_1", 100.0),
        ("sdpa", 2048, "niah_multivalue", 75.0),
        ("sdpa", 2048, "qa_1", 100.0),
        ("mala", 1024, "niah_multivalue", 75.0),
        ("mala", 1024, "qa_1", 100.0),
        ("mala", 2048, "niah_multivalue", 0.0),
        ("mala", 2048, "qa_1", 100.0),
    ]
    assert {row["samples"] for row in result["tasks"]} == {2}


def test_a_length_is_the_mean_of_its_tasks_compared_sample_by_sample(result):
    rows = {(row["implementation"], row["length"]): row for row in result["lengths"]}
    assert {key: row["score"] for key, row in rows.items()} == {
        ("sdpa", 1024): 87.5,
        ("sdpa", 2048): 87.5,
        ("sdpa", None): 87.5,
        ("mala", 1024): 87.5,
        ("mala", 2048): 50.0,
        ("mala", None): 68.75,
    }
    assert "difference" not in rows["sdpa", 2048]
    assert rows["mala", 1024]["difference"] == {"mean": 0, "low": 0, "high": 0, "units": 4}
    # of the resamples of (-100, -50) a quarter each has only one of them
    assert rows["mala", 2048]["difference"] == {"mean": -37.5, "low": -50, "high": -25, "units": 4}
    assert rows["mala", None]["difference"]["mean"] == pytest.approx(-18.75)
    assert [rows["mala", length]["same_answers"] for length in (1024, 2048, None)] == [1, 0.5, 0.75]


def test_needles_are_counted_where_they_lie(result):
    rows = {(row["implementation"], row["length"], row["depth"][0]): row for row in result["needles"]}
    assert {key[2]: (row["needles"], row["found"]) for key, row in rows.items() if key[:2] == ("sdpa", 1024)} == {
        0.0: (1, 1.0),
        0.5: (1, 1.0),
        0.9: (2, 0.5),
    }
    assert all(row["found"] == 0 for key, row in rows.items() if key[:2] == ("mala", 2048))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = random.Random(5)
    covered = 0
    for seed in range(100):
        found = paired_difference([[rng.gauss(1, 2) for _ in range(50)]], seed=seed)
        covered += found.low <= 1 <= found.high
    assert 88 <= covered <= 100


def test_the_interval_narrows_with_the_square_root_of_the_samples():
    rng = random.Random(6)
    few, many = ([rng.gauss(0, 1) for _ in range(size)] for size in (100, 2500))
    widths = [found.high - found.low for found in (paired_difference([few]), paired_difference([many]))]
    assert widths[0] / widths[1] == pytest.approx(5, rel=0.25)


def test_units_count_by_their_weights_and_equal_pairs_leave_no_doubt():
    assert paired_difference([[1.0, 4.0]], [[3, 1]]).mean == 1.75
    same = paired_difference([[0.0] * 9])
    assert (same.mean, same.low, same.high) == (0, 0, 0)


def test_a_single_unit_has_no_interval_and_none_at_all_no_difference():
    alone = paired_difference([[2.0], [4.0]])
    assert (alone.mean, alone.low, alone.units) == (3, None, 2)
    for nothing in ([], [[1.0], []]):
        with pytest.raises(ValueError, match="nothing to compare"):
            paired_difference(nothing)


def test_mala_appears_once_per_tau_and_nothing_twice():
    found = implementations_of(["mala", "sdpa"], [1, 0.5])
    assert [one.label for one in found] == ["mala, tau 1", "mala, tau 0.5", "sdpa"]
    for names, taus, message in (
        ([], [1], "no attention implementation"),
        (["mala"], [], "at least one tau"),
        (["mala"], [-1], "finite number >= 0"),
        (["mala"], [1, 1.0], "each implementation once"),
    ):
        with pytest.raises(ValueError, match=message):
            implementations_of(names, taus)

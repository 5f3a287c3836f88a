# SPDX-License-Identifier: Apache-2.0
"""The stored perplexity and RULER of a real model: their intervals follow from what is stored, and the pages claim what they show."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest

from mala_hf.bootstrap import paired_difference
from mala_hf.cli import build_parser
from mala_hf.implementations import Implementation
from mala_hf.ruler.answer_store import AnswerStore
from mala_hf.ruler.evaluation import record
from mala_hf.ruler.prompts import Prompt
from mala_hf.ruler.sample_file import NAME, write_samples
from mala_hf.ruler.summary import summarize

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

import evaluation_figures
import evaluation_tables
import store_results
from stored_results import ROOT, as_text, results

PERPLEXITY = results("perplexity_smollm2_h200")["rows"]
RULER = results("ruler_smollm2_h200")
TAUS = [0.1, 1.0, 10.0, 100.0]
LENGTHS = {"perplexity": [512, 1024, 2048, 4096, 8192], "ruler": [1024, 2048, 4096, 8192]}


def interval(row: dict) -> tuple[float, float]:
    return row["difference"]["low"], row["difference"]["high"]


def at(rows: list[dict], tau: float | None) -> list[dict]:
    return [row for row in rows if row["tau"] == tau]


def test_every_length_and_tau_is_there():
    perplexities = [(row["length"], row["implementation"], row["tau"]) for row in PERPLEXITY]
    scores = [(row["length"], row["implementation"], row["tau"]) for row in RULER["lengths"]]
    attentions = [("sdpa", None), *(("mala", tau) for tau in TAUS)]
    assert perplexities == [(length, *one) for length in LENGTHS["perplexity"] for one in attentions]
    assert sorted(scores, key=str) == sorted(
        [(length, *one) for length in [*LENGTHS["ruler"], None] for one in attentions], key=str
    )


@pytest.mark.parametrize("length", LENGTHS["perplexity"])
def test_perplexities_and_their_intervals_follow_from_the_windows(length):
    full, *others = [row for row in PERPLEXITY if row["length"] == length]
    for row in (full, *others):
        total = sum(nll * tokens for nll, tokens in zip(row["window_nll"], row["window_tokens"], strict=True))
        assert row["nll"] == pytest.approx(total / row["tokens"], rel=1e-12)
        assert row["ppl"] == pytest.approx(math.exp(row["nll"]), rel=1e-12)
        assert row["window_tokens"] == full["window_tokens"]
    for row in others:
        differences = [ours - theirs for ours, theirs in zip(row["window_nll"], full["window_nll"], strict=True)]
        again = paired_difference([differences], [row["window_tokens"]])
        assert (again.mean, again.low, again.high) == pytest.approx(
            (row["difference"]["mean"], *interval(row)), rel=1e-6, abs=1e-12
        )
        assert evaluation_tables.perplexity_change(row) == pytest.approx(row["ppl"] - full["ppl"], abs=1e-9)


@pytest.mark.parametrize("tau", TAUS)
def test_rulers_scores_and_intervals_follow_from_the_samples(tau):
    ours, theirs = at(RULER["tasks"], tau), at(RULER["tasks"], None)
    for row in RULER["lengths"]:
        if row["tau"] != tau:
            continue
        pairs = [
            (one["sample_scores"], other["sample_scores"])
            for one, other in zip(ours, theirs, strict=True)
            if row["length"] in (None, one["length"])
        ]
        again = paired_difference([[a - b for a, b in zip(one, other, strict=True)] for one, other in pairs])
        assert (again.mean, again.low, again.high, again.units) == pytest.approx(
            (row["difference"]["mean"], *interval(row), row["difference"]["units"]), rel=1e-6, abs=1e-9
        )
        scores = [one["score"] for one in ours if row["length"] in (None, one["length"])]
        assert row["score"] == pytest.approx(sum(scores) / len(scores))


def test_all_attentions_answered_the_same_prompts():
    groups = [(one["length"], one["task"], len(one["digests"])) for one in RULER["prompts"]]
    assert RULER["samples"] == sum(count for *_, count in groups)
    for tau in (None, *TAUS):
        rows = [(row["length"], row["task"], len(row["sample_scores"])) for row in at(RULER["tasks"], tau)]
        assert sorted(rows) == sorted(groups)


def test_the_difference_at_tau_1_is_at_most_a_thousandth_in_nats_and_in_perplexity():
    for row in at(PERPLEXITY, 1.0):
        assert abs(row["difference"]["mean"]) < max(map(abs, interval(row))) < 0.001
        assert abs(evaluation_tables.perplexity_change(row)) < 0.001
        full = row["ppl"] - evaluation_tables.perplexity_change(row)
        assert max(abs(full * math.expm1(end)) for end in interval(row)) < 0.001


def test_the_controls_move_perplexity_at_every_length():
    for ten, hundred in zip(at(PERPLEXITY, 10.0), at(PERPLEXITY, 100.0), strict=True):
        assert interval(ten)[0] > 0.0005
        assert interval(hundred)[0] > 0.01
        assert 15 < hundred["difference"]["mean"] / ten["difference"]["mean"] < 25
        assert hundred["kl_mean"] > 10 * ten["kl_mean"] > 0.001


def test_what_the_page_says_about_ruler():
    by_tau = {tau: at(RULER["lengths"], tau) for tau in TAUS}
    for tau in (0.1, 1.0):
        assert all(interval(row)[0] <= 0 <= interval(row)[1] for row in by_tau[tau])
    apart = [
        (tau, row["length"])
        for tau, rows in by_tau.items()
        for row in rows
        if not interval(row)[0] <= 0 <= interval(row)[1]
    ]
    assert apart == [(10.0, 1024), (100.0, 2048), (100.0, 4096)]
    same = {tau: next(row["same_answers"] for row in rows if row["length"] is None) for tau, rows in by_tau.items()}
    assert 0.7 < same[1.0] <= same[0.1] < 0.8
    assert same[100.0] < 0.4
    assert min(row["needles"] for row in RULER["needles"]) == 4


def test_bfloat16_moves_full_attention_as_much_as_tau_1():
    rows = results("perplexity_bfloat16_smollm2_h200")["rows"]
    nll = {(row["implementation"], row["tau"], row["length"]): row["nll"] for row in rows}

    def largest(*one):
        return max(abs(nll[(*one, length)] - nll["sdpa", None, length]) for length in (2048, 4096, 8192))

    assert max(largest("eager", None), largest("mala", 0.0)) > largest("mala", 1.0)
    assert largest("mala", 100.0) > 10 * largest("mala", 0.0)


def test_the_stored_commands_are_ones_that_the_commands_take():
    for name in ("perplexity_smollm2_h200", "ruler_smollm2_h200"):
        program, *arguments = results(name)["command"].split()
        assert program == "mala-hf"
        options = build_parser().parse_args(arguments)
        assert options.implementations == ["sdpa", "mala"]
        assert options.taus == TAUS


def test_no_result_names_a_place_of_the_machine():
    for path in (ROOT / "results").glob("*.json"):
        assert not re.search(r'"/|/tmp|/work|/home|/root', path.read_text("utf-8")), path.name


def test_readme_shows_five_attentions():
    readme = (ROOT / "README.md").read_text("utf-8")
    rows = readme.split("<!-- table: real_model -->\n")[1].split("<!-- end -->")[0].splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["sdpa", *(f"tau {tau:g}" for tau in TAUS)]


def test_a_bar_that_holds_zero_goes_through_zero():
    def y(value: float) -> float:
        return 100 - 10 * abs(value)

    path = evaluation_figures.mark(5, {"mean": -1.0, "low": -3.0, "high": 2.0}, y, "red")
    assert 'd="M5.0 70.0V100.0"' in path
    assert 'cy="90.0" r="4" fill="white"' in path
    assert 'V90.0"' in evaluation_figures.mark(5, {"mean": 2.0, "low": 1.0, "high": 3.0}, y, "red")


def test_storing_leaves_out_samples_that_not_all_answered_as_they_are_now(tmp_path, monkeypatch):
    sdpa, mala = Implementation("sdpa"), Implementation("mala", 1.0)
    prompts = [Prompt(1024, "qa_1", index, "secret text", (index,), ("Anne",)) for index in range(4)]
    answers = [record(one, attention, "Anne.", 3) for one in prompts for attention in (sdpa, mala)]
    del answers[1]  # sample 0 has no answer of MALA
    answers[2]["prompt"] = "another"  # nor has sample 1 one to its prompt
    write_samples(tmp_path / NAME, {"seed": 42}, {(1024, "qa_1"): prompts})
    AnswerStore(tmp_path, {}).append(answers)
    AnswerStore(tmp_path, {}).merge()
    ran = {"model": "/somewhere/model"} | summarize(
        prompts, [record(one, a, "", 1) for one in prompts for a in (sdpa, mala)], [sdpa, mala]
    )
    (tmp_path / "ruler.json").write_text(json.dumps(ran))
    arguments = ["ruler", str(tmp_path), str(tmp_path / "stored.json"), "--model", "NAME", "--command", "mala-hf ruler"]
    monkeypatch.setattr(sys, "argv", ["store_results.py", *arguments])
    store_results.main()
    text = (tmp_path / "stored.json").read_text()
    stored = json.loads(text)
    assert (stored["model"], stored["command"], stored["samples"]) == ("NAME", "mala-hf ruler", 2)
    assert [row["sample_scores"] for row in stored["tasks"]] == [[100.0, 100.0], [100.0, 100.0]]
    assert stored["prompts"] == [{"length": 1024, "task": "qa_1", "digests": [one.digest for one in prompts[2:]]}]
    assert "secret" not in text
    assert "somewhere" not in text


def test_stored_text_is_the_same_data_a_row_a_line():
    found = {"one": 1, "none": [], "list": [1, 2], "rows": [{"a": [1]}, {"a": [2]}]}
    assert json.loads(as_text(found)) == found
    assert as_text(found).splitlines()[4:7] == [' "rows": [', '  {"a": [1]},', '  {"a": [2]}']

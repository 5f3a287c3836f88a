# SPDX-License-Identifier: Apache-2.0
"""The studies' scripts run at their small sizes on a CPU, go on where they were stopped, and refuse what was measured otherwise."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

import study_allocation
import study_command
import study_fidelity
import study_open_questions

from mala_hf.studies.row_store import RowStore

SCRIPTS = {"allocation": study_allocation, "fidelity": study_fidelity, "open_questions": study_open_questions}

pytestmark = pytest.mark.transformers


@pytest.fixture
def run(place, tmp_path, monkeypatch):
    """Run a script at its small size on the tiny checkpoint; return its result."""

    def run_script(name: str, *more: str, is_whole: bool = True) -> dict:
        output = tmp_path / f"{name}.json"
        options = ["--small", "--model", str(place / "tiny"), "--text", str(place / "text.txt"), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", [name, *options, "--output", str(output), *more])
        SCRIPTS[name].main()
        text = output.read_text("utf-8")
        assert not re.search(r'"/|/tmp|/root|/home', text)
        assert is_whole or json.loads(text)["not_run"]
        assert not (is_whole and output.with_suffix(".rows.jsonl").exists())
        return json.loads(text)

    return run_script


def test_allocation(run):
    found = run("allocation")
    assert found["model"] == "tiny"
    assert found["text"] == "text.txt"
    assert found["tile"] == [16, 32]
    work = {(row["tau"], row["key_slots_per_query"]) for row in found["rows"]}
    assert len(found["rows"]) == 8
    assert len(work) == 2  # the same for all allocations of a tau


def test_fidelity_and_a_length_under_yarn(run, monkeypatch):
    monkeypatch.setattr(study_fidelity, "positions_of", lambda name: 256)
    found = run("fidelity", "--name", "other")
    assert found["model"] == "other"
    full, mala = found["rows"][:2]
    places = [(row["length"], row["window"], row["yarn"]) for row in found["rows"][::2]]
    assert places == [(256, 0, None), (256, 1, None), (512, 0, 2.0)]
    assert (full["tau"], full["work_fraction"], full["omitted_mass_mean"]) == (0.0, 1.0, 0.0)
    assert full["output_error_mean"] < 1e-5 < mala["omitted_mass_mean"]
    assert mala["backward_slots_per_query"] <= mala["key_slots_per_query"] < full["key_slots_per_query"]
    assert mala["flops_fraction_saved"] <= mala["flops_fraction"] < 1 == full["flops_fraction"]
    # half of a forward's FLOPs are scores, and in the state-only backward 1 of 5 products is
    forward, backward = (mala[name] / 160 for name in ("key_slots_per_query", "backward_slots_per_query"))
    assert mala["flops_fraction"] == pytest.approx((1 + forward + 1 + 4 * backward) / 7)


def test_open_questions(run):
    found = run("open_questions")
    rows = [row for row in found["rows"] if row["variant"] != "decode"]
    by_key = {(row["variant"], row["setting"]): row for row in rows}
    assert len(by_key) == len(rows)
    for row in rows:
        assert 0 <= row["omitted_mass_mean"] <= row["omitted_mass_bound_mean"] + 1e-6
        assert row["kl_mean"] <= row["kl_max"]
    rule = [by_key["rule", tau] for tau in (1.0, 10.0, 100.0)]
    assert 1 > rule[0]["work_fraction"] > rule[1]["work_fraction"] > rule[2]["work_fraction"]
    assert 0 < rule[0]["kl_mean"] < rule[2]["kl_mean"]
    assert by_key["8 keys", 1.0]["work_fraction"] < by_key["16 keys", 1.0]["work_fraction"] < rule[0]["work_fraction"]
    decode = [row for row in found["rows"] if row["variant"] == "decode"]
    assert {(row["form"], row["splits"]) for row in decode} == {
        ("single", 0),
        ("two_pass", 0),
        ("split", 4),
        ("split", 16),
    }


def test_a_run_that_was_stopped_goes_on(run, tmp_path, monkeypatch):
    measured = []
    original = study_fidelity.fidelity_rows

    def stops_after_one(steps, taus):
        if measured:
            raise KeyboardInterrupt
        measured.append(len(steps))
        return original(steps, taus)

    monkeypatch.setattr(study_fidelity, "fidelity_rows", stops_after_one)
    with pytest.raises(KeyboardInterrupt):
        run("fidelity")
    rows = tmp_path / "fidelity.rows.jsonl"
    assert len(rows.read_text().splitlines()) == 3
    with rows.open("a") as stream:
        stream.write('{"length": 5')  # cut off
    with pytest.raises(SystemExit, match="other settings"):
        run("fidelity", "--tokens", "1024")
    monkeypatch.setattr(study_fidelity, "fidelity_rows", original)
    found = run("fidelity")
    assert [(row["length"], row["window"]) for row in found["rows"][::2]] == [(256, 0), (256, 1), (512, 0)]


def test_a_run_whose_budget_ends_writes_what_it_has_and_names_the_rest(run, tmp_path, monkeypatch):
    budgets = iter([True, False, False])
    allows = study_command.Budget.allows
    monkeypatch.setattr(
        study_command.Budget,
        "allows",
        lambda self, part, seconds=0.0: allows(self, part, 0.0 if next(budgets) else 1e9),
    )
    found = run("fidelity", "--budget-seconds", "1e6", is_whole=False)
    assert [(row["length"], row["window"]) for row in found["rows"][::2]] == [(256, 0)]
    assert found["not_run"] == ["256 tokens, float32, window 1", "512 tokens, float32, window 0"]
    monkeypatch.undo()
    found = run("fidelity")
    assert [(row["length"], row["window"]) for row in found["rows"][::2]] == [(256, 0), (256, 1), (512, 0)]
    assert found["not_run"] == []


def test_no_part_begins_when_the_budget_is_spent(run):
    found = run("open_questions", "--budget-seconds", "0", is_whole=False)
    assert found["rows"] == []
    assert found["not_run"][:2] == ["window 0, rule 1", "window 0, rule 10"]
    assert found["not_run"][-2:] == ["window 0, decode", "taus by layer and head"]


def test_rows_come_back_as_json_has_them(tmp_path):
    store = RowStore(tmp_path / "rows.jsonl", {"a": 1})
    store.append([{"length": 1, "tile": (2, 3)}])
    assert store.has(length=1, tile=[2, 3])
    assert not store.has(length=2)
    assert RowStore(tmp_path / "rows.jsonl", {"a": 1}).rows == store.rows == [{"length": 1, "tile": [2, 3]}]
    (tmp_path / "rows.jsonl").write_text("no JSON\n")
    with pytest.raises(ValueError, match="damaged"):
        RowStore(tmp_path / "rows.jsonl", {"a": 1})

# SPDX-License-Identifier: Apache-2.0
"""``study_model.py``: RULER at both lengths on a tiny model, tasks on local data, and a clear word where data is missing."""

import functools
import json
import sys

import pytest
from lm_eval import tasks
from lm_eval_inputs import save_checkpoint
from project import ROOT

sys.path.append(str(ROOT / "scripts"))

import study_model
import study_ruler
import task_data
import training_study_tables

pytestmark = pytest.mark.xdist_group("study_model")

# it reads the settings of every task that there is, which takes ten seconds
once = functools.cache(tasks.TaskManager)

ARC = """\
---
configs:
- config_name: ARC-Easy
  data_files:
  - {split: train, path: easy.jsonl}
  - {split: validation, path: easy.jsonl}
  - {split: test, path: easy.jsonl}
---
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny checkpoint, and a folder with a copy of a data set as the hub has it, of six questions."""
    folder = tmp_path_factory.mktemp("study6")
    save_checkpoint(folder / "tiny")
    copy = folder / "data" / "allenai" / "ai2_arc"
    copy.mkdir(parents=True)
    (copy / "README.md").write_text(ARC, "utf-8")
    rows = [
        {"id": str(n), "question": f"What is {n} + 1?", "answerKey": "AB"[n % 2],
         "choices": {"text": [str(n + 1 + n % 2), str(n + 1 + (n + 1) % 2)], "label": ["A", "B"]}}
        for n in range(6)
    ]  # fmt: skip
    (copy / "easy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder


@pytest.fixture(autouse=True)
def tasks_are_listed_once(monkeypatch):
    monkeypatch.setattr(tasks, "TaskManager", once)


def arguments(place, output, *more):
    common = ["--model", place / "tiny", "--device", "cpu", "--output", output, "--commit", "abc"]
    return [*map(str, [*common, *more])]


def test_local_data_gives_knowledge_and_reasoning_a_score(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(task_data, "hub_answers", lambda: False)
    output = tmp_path / "model.json"
    options = ["--knowledge", "arc_easy", "--reasoning", "--ruler-tasks", "--task-data", place / "data"]
    study_model.main(arguments(place, output, *options))
    found = json.loads(output.read_text("utf-8"))
    assert [(row["part"], row["task"], row["implementation"], row["tau"]) for row in found["rows"]] == [
        ("knowledge", "arc_easy", "sdpa", None),
        ("knowledge", "arc_easy", "mala", 1.0),
    ]
    for row in found["rows"]:
        assert row["metric"] == "acc_norm"
        assert row["examples"] == 6
        assert row["score"] in [pytest.approx(100 * n / 6) for n in range(7)]
    assert found["not_run"] == []
    assert found["model"] == "tiny"
    assert str(place) not in output.read_text("utf-8")
    last = capsys.readouterr().out.splitlines()
    rows = training_study_tables.model_rows(found)
    assert rows[1] == ["tiny, mala, tau 1", f"{found['rows'][1]['score']:.2f}", "", "", ""]
    assert last[-1].split() == ["mala,", "tau", "1", f"{found['rows'][1]['score']:.2f}"]


def test_data_that_is_nowhere_is_named(place, tmp_path, monkeypatch):
    monkeypatch.setattr(task_data, "hub_answers", lambda: False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    tasks = ["--knowledge", "arc_easy", "mmlu", "--reasoning", "gsm8k", "--task-data", place / "data"]
    with pytest.raises(SystemExit) as raised:
        study_model.main(arguments(place, tmp_path / "model.json", *tasks))
    message = str(raised.value)
    assert "mmlu: cais/mmlu" in message
    assert "gsm8k: openai/gsm8k" in message
    assert "arc_easy" not in message
    assert "hf download --repo-type dataset" in message
    assert not (tmp_path / "model.json").exists()
    with pytest.raises(SystemExit, match="no task 'no_such_task'"):
        study_model.main(arguments(place, tmp_path / "model.json", "--knowledge", "no_such_task", "--reasoning"))


def test_ruler_runs_at_native_length_and_under_yarn_and_goes_on(place, tmp_path):
    output = tmp_path / "model.json"
    options = ["--small", "--knowledge", "--reasoning", "--ruler-samples", 1]
    first = arguments(place, output, *options, "--budget-seconds", 0)
    study_model.main(first)
    assert json.loads(output.read_text("utf-8"))["not_run"] == ["ruler_native", "ruler_yarn"]
    study_model.main(arguments(place, output, *options, "--prepare"))
    study_model.main(arguments(place, output, *options))
    found = json.loads(output.read_text("utf-8"))
    assert found["not_run"] == []
    places = [(row["part"], row["length"], row["implementation"]) for row in found["rows"]]
    assert places == [
        (p, n, one) for p, n in (("ruler_native", 1024), ("ruler_yarn", 2048)) for one in ("sdpa", "mala")
    ]
    for row in found["rows"]:
        assert set(row["tasks"]) == {"niah_single_1", "fwe"}
        assert 0 <= row["score"] <= 100
        assert ("difference" in row) == (row["implementation"] == "mala")


def test_a_part_that_runs_out_of_time_keeps_its_answers(place, tmp_path, capsys):
    options = ["--small", "--knowledge", "--reasoning", "--batch-size", 1, "--state", tmp_path / "state"]
    parsed = study_model.parsed(arguments(place, tmp_path / "model.json", *options))
    answers = tmp_path / "state" / study_ruler.NATIVE
    with pytest.raises(study_ruler.OutOfTime):
        list(study_ruler.ruler_rows(parsed, study_ruler.NATIVE, end=0.0))
    assert "ruler_native: 1 of 4 answers" in capsys.readouterr().out
    stored = (answers / "answers.part-0.jsonl").read_text("utf-8").splitlines()
    assert len(stored) == 2  # what made them, and one answer
    rows = list(study_ruler.ruler_rows(parsed, study_ruler.NATIVE, end=float("inf")))
    assert [set(row["tasks"]) for row in rows] == 2 * [{"niah_single_1", "fwe"}]
    whole = (answers / "answers.jsonl").read_text("utf-8").splitlines()
    assert len(whole) == 5
    assert stored[1] in whole


def test_the_headline_is_normalised_accuracy_where_there_is_one():
    assert task_data.headline({"alias": "x", "acc,none": 0.2, "acc_norm,none": 0.3}) == ("acc_norm", 0.3)
    assert task_data.headline({"exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": 0.1}) == (
        "exact_match",
        0.5,
    )
    with pytest.raises(ValueError, match="no metric"):
        task_data.headline({"perplexity,none": 3.0})

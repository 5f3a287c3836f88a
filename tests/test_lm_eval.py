# SPDX-License-Identifier: Apache-2.0
"""``mala-hf lm-eval`` is lm_eval's own command, with MALA registered and our tasks beside its own."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from lm_eval_inputs import save_checkpoint, write_task

from mala_hf import registration
from mala_hf.cli import main
from mala_hf.extras import how_to_install
from mala_hf.lm_eval.launcher import CONFIGS, with_our_tasks

OURS = ["--include_path", str(CONFIGS)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--tasks", "x"], ["run", *OURS, "--tasks", "x"]),
        (["ls", "tasks"], ["ls", *OURS, "tasks"]),
        (["--tasks", "x", "--include_path", "y"], [*OURS, "--tasks", "x", "--include_path", "y"]),
        ([], []),
        (["run"], ["run"]),
        (["--help"], ["--help"]),
        (["run", "-h"], ["run", "-h"]),
        (["run", "--config", "x.yaml"], ["run", "--config", "x.yaml"]),
        (["run", "--config=x.yaml"], ["run", "--config=x.yaml"]),
        (["-Cx.yaml", "--tasks", "x"], ["-Cx.yaml", "--tasks", "x"]),
        (["run", "--confirm_run_unsafe_code"], ["run", *OURS, "--confirm_run_unsafe_code"]),
    ],
    ids=lambda value: " ".join(value) if value and str(CONFIGS) not in value else None,
)
def test_our_tasks_come_first_and_a_folder_or_configuration_of_the_user_wins(arguments, expected):
    assert with_our_tasks(arguments) == expected


def test_without_lm_eval_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr("mala_hf.extras.find_spec", lambda name: None)
    assert main(["lm-eval", "ls", "tasks"]) == 1
    assert capsys.readouterr().err == f"mala-hf: error: lm_eval not installed: {how_to_install('eval')}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["run", "--help"]], ids=" ".join)
def test_help_without_lm_eval_says_what_the_command_is_and_what_to_install(arguments, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["lm-eval", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: mala-hf lm-eval ")
    assert how_to_install("eval") in printed.out
    assert printed.err == ""


@pytest.fixture
def lm_eval(monkeypatch):
    """lm_eval without its own tasks: it reads thousands of files to list them."""
    tasks = pytest.importorskip("lm_eval.tasks", reason="lm_eval is not installed")
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("checkpoint")))


def read_results(output: Path, task: str) -> tuple[dict, list[dict]]:
    (results,) = output.rglob("results_*.json")
    (samples,) = output.rglob(f"samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text("utf-8").splitlines()]
    return json.loads(results.read_text("utf-8"))["results"][task], sorted(lines, key=lambda line: line["doc_id"])


@pytest.mark.parametrize(("task", "metric"), [("tiny_answer", "same_start"), ("tiny_choice", "acc")])
def test_an_offline_task_runs_with_mala_and_padding_changes_nothing(
    task, metric, lm_eval, checkpoint, tmp_path, monkeypatch, capsys
):
    calls = []

    def counted(module, query, *arguments, **options):
        calls.append(query.shape[0])
        return original(module, query, *arguments, **options)

    original = registration.mala_attention_forward
    monkeypatch.setattr(registration, "mala_attention_forward", counted)
    folder = write_task(tmp_path, ["b", "a", "b", "b", "a"])
    found = []
    for batch in ("1", "3"):
        arguments = ["--model", "hf", "--model_args", f"pretrained={checkpoint},attn_implementation=mala"]
        arguments += ["--tasks", task, "--include_path", str(folder), "--device", "cpu", "--batch_size", batch]
        output = tmp_path / batch
        assert main(["lm-eval", "run", *arguments, "--output_path", str(output), "--log_samples"]) == 0
        assert f"|{task}" in capsys.readouterr().out
        found.append(read_results(output, task))
    monkeypatch.undo()
    registration.register()

    (alone, alone_samples), (together, samples) = found
    assert {1, 3} <= {*calls}
    assert together[f"{metric},none"] == alone[f"{metric},none"]
    if task == "tiny_answer":
        answers = [sample["resps"] for sample in samples]
        assert answers == [sample["resps"] for sample in alone_samples]
        assert len({json.dumps(answer) for answer in answers}) > 3
    else:
        scores = [[float(pair[0][0]) for pair in sample["resps"]] for sample in samples]
        assert scores == [
            pytest.approx([float(pair[0][0]) for pair in sample["resps"]], abs=1e-4) for sample in alone_samples
        ]


def test_our_tasks_are_found_and_errors_take_one_line(lm_eval, checkpoint, capsys):
    before = list(sys.argv)
    arguments = ["lm-eval", "--model", "hf", "--model_args", f"pretrained={checkpoint}", "--device", "cpu"]
    assert main([*arguments, "--tasks", "mala_ruler_none"]) == 1
    assert capsys.readouterr().err.endswith("mala-hf: error: Tasks not found: mala_ruler_none\n")
    with pytest.raises(ValueError, match="Tasks not found: mala_ruler_none"):
        main([*arguments, "--traceback", "--tasks", "mala_ruler_none"])
    assert main([*arguments, "--tasks", "mala_ruler_vt", "--metadata", "max_seq_lengths=[560]"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("mala-hf: error: vt")
    assert sys.argv == before


def test_a_model_that_is_none_is_named_with_what_it_lacks_but_a_wrong_task_comes_first(lm_eval, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    folder = write_task(tmp_path, ["b", "a"])
    arguments = ["lm-eval", "run", "--model", "hf", "--device", "cpu", "--include_path", str(folder)]
    arguments += ["--model_args", f"pretrained={tmp_path / 'empty'},attn_implementation=mala", "--tasks"]
    assert main([*arguments, "tiny_answer"]) == 1
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith(f"mala-hf: error: no config.json in {tmp_path / 'empty'}")
    )
    assert main([*arguments, "none"]) == 1
    assert capsys.readouterr().err.endswith("mala-hf: error: Tasks not found: none\n")


def test_its_own_help_is_shown(lm_eval, capsys):
    with pytest.raises(SystemExit) as end:
        main(["lm-eval", "run", "--help"])
    assert end.value.code == 0
    assert "--include_path" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["lm-eval", "run", "--no_such_option"])
    assert end.value.code == 2

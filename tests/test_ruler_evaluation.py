# SPDX-License-Identifier: Apache-2.0
"""RULER from samples to scores on a tiny checkpoint: the same answers in any batch, after a kill, and on two processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_model import save_tiny_checkpoint

from mala_hf.cli import main
from mala_hf.ruler import evaluation

TASKS = ["fwe", "niah_single_1"]
SAMPLES = 3
ANSWERS = len(TASKS) * SAMPLES * 3  # sdpa, and mala with two taus


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), positions=2048, layers=1))


@pytest.fixture(scope="module")
def arguments(checkpoint) -> list[str]:
    here = ["ruler", "--model", checkpoint, "--device", "cpu", "--corpora", "builtin", "--quiet"]
    return [*here, "--tasks", *TASKS, "--lengths", "1024", "--samples", str(SAMPLES), "--taus", "1", "1000"]


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory) -> Path:
    """The folder of one process that ran to its end with batches of four."""
    folder = tmp_path_factory.mktemp("whole")
    assert main([*arguments, "--batch-size", "4", "--output", str(folder)]) == 0
    return folder


def answers_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text("utf-8").splitlines()[1:]]


def start(arguments: list[str], **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE, text=True, **options)


def test_the_table_compares_attentions_on_the_same_samples(whole, arguments, capsys):
    assert main([*arguments, "--output", str(whole)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "1024 tokens, 3 samples a task"
    assert lines[3].split("  ")[-1].strip() == "mala, tau 1000"
    assert [line.split()[0] for line in lines[4:9]] == ["niah_single_1", "fwe", "mean", "difference", "same"]
    assert (whole / "needles.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((whole / "ruler.json").read_text("utf-8"))
    assert (result["seed"], result["chat_template"], result["corpora"]["source"]) == (42, False, "builtin")
    assert len(result["tasks"]) == len(TASKS) * 3
    assert sum(row["needles"] for row in result["needles"] if row["implementation"] == "sdpa") == SAMPLES
    same = {row["tau"]: row.get("same_answers") for row in result["lengths"] if row["length"]}
    assert same[1.0] > same[1000.0]


def test_answers_do_not_depend_on_the_batch_size(whole, arguments, tmp_path):
    assert main([*arguments, "--batch-size", "1", "--output", str(tmp_path)]) == 0
    assert answers_of(tmp_path) == answers_of(whole)
    assert (tmp_path / "samples.jsonl.gz").read_bytes() == (whole / "samples.jsonl.gz").read_bytes()
    answers = answers_of(whole)
    assert len(answers) == ANSWERS
    assert len({answer["answer"] for answer in answers}) > SAMPLES


def test_a_killed_run_goes_on_where_it_stopped(whole, arguments, tmp_path, monkeypatch):
    command = ["-m", "mala_hf", *arguments, "--batch-size", "2", "--output", str(tmp_path)]
    part = tmp_path / "answers.part-0.jsonl"
    process = start(command)
    while process.poll() is None and not (part.exists() and part.read_bytes().count(b"\n") > 4):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    finished = part.read_bytes()
    with part.open("ab") as stream:  # a line that the disk did not get whole
        stream.write(b'{"length": 1024, "ta')
    asked = []

    def counting(model, prompts, *rest, **options):
        asked.extend(prompts)
        return greedy_answers(model, prompts, *rest, **options)

    greedy_answers = evaluation.greedy_answers
    monkeypatch.setattr(evaluation, "greedy_answers", counting)
    assert main(command[2:]) == 0
    assert len(asked) == ANSWERS - (finished.count(b"\n") - 1)
    assert 0 < len(asked) < ANSWERS
    assert set(finished.splitlines()) <= set((tmp_path / "answers.jsonl").read_bytes().splitlines())
    assert answers_of(tmp_path) == answers_of(whole)
    assert not part.exists()


def test_two_processes_answer_as_one(whole, arguments, tmp_path):
    pytest.importorskip("accelerate")
    # what accelerate launch starts on several GPUs; on CPUs it starts one process
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    process = start(
        [*launcher, "-m", "mala_hf", *arguments, "--batch-size", "2", "--json", "--output", str(tmp_path)],
        stdout=subprocess.PIPE,
        env=environment,
    )
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert (tmp_path / "answers.jsonl").read_bytes() == (whole / "answers.jsonl").read_bytes()
    alone = json.loads((whole / "ruler.json").read_text("utf-8"))
    assert json.loads(out) == alone | {"processes": 2, "batch_size": 2, "device": json.loads(out)["device"]}
    assert list(tmp_path.glob("*part*")) == []


def test_each_process_takes_its_share(whole):
    """What the test above would not see: one process doing everything."""
    prompts = evaluation.prepare_samples(settings(whole), make_bar=no_bar, notice=print)
    finished = {key for prompt in prompts for key in evaluation.keys_of(prompt, settings(whole).implementations)}
    taken = []
    for rank in range(2):
        seen: list[int] = []
        bar = nullcontext(SimpleNamespace(update=seen.append))
        evaluation.answer_all(
            SimpleNamespace(generation_config=None),
            SimpleNamespace(eos_token_id=None),
            prompts,
            settings(whole),
            None,
            dict.fromkeys(finished),
            evaluation.Ranks(rank, 2),
            lambda *_, bar=bar: bar,
        )
        taken.append(sum(seen))
    assert taken == [4, 2]


def settings(folder: Path) -> evaluation.RulerSettings:
    model = json.loads((folder / "ruler.json").read_text("utf-8"))["model"]
    return evaluation.RulerSettings(
        folder, tuple(TASKS), (1024,), (evaluation.Implementation("sdpa"),), SAMPLES, batch_size=2, model=model
    )


def no_bar(*_):
    return nullcontext(SimpleNamespace(update=lambda n: None))


def test_prepared_samples_need_no_model(arguments, checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "load_model", None)
    assert main([*arguments, "--prepare", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"6 samples in {tmp_path}\n"
    assert main([*arguments, "--prepare", "--output", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"samples": 6, "output": str(tmp_path)}
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl.gz"]


def test_more_taus_are_added_to_what_is_there(whole, arguments, tmp_path, monkeypatch):
    for name in ("answers.jsonl", "samples.jsonl.gz"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    asked = []

    def one_token(model, prompts, budgets, **_):
        asked.extend(prompts)
        return [[65]] * len(prompts)

    monkeypatch.setattr(evaluation, "greedy_answers", one_token)
    assert main([*arguments, "--taus", "5", "1", "--output", str(tmp_path)]) == 0
    assert len(asked) == len(TASKS) * SAMPLES
    taus = [row["tau"] for row in json.loads((tmp_path / "ruler.json").read_text("utf-8"))["lengths"]]
    assert list(dict.fromkeys(taus)) == [None, 5, 1]
    assert len(answers_of(tmp_path)) == ANSWERS + len(TASKS) * SAMPLES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--tasks", "niah"], "unknown RULER task 'niah'"),
        (["--samples", "0"], "samples must be at least 1, got 0"),
        (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--lengths", "1024", "1024"], "each length once"),
        (["--lengths", "4096"], "4096 is more than the model's 2048 positions"),
        (["--lengths", "100"], "fwe does not fit in 100 tokens"),
        (["--chat-template", "on"], "no chat template"),
        (["--chat-template", "yes"], "auto, on, off, got 'yes'"),
        (["--corpora", "nowhere"], "a folder, got 'nowhere'"),
        (["--attn", "dense"], "dense"),
        (["--seed", "7", "--output", "WHOLE"], "have seed 42, not 7"),
        (["--dtype", "bfloat16", "--output", "WHOLE"], "made with dtype 'float32', not 'bfloat16'"),
        (["--output", "TORN"], "answers.jsonl, line 2 is no answer"),
        (["--output", "FOREIGN"], "has an answer to another prompt of niah_single_1 2 at 1024"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_failures_are_one_line(changes, message, arguments, whole, tmp_path, capsys):
    folders = {"WHOLE": str(whole)}
    lines = (whole / "answers.jsonl").read_text("utf-8").splitlines()
    for name, damaged in (("TORN", lines[1][:20]), ("FOREIGN", lines[-1].replace('"prompt": "', '"prompt": "0'))):
        folders[name] = str(tmp_path / name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "samples.jsonl.gz").write_bytes((whole / "samples.jsonl.gz").read_bytes())
        (tmp_path / name / "answers.jsonl").write_text(f"{lines[0]}\n{damaged}\n", "utf-8")
    changes = [folders.get(change, change) for change in changes]
    assert main([*arguments, "--output", str(tmp_path / "new"), *changes]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mala-hf: error:")]
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.parametrize(
    ("asked", "gpus", "expected"),
    [
        (None, True, "cuda:3"),
        ("cuda", True, "cuda:3"),
        ("cpu", True, "cpu"),
        ("cuda:1", True, "cuda:1"),
        (None, False, None),
    ],
)
def test_each_of_several_processes_has_a_gpu_of_its_own(asked, gpus, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus)
    assert evaluation.Ranks(11, 16, 3).device(asked) == expected
    assert evaluation.Ranks().device(asked) == asked

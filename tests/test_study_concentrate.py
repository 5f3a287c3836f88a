# SPDX-License-Identifier: Apache-2.0
"""``study_concentrate.py`` at a reduced size: prepared data, arms that share it, a budget that ends a run and a state that goes on."""

import json
import sys

import pytest
import torch
from project import ROOT
from tiny_model import save_tiny_checkpoint, tiny_llama

sys.path.append(str(ROOT / "scripts"))

import study_concentrate
import training_study_tables
from concentrate_plan import Arm
from log_scaled_queries import log_scale, log_scaled_queries
from study_data import read_data

pytestmark = pytest.mark.transformers

LENGTH = 128
RULER = ["--ruler-tasks", "fwe", "--ruler-length", 8 * LENGTH, "--ruler-samples", 2]
ARMS = ["start", "mala", "mala:weight=20,temperature=0.5", "mala:base=16"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A tiny checkpoint, and a folder of tokens of two texts and RULER samples that were prepared for it."""
    folder = tmp_path_factory.mktemp("study8")
    save_tiny_checkpoint(folder / "tiny", positions=8 * LENGTH)
    for name, words in (("train", "the quick brown fox jumps over a lazy dog"), ("held", "a lazy fox and a brown dog")):
        (folder / f"{name}.txt").write_text("".join(letter * 20 for letter in words) * 3, "utf-8")
    texts = ["--train-text", folder / "train.txt", "--held-out-text", folder / "held.txt"]
    call(["--prepare", "--data", folder / "data", "--model", folder / "tiny", *texts, *RULER])
    return folder


def call(arguments):
    options = study_concentrate.build_parser().parse_args([str(one) for one in arguments])
    if options.prepare:
        return study_concentrate.prepare(options)
    return study_concentrate.run_one(options, options.only)


def options_of(data, state, *more):
    sizes = ["--seqlen", LENGTH, "--batch", 2, "--windows", 2, "--work-lengths", 2 * LENGTH, "--tile", 16, 16]
    common = ["--data", data / "data", "--model", data / "tiny", "--device", "cpu", "--state", state]
    return [*common, *sizes, "--ruler-tasks", "--learning-rate", 3e-3, *more]


def run(data, state, arm, *more):
    call(options_of(data, state, "--only", arm, *more))
    return json.loads((state / Arm.parse(arm).folder / "result.json").read_text("utf-8"))


def test_the_folder_holds_the_tokens_of_each_text_and_says_which(data):
    parts, tokenizer, about = read_data(data / "data")
    assert tokenizer.decode(parts["held"][:40]) == "a" * 20 + " " * 20
    assert about["tokens"] == {name: len(ids) for name, ids in parts.items()}
    assert about["sources"] == {"train": ["train.txt"], "held": "held.txt"}
    with pytest.raises(ValueError, match="make it with --prepare"):
        read_data(data)


def test_the_term_lowers_the_retained_work_and_training_alone_less(data, tmp_path):
    steps = ("--steps", 12, "--every", 6)
    start, alone, with_term = (run(data, tmp_path, arm, *steps) for arm in ARMS[:3])
    assert [point["step"] for point in alone["points"]] == [0, 6, 12]
    assert [point["step"] for point in start["points"]] == [0]
    assert start["points"][0]["nll"]["held"] == pytest.approx(alone["points"][0]["nll"]["held"])

    def work(found):
        return found["points"][-1]["work"]["held"][str(2 * LENGTH)]["work_fraction"]

    assert work(with_term) < 0.95 * work(alone)
    logged = [point["retained_surrogate"] for point in with_term["points"][1:]]
    assert logged[-1] < logged[0]
    assert "retained_surrogate" not in alone["points"][-1]
    assert all(found["complete"] for found in (start, alone, with_term))


def test_a_run_out_of_time_goes_on_to_the_same_curve(data, tmp_path):
    steps = ("--steps", 4, "--every", 2)
    whole = run(data, tmp_path / "whole", ARMS[2], *steps)
    cut = run(data, tmp_path / "cut", ARMS[2], *steps, "--budget-seconds", 0)
    assert not cut["complete"]
    assert [point["step"] for point in cut["points"]] == [0]  # it stopped after its first step
    resumed = run(data, tmp_path / "cut", ARMS[2], *steps)
    assert resumed["complete"]
    assert [point["step"] for point in resumed["points"]] == [0, 2, 4]
    for one, other in zip(resumed["points"], whole["points"], strict=True):
        assert one["nll"]["held"] == pytest.approx(other["nll"]["held"], abs=1e-5)
    with pytest.raises(ValueError, match="a plan with other learning_rate"):
        run(data, tmp_path / "cut", ARMS[2], *steps, "--learning-rate", 1)


def test_all_arms_are_one_command_and_one_file(data, tmp_path, monkeypatch):
    output = tmp_path / "out" / "concentrate.json"
    arms = ["--arms", "start", ARMS[3], "--steps", 2, "--name", "other", "--output", output]
    command = ["study_concentrate.py", *map(str, options_of(data, tmp_path / "state", *arms, *RULER))]
    monkeypatch.setattr(sys, "argv", command)
    study_concentrate.main()
    found = json.loads(output.read_text("utf-8"))
    assert [run["label"] for run in found["arms"]] == ["start", ARMS[3]]
    for run in found["arms"]:
        assert [(row["implementation"], row["samples"]) for row in run["ruler"]["tasks"]] == [("sdpa", 2), ("mala", 2)]
    assert found["model"] == "other"
    assert found["plan"]["tile"] == [16, 16]
    rows = [line.split(" | ") for line in training_study_tables.concentrate_table(found).splitlines()[2:]]
    assert [row[0] for row in rows] == ["| start", f"| {ARMS[3]}"]
    assert [row[1] for row in rows] == ["0", "2"]
    assert all(cell.strip(" |") for row in rows for cell in row)
    assert found["data"]["sources"]["held"] == "held.txt"
    monkeypatch.setattr(sys, "argv", [*command, "--arms", "sdpa"])
    with pytest.raises(SystemExit, match=r"study_concentrate.py: an arm is start, mala"):
        study_concentrate.main()


def test_arms_are_read_from_their_labels():
    assert Arm.parse("mala:weight=0.5,base=512") == Arm("mala:weight=0.5,base=512", weight=0.5, base=512)
    for label in ("sdpa", "mala:tau=2", "mala:weight=x", "start:weight=1"):
        with pytest.raises(ValueError, match=r"arm|settings"):
            Arm.parse(label)


def test_length_scaled_queries_scale_the_scores_of_each_row():
    model, ids = tiny_llama(), torch.arange(40)[None]
    seen = {}

    def keep(module, query, key, *_, **kwargs):
        seen[module.layer_idx] = query @ key.repeat_interleave(2, 1).transpose(-1, -2)
        return torch.zeros(1, 40, 4, 32), None

    from transformers import AttentionInterface

    AttentionInterface.register("keep_scores", keep)
    model.set_attn_implementation("keep_scores")
    with torch.no_grad():
        model(ids)
        plain = seen[0]
        with log_scaled_queries(model, 8):
            model(ids)
        scaled = seen[0]
        model(ids)
    factor = log_scale(torch.arange(40), 8)
    assert factor[:8].eq(1).all()
    assert factor[15].item() == pytest.approx(4 / 3)
    torch.testing.assert_close(scaled, plain * factor[:, None])
    torch.testing.assert_close(seen[0], plain)
    with pytest.raises(ValueError, match="above 1"), log_scaled_queries(model, 1):
        pass

# SPDX-License-Identifier: Apache-2.0
"""``train_compare.py`` trains every attention from the same weights on the same batches, writes what it says, refuses nonsense."""

import json
import math
import subprocess
import sys

import pytest
import torch
from project import ROOT
from tiny_model import save_tiny_checkpoint

sys.path.append(str(ROOT / "scripts"))

import train_compare
from training_runs import Attention, Windows

pytestmark = pytest.mark.transformers

STEPS, LENGTH, BATCH = 4, 128, 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Command line options that name a tiny checkpoint and a text on which its attention is sparse."""
    folder = tmp_path_factory.mktemp("training")
    save_tiny_checkpoint(folder / "tiny", positions=2 * LENGTH)
    text = folder / "text.txt"
    text.write_text("".join(letter * 64 for letter in "it is a truth universally acknowledged"), "utf-8")
    return ["--model", str(folder / "tiny"), "--text", str(text), "--device", "cpu"]


def arguments(inputs, output, *more):
    sizes = ["--steps", str(STEPS), "--batch", str(BATCH), "--seqlen", str(LENGTH), "--held-out", "2"]
    return train_compare.build_parser().parse_args([*inputs, *sizes, "--output", str(output), *more])


def test_what_it_writes_is_complete_and_every_run_starts_alike(inputs, tmp_path, capsys):
    output = tmp_path / "new" / "training.json"
    labels = ["sdpa", "mala:tau=0", "mala:tau=1,tile=[16,16]"]
    train_compare.run(arguments(inputs, output, "--attn", *labels, "--commit", "abc"))
    found = json.loads(output.read_text("utf-8"))
    assert found["commit"] == "abc"
    assert found["model"] == "tiny"
    assert found["settings"]["dtype"] == "float32"
    assert found["data"]["held_out_windows"] == 2
    assert found["data"]["train_windows"] == 38 * 64 // LENGTH - 2
    assert [run["attention"] for run in found["runs"]] == labels
    sdpa, tau_zero, tau_one = found["runs"]
    for run in found["runs"]:
        assert len(run["loss"]) == len(run["grad_norm"]) == STEPS
        assert all(map(math.isfinite, run["loss"] + run["grad_norm"]))
        assert run["steps_per_second"] > 0
        assert run["peak_bytes"] is None
        assert run["held_out_before"] == sdpa["held_out_before"]
        assert run["held_out_after"]["sdpa"] < run["held_out_before"]["sdpa"]
        assert set(run["held_out_after"]) == {"sdpa", "mala"}
    # the same weights and batches in the same order: only then do the last losses agree
    assert tau_zero["loss"] == pytest.approx(sdpa["loss"], abs=1e-5)
    assert tau_zero["work_after"]["work_fraction"] == 1
    assert tau_one["work_before"]["tiles"] == [[16, 16]]
    assert tau_one["work_before"]["lowest_head"] <= tau_one["work_before"]["work_fraction"] < 1
    assert "mala:tau=0       step     4 of 4  loss " in capsys.readouterr().out


def test_windows_come_in_passes_of_the_same_random_order():
    windows = torch.arange(10).view(5, 2)
    first, second, other = (
        [next_["input_ids"].tolist() for next_, _ in zip(Windows(windows, seed), range(10), strict=False)]
        for seed in (3, 3, 4)
    )
    assert first == second != other
    assert first[:5] != first[5:]
    assert sorted(first[:5]) == sorted(first[5:]) == windows.tolist()


def test_settings_of_mala_are_read_from_its_label():
    assert Attention.parse("mala").settings == {}
    assert Attention.parse('mala:tau=0.5,tile=[64,32],layers={"1":"sdpa"}').settings == {
        "tau": 0.5,
        "tile": [64, 32],
        "layers": {"1": "sdpa"},
    }


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--attn", "sdpa"], "at least two attentions"),
        (["--attn", "sdpa", "mala", "mala"], "at least two attentions that differ"),
        (["--attn", "sdpa", "flash"], "an attention is sdpa, eager"),
        (["--attn", "sdpa:tau=1", "mala"], "an attention is sdpa, eager"),
        (["--attn", "sdpa", "mala:tau=one"], "JSON values"),
        (["--attn", "sdpa", "mala:colour=1"], "unknown settings"),
        (["--attn", "sdpa", "mala:tau=-1"], "tau must be"),
        (["--steps", "0"], "at least 1"),
        (["--batch", "0"], "at least 1"),
        (["--learning-rate", "nan"], "learning_rate"),
        (["--seqlen", "10000"], "256 positions"),
        (["--held-out", "0"], "held out"),
        (["--held-out", "1000"], "19 windows of 128 tokens"),
        (["--text", "no/such/file"], "No such file"),
    ],
)
def test_nonsense_is_refused_before_training(inputs, tmp_path, more, message, monkeypatch):
    monkeypatch.setattr(train_compare, "compare", None)
    options = more if "--attn" in more else ["--attn", "sdpa", "mala", *more]
    with pytest.raises((ValueError, OSError), match=message):
        train_compare.run(arguments(inputs, tmp_path / "out.json", *options))


def test_a_refusal_is_one_line(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "train_compare.py", "--attn", "mala", "--output", tmp_path / "o.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("train_compare.py: --attn needs at least two attentions")
    assert "Traceback" not in done.stderr

# SPDX-License-Identifier: Apache-2.0
"""Conversions that are killed, repeated, tried out or refused: nothing is lost, and nothing half-made loads."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import transformers as hf
from convert_runs import LENGTH, evidence, quietly, run
from project import ROOT

from mala_hf import Evidence, MalaConfig, TauSearch, convert, convert_evidence
from mala_hf.convert_output import work_folder

KILL = """
import os, signal, sys
from pathlib import Path
from mala_hf import Evidence, convert, convert_evidence, convert_output
def kill(*arguments, **settings):
    os.kill(os.getpid(), signal.SIGKILL)
{point} = kill
convert({tiny!r}, {out!r}, evidence=Evidence(text={text!r}, length=512, windows=2, ruler_samples=0), device="cpu", link={link})
"""


@pytest.mark.parametrize(
    ("point", "link", "finished"),
    [
        ("convert_evidence._time", True, 2),
        ("convert_output._write", False, 3),
        ("convert_output.shutil.copyfile", False, 3),
    ],
)
def test_a_killed_run_leaves_nothing_that_loads_and_goes_on_where_it_stopped(
    place, tmp_path, monkeypatch, point, link, finished
):
    out, work = tmp_path / "out", work_folder(tmp_path / "out")
    names = {
        "point": point,
        "tiny": str(place / "tiny"),
        "out": str(out),
        "text": str(place / "text.txt"),
        "link": link,
    }
    killed = subprocess.run([sys.executable, "-c", KILL.format(**names)], capture_output=True, check=False, cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists()
    assert len(list(work.glob("*.json"))) == finished
    for folder in (work, *(path for path in work.rglob("*") if path.is_dir())):
        assert not (folder / "config.json").exists()
    measured = []

    def counted(measure):
        return lambda *arguments: measured.append(measure.__name__) or measure(*arguments)

    for measure in (convert_evidence._perplexity, convert_evidence._time):
        monkeypatch.setattr(convert_evidence, measure.__name__, counted(measure))
    convert(place / "tiny", out, link=link, **quietly(place))
    assert measured == (["_time"] if finished == 2 else [])
    assert hf.AutoModelForCausalLM.from_pretrained(out, attn_implementation="mala").config.mala == {"tau": 1.0}
    assert not work.exists()


def test_other_settings_are_measured_anew(place, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise RuntimeError("stopped")

    monkeypatch.setattr("mala_hf.convert_checkpoint.write_checkpoint", stop)
    counts = []
    for tau in (1.0, 2.0, 1.0):
        with pytest.raises(RuntimeError, match="stopped"):
            convert(place / "tiny", tmp_path / "out", MalaConfig(tau=tau), **quietly(place))
        counts.append(len(list(work_folder(tmp_path / "out").glob("*.json"))))
    assert counts == [3, 6, 6]


def test_a_dry_run_writes_nothing_and_tells_the_plan(place, tmp_path, monkeypatch):
    monkeypatch.setattr("mala_hf.convert_checkpoint.load_model", None)
    plan = convert(
        place / "tiny", tmp_path / "out", search=TauSearch(), evidence=evidence(place), dry_run=True, link=False
    )
    size = (place / "tiny" / "model.safetensors").stat().st_size
    assert (plan["weights"], plan["bytes"]) == (["model.safetensors"], size)
    assert plan["bytes_to_copy"] == size
    assert plan["search"]["max_ppl_increase"] == 0.001
    assert (plan["evidence"]["length"], plan["left_out"], plan["finished_measurements"]) == (LENGTH, [], 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"config": MalaConfig(layers={2: 0.5})}, "layer 2 does not exist|layers \\[2\\] do not exist"),
        ({"config": MalaConfig(tile=(32, 32))}, "leave out tile"),
        ({"config": MalaConfig(layers={0: {"window": 8}})}, "layer 0 has a window"),
        ({"config": MalaConfig(), "search": TauSearch()}, "not both"),
        ({"evidence": Evidence(length=8192, ruler_samples=0)}, "8192 is more than the model's 4096 positions"),
        ({"search": TauSearch(), "evidence": "long"}, "the text has 5760 tokens, fewer than the 8192 of 4 windows"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_before_anything_is_written(place, tmp_path, settings, said):
    if settings.get("evidence") == "long":
        settings = settings | {"evidence": evidence(place, length=2048)}
    with pytest.raises(ValueError, match=said):
        convert(place / "tiny", tmp_path / "out", **quietly(place) | settings)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_run_mala_is_refused_before_it_is_loaded(tmp_path):
    config = hf.BloomConfig(vocab_size=256, hidden_size=16, n_layer=1, n_head=2)
    hf.BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    with pytest.raises(ValueError, match="BloomForCausalLM computes its own attention"):
        convert(tmp_path / "bloom", tmp_path / "out", dry_run=True)


def test_a_task_without_a_sample_so_short_fails_before_anything_is_measured(place, tmp_path):
    with pytest.raises(ValueError, match=r"does not fit in 512 tokens.*; choose another length, or 0 samples of RULER"):
        run(place, tmp_path / "out", evidence=evidence(place, ruler_samples=1, ruler_tasks=("niah_multikey_2",)))
    assert list(work_folder(tmp_path / "out").glob("*.json")) == []


def test_weights_that_give_no_number_are_refused(place, tmp_path):
    model = hf.AutoModelForCausalLM.from_pretrained(place / "tiny")
    model.lm_head.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "tiny")
    hf.AutoTokenizer.from_pretrained(place / "tiny").save_pretrained(tmp_path / "tiny")
    with pytest.raises(ValueError, match="the perplexity with sdpa is no number: the weights are damaged"):
        convert(tmp_path / "tiny", tmp_path / "out", **quietly(place))
    assert not (tmp_path / "out").exists()

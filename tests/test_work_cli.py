# SPDX-License-Identifier: Apache-2.0
"""``mala-hf work`` on a tiny checkpoint: its files, its JSON, and its failures in one line."""

from __future__ import annotations

import json

import pytest
import transformers as hf
from tiny_model import byte_tokenizer, save_tiny_checkpoint

from mala_hf.cli import main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def work(checkpoint, tmp_path, capsys, monkeypatch):
    """Runs the command on the tiny checkpoint; returns its exit code and what it printed."""
    text = tmp_path / "text.txt"
    text.write_text("".join(letter * 96 for letter in "work"), encoding="utf-8")

    monkeypatch.setenv("COLUMNS", "100")  # of the terminal that tables are fitted to

    def run(*arguments, model=checkpoint):
        source = () if "--prompt" in arguments else ("--text", str(text))
        fixed = ("--model", model, "--device", "cpu", "--quiet", "--output", str(tmp_path / "results"))
        code = main(["work", *fixed, *source, *arguments])
        return code, capsys.readouterr()

    return run


def test_it_writes_its_files_and_prints_layers_and_taus(work, tmp_path):
    code, printed = work("--taus", "1", "10", "--audit", "--gradients", "--layer", "1", "--head", "2")
    assert code == 0
    assert "384 tokens of text.txt" in " ".join(printed.out.split())  # wherever the title wraps
    assert "omitted mass  " in printed.out
    assert "an estimate" in printed.out.lower()
    assert "…" not in printed.out
    assert "384 tokens" not in printed.err
    result = json.loads((tmp_path / "results" / "work.json").read_text("utf-8"))
    assert [run["tau"] for run in result["runs"]] == [0, 1, 10]
    assert [(one["layer"], one["head"], one["tau"]) for one in result["tile_maps"]] == [(1, 2, 1), (1, 2, 10)]
    for layer in result["runs"][1]["layers"]:
        assert min(layer["work_fraction"]) < 1
        assert all(
            a <= b + 1e-7 for a, b in zip(layer["omitted_mass_mean"], layer["omitted_mass_bound_mean"], strict=True)
        )
        assert [len(layer[f"{name}_error"]) for name in ("dq", "dk", "dv")] == [4, 2, 2]
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names == {"work.json", "work.html", "heads.svg", "tiles.svg"}


def test_json_is_the_stored_object_and_without_an_audit_holds_the_bound_alone(work, tmp_path):
    code, printed = work("--prompt", "a" * 150 + "b" * 150, "--json")
    assert code == 0
    result = json.loads(printed.out)
    assert result == json.loads((tmp_path / "results" / "work.json").read_text("utf-8"))
    assert (result["text"], result["length"]) == ("the prompt", 300)
    layer = result["runs"][1]["layers"][0]
    assert layer["omitted_mass_mean"] is None
    assert max(layer["omitted_mass_bound_mean"]) >= 0
    assert "dq_error" not in layer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "2"], "layer 2 does not exist: the model has 2, 0 to 1"),
        (["--layer", "0", "--head", "4"], "head 4 does not exist: the model has 4, 0 to 3"),
        (["--head", "0"], "head 0 of which layer"),
        (["--length", "500"], "the text has 384 tokens, fewer than the length 500"),
        (["--length", "0"], "--length must be at least 2, got 0"),
        (["--prompt", ""], "the text has no tokens"),
        (["--prompt", "a"], "at least 2 tokens are needed, got 1"),
        (["--prompt", "a" * 600, "--length", "600"], "600 is more than the model's 512 positions"),
        (["--taus", "-1"], "taus must be finite numbers >= 0"),
        (["--dtype", "int8"], "dtype must be float32"),
        (["--text", "absent.txt"], "absent.txt"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_failures_are_one_line_and_not_a_zero_exit(work, arguments, message):
    code, printed = work(*arguments)
    lines = [line for line in printed.err.splitlines() if line.startswith("mala-hf: error:")]
    assert code == 1
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize("arguments", [["--layer", "99"], ["--layer", "1", "--head", "4"]], ids=" ".join)
def test_a_layer_or_head_that_the_config_lacks_is_refused_before_weights_are_read(work, arguments, monkeypatch):
    monkeypatch.setattr("mala_hf.checkpoint.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    code, printed = work(*arguments)
    assert code == 1
    assert f"{arguments[-2][2:]} {arguments[-1]} does not exist: the model has " in printed.err


@pytest.mark.parametrize("kind", ["mamba", "bloom"])
def test_models_that_cannot_run_mala_are_refused_by_name(work, kind, tmp_path):
    config, model = {
        "mamba": (
            hf.MambaConfig(vocab_size=256, hidden_size=16, num_hidden_layers=1, state_size=4),
            hf.MambaForCausalLM,
        ),
        "bloom": (hf.BloomConfig(vocab_size=256, hidden_size=16, n_layer=1, n_head=2), hf.BloomForCausalLM),
    }[kind]
    model(config).save_pretrained(tmp_path / kind)
    byte_tokenizer().save_pretrained(tmp_path / kind)
    code, printed = work("--length", "64", model=str(tmp_path / kind))
    lines = [line for line in printed.err.splitlines() if line.startswith("mala-hf: error:")]
    assert code == 1
    assert len(lines) == 1
    assert kind in lines[0].lower()

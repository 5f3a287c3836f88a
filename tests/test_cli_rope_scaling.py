# SPDX-License-Identifier: Apache-2.0
"""Rotary scaling changes a checkpoint as Transformers' own configuration does, and lets it read beyond its positions."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf
from tiny_model import runs_of_tokens, save_tiny_checkpoint

from mala_hf.checkpoint import load_model
from mala_hf.cli import main
from mala_hf.rope_scaling import read_rope_scaling, scale_rope

pytestmark = pytest.mark.transformers

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), positions=64))


def test_a_scaled_model_equals_one_that_transformers_configures(checkpoint):
    ours, _ = load_model(checkpoint, device="cpu", rope_scaling=YARN)
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    theirs = hf.AutoModelForCausalLM.from_pretrained(checkpoint, rope_parameters=rope, max_position_embeddings=256)
    plain, _ = load_model(checkpoint, device="cpu")
    ids = runs_of_tokens(200)
    with torch.no_grad():
        logits, expected, unscaled = (model(ids).logits for model in (ours, theirs, plain))
    assert torch.equal(logits, expected)
    assert (logits - unscaled).abs().max() > 1e-2
    assert ours.config.max_position_embeddings == 256


def test_the_command_reads_beyond_the_trained_positions(checkpoint, capsys):
    arguments = [
        "ppl",
        "--model",
        checkpoint,
        "--device",
        "cpu",
        "--lengths",
        "200",
        "--windows",
        "1",
        "--json",
        "--quiet",
    ]
    assert main(arguments) == 1
    assert "200 is more than the model's 64 positions" in capsys.readouterr().err
    assert main([*arguments, "--rope-scaling", json.dumps(YARN)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rope_scaling"] == YARN
    assert result["rows"][0]["tokens"] == 199


def test_what_the_user_gives_replaces_what_the_model_had(checkpoint):
    config = hf.LlamaConfig(
        rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e5}, max_position_embeddings=128
    )
    scaled = scale_rope(config, {"rope_type": "linear", "factor": 3.0, "original_max_position_embeddings": 100})
    assert scaled.rope_parameters["rope_type"] == "linear"
    assert scaled.rope_parameters["rope_theta"] == 5e5
    assert scaled.max_position_embeddings == 300


def test_a_kind_of_scaling_that_lacks_a_setting_is_refused():
    with pytest.raises(ValueError, match="type llama3 lacks a setting: 'low_freq_factor'"):
        scale_rope(hf.LlamaConfig(), {"rope_type": "llama3", "factor": 8.0})


def test_models_whose_positions_cannot_be_scaled_are_refused():
    with pytest.raises(ValueError, match="GPT2Config has no rotary positions"):
        scale_rope(hf.GPT2Config(), YARN)
    with pytest.raises(ValueError, match="several rotary settings"):
        scale_rope(hf.Gemma3TextConfig(), YARN)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[4]", "must be a JSON object with a rope_type"),
        ('{"factor": 4}', "must be a JSON object with a rope_type"),
        ('{"rope_type": "yarn", "factor": "4"}', "must be a number >= 1, got '4'"),
    ],
    ids=["json", "list", "no kind", "factor"],
)
def test_malformed_scaling_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        read_rope_scaling(text)
    assert read_rope_scaling(None) is None

# SPDX-License-Identifier: Apache-2.0
"""The table of families is what it says: each of them, and no other, on tiny random weights."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers as hf
from models import DECODERS, NOISE, SMALL, SMALL_TILE, bart, bert, modernbert, padding, tiny, tokens
from more_models import MORE_DECODERS, VISION_LANGUAGE, image_inputs
from tiny_model import save_tiny_checkpoint
from torch.testing import assert_close

import mala_hf
from mala_hf import MalaConfig, mala_attention, patch_model, record_work, unpatch_model
from mala_hf.families import FAMILIES, _warned

pytestmark = pytest.mark.transformers

LENGTH, NEW = 30, 6
BUILDERS = {**DECODERS, **MORE_DECODERS, **VISION_LANGUAGE, "bart": bart, "bert": bert, "modernbert": modernbert}
GENERATING = [name for name in BUILDERS if name not in ("bart", "bert", "modernbert")]
PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"


def made(name: str, peaked: float = 1.0):
    # two models go by the name gemma3: the table's key is that of the text layers
    return tiny(BUILDERS[name], peaked=peaked)


def inputs_of(name: str, model) -> tuple[dict, torch.Tensor]:
    """Inputs of one forward, and which tokens are real: a batch padded on the left, or one sequence with an image."""
    if name in VISION_LANGUAGE:
        inputs = image_inputs(model, LENGTH)
        return inputs, torch.ones(1, LENGTH, dtype=torch.bool)
    mask = padding(LENGTH, (0, LENGTH), (7, LENGTH))
    inputs = {"input_ids": tokens(2, LENGTH), "attention_mask": mask}
    if name == "bart":
        inputs["decoder_input_ids"] = tokens(2, LENGTH, seed=1)
        return inputs, torch.ones(2, LENGTH, dtype=torch.bool)
    return inputs, mask.bool()


@torch.no_grad()
def outputs(model, inputs: dict) -> torch.Tensor:
    return model(**inputs)[0]


def text_layers(model) -> int:
    config = model.config.get_text_config()
    return 3 * config.num_hidden_layers if config.is_encoder_decoder else config.num_hidden_layers


def test_every_family_of_the_table_is_tested_here_and_no_other():
    assert {made(name).config.get_text_config().model_type for name in BUILDERS} == FAMILIES.keys()


@pytest.mark.parametrize("name", BUILDERS)
def test_patching_runs_the_rule_and_unpatching_restores_the_logits(name):
    model = made(name, peaked=4)
    inputs, real = inputs_of(name, model)
    before = outputs(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(model, MalaConfig(tau=0, tile=tuple(SMALL_TILE)))
    assert_close(outputs(model, inputs)[real], before[real], **NOISE)
    patch_model(model, MalaConfig(tau=1, tile=tuple(SMALL_TILE)))
    with record_work(model) as work:
        by_rule = outputs(model, inputs)
    assert len(work._by_name) == text_layers(model)
    assert work.work_fraction < 1
    model.set_attn_implementation({key_of(model): "mala_reference"})
    assert_close(by_rule[real], outputs(model, inputs)[real], **NOISE)
    assert not torch.allclose(by_rule[real], before[real], **NOISE)
    unpatch_model(model)
    assert torch.equal(outputs(model, inputs), before)


def key_of(model) -> str:
    return "text_config" if "text_config" in model.config.sub_configs else ""


@pytest.mark.parametrize("name", GENERATING)
def test_a_padded_batch_or_an_image_generates_what_the_models_own_attention_does(name):
    model = made(name)
    inputs, _ = inputs_of(name, model)
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**inputs, **options)
    with mala_attention(model, tau=0), record_work(model) as work:
        found = model.generate(**inputs, **options)
    assert {layer.forwards for layer in work.layers.values()} == {NEW}
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert_close(torch.stack(found.logits), torch.stack(expected.logits), **NOISE)


@pytest.mark.parametrize("name", BUILDERS)
def test_dense_layers_are_taken_where_the_table_says_so_and_refused_elsewhere(name):
    model = made(name)
    inputs, real = inputs_of(name, model)
    expected = outputs(model, inputs)
    patch_model(model, MalaConfig(layers={"*": "sdpa"}))
    if FAMILIES[model.config.get_text_config().model_type].dense:
        assert_close(outputs(model, inputs)[real], expected[real], **NOISE)
    else:
        with pytest.raises(ValueError, match="tau to 0"):
            outputs(model, inputs)


@pytest.mark.parametrize("name", GENERATING)
def test_settings_by_layer_and_head_reach_every_family(name):
    model = made(name, peaked=4)
    inputs, real = inputs_of(name, model)
    expected = outputs(model, inputs)
    with mala_attention(model, layers={"*": {"heads": {"0-1": 0, "2-": {"tau": 0, "window": 1000}}}}):
        assert_close(outputs(model, inputs)[real], expected[real], **NOISE)
    with mala_attention(model, layers={-1: {"tau": 0, "heads": {1: {"window": 2}}}, 0: 0}):
        assert not torch.allclose(outputs(model, inputs)[real], expected[real], **NOISE)


def stablelm():
    """A family that asks the attention interface and is not in the table."""
    return hf.StableLmForCausalLM(hf.StableLmConfig(**SMALL))


def test_another_family_is_run_with_one_warning():
    _warned.discard("stablelm")
    model = tiny(stablelm)
    expected = outputs(model, {"input_ids": tokens(1, LENGTH)})
    with pytest.warns(UserWarning, match="not tested with models of the type 'stablelm'"):
        patch_model(model, MalaConfig(tau=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(model, MalaConfig(tau=0))
    with mala_hf.record_work(model) as work:
        assert_close(outputs(model, {"input_ids": tokens(1, LENGTH)}), expected, **NOISE)
    assert len(work.layers) == 2


def test_the_page_of_models_shows_the_table():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (yes|no) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert rows == [(key, one.name, one.layers, "yes" if one.dense else "no") for key, one in FAMILIES.items()]


def test_the_python_of_the_page_runs(tmp_path):
    checkpoint, names = save_tiny_checkpoint(tmp_path, layers=11), {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    for block in blocks:
        exec(block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(checkpoint)), names)
    assert len(blocks) == 2
    with record_work(names["model"]) as work:
        names["model"](tokens(1, LENGTH))
    assert [layer.tau for layer in work.layers.values()] == [None] * 2 + [1.0] * 3 + [[0.1, 0.1, None, 0.1]] * 5 + [0.5]

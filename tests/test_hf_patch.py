# SPDX-License-Identifier: Apache-2.0
"""Switching a loaded model to MALA and back."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from models import DECODERS, SMALL, SMALL_TILE, bart, clone, tiny, tokens

import mala_hf
from mala_hf import MalaConfig, mala_attention, patch_model, unpatch_model

pytestmark = pytest.mark.transformers

SETTINGS = MalaConfig(tau=1.0, tile=tuple(SMALL_TILE))


@torch.no_grad()
def logits(model) -> torch.Tensor:
    more = {"decoder_input_ids": tokens(1, 30, seed=1)} if model.config.is_encoder_decoder else {}
    return model(tokens(1, 30), **more)[0]


@pytest.mark.parametrize("before", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [*DECODERS, bart])
def test_unpatching_restores_the_logits_bit_by_bit(family, before):
    if before == "sdpa" and family in ("gemma2", "gpt_oss"):
        pytest.skip("the family has no SDPA")
    model = tiny(family, peaked=4, attention=before)
    expected = logits(model)
    assert patch_model(model, SETTINGS) is model
    assert model.config._attn_implementation == "mala"
    assert model.config.mala == SETTINGS.to_dict()
    assert not torch.equal(logits(model), expected)
    unpatch_model(model)
    assert model.config._attn_implementation == before
    assert not hasattr(model.config, "mala")
    assert torch.equal(logits(model), expected)


def test_the_context_manager_undoes_itself_also_after_an_error():
    model = tiny("llama", peaked=4)
    expected = logits(model)
    with mala_attention(model, SETTINGS):
        assert not torch.equal(logits(model), expected)
    with pytest.raises(KeyError), mala_attention(model, SETTINGS):
        raise KeyError
    assert torch.equal(logits(model), expected)
    assert not hasattr(model.config, "mala")


def test_a_patch_that_is_undone_inside_a_context_is_there_again_after_it():
    model = patch_model(tiny("llama"))
    with mala_attention(model, tau=0.5):
        unpatch_model(model)
    assert model.config._attn_implementation == "mala"
    unpatch_model(model)
    assert model.config._attn_implementation == "eager"
    assert not hasattr(model.config, "mala")


def test_context_managers_nest_inside_one_another_and_inside_a_patch():
    model = tiny("llama")
    patch_model(model, MalaConfig(tau=0.25))
    with mala_attention(model, tau=0.5):
        with mala_attention(model, tau=2.0, layers={0: "sdpa"}):
            assert model.config.mala == {"tau": 2.0, "layers": {"0": "sdpa"}}
        assert model.config.mala == {"tau": 0.5}
    assert model.config.mala == {"tau": 0.25}
    unpatch_model(model)
    assert model.config._attn_implementation == "eager"


def test_patching_again_changes_the_settings_and_keeps_the_way_back():
    model = tiny("llama")
    patch_model(patch_model(model, MalaConfig(tau=0.25)), MalaConfig(tau=0.5))
    assert model.config.mala == {"tau": 0.5}
    assert unpatch_model(model).config._attn_implementation == "eager"


@pytest.mark.parametrize("chosen", ["eager", "sdpa", "mala_reference"])
def test_unpatching_keeps_another_attention_that_was_chosen_since_but_none_of_ours(chosen):
    model = patch_model(tiny("llama", attention="sdpa"))
    model.set_attn_implementation(chosen)
    unpatch_model(model)
    assert model.config._attn_implementation == ("sdpa" if chosen == "mala_reference" else chosen)
    assert not hasattr(model.config, "mala")


def test_patching_again_after_another_attention_was_chosen_leads_back_to_that():
    model = tiny("llama", attention="sdpa")
    model.config.mala = {"tau": 3.0}
    patch_model(model, MalaConfig(tau=0.5)).set_attn_implementation("eager")
    unpatch_model(patch_model(model))
    assert model.config._attn_implementation == "eager"
    assert model.config.mala == {"tau": 3.0}


def test_settings_of_the_checkpoint_come_back_after_unpatching():
    model = tiny("llama")
    model.config.mala = {"tau": 3.0}
    unpatch_model(patch_model(model))
    assert model.config.mala == {"tau": 3.0}


def test_unpatching_a_model_that_was_never_patched_does_nothing():
    model = tiny("llama")
    unpatch_model(model)
    assert model.config._attn_implementation == "eager"


def test_a_copy_of_a_patched_model_can_be_unpatched_alone():
    model = patch_model(tiny("llama"))
    copy = unpatch_model(clone(model))
    assert (model.config._attn_implementation, copy.config._attn_implementation) == ("mala", "eager")


@pytest.mark.parametrize("settings", [{"tau": -1.0}, {"layers": {7: 1.0}}, {"unknown": 1}])
def test_a_wrong_setting_changes_nothing(settings):
    model = tiny("llama")
    with pytest.raises(ValueError), mala_attention(model, **settings):
        pass
    assert model.config._attn_implementation == "eager"
    assert not hasattr(model.config, "mala")


def test_a_config_and_its_fields_together_are_refused():
    with pytest.raises(ValueError, match="not both"), mala_attention(tiny("llama"), MalaConfig(), tau=1.0):
        pass


def test_a_model_that_computes_its_own_attention_is_refused():
    model = hf.XGLMForCausalLM(hf.XGLMConfig(vocab_size=97, d_model=32, ffn_dim=32, num_layers=1, attention_heads=2))
    assert not model._can_set_attn_implementation()
    with pytest.raises(ValueError, match="computes its own attention"):
        patch_model(model)
    assert not hasattr(model.config, "mala")


def vision_language_model() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    vision = hf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
    )  # fmt: skip
    config = hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**SMALL), image_token_index=96)
    return hf.LlavaForConditionalGeneration(config).eval()


def test_the_vision_tower_of_a_composite_model_stays_as_it_is():
    model = vision_language_model()
    ids = torch.full((1, 4), 96)
    inputs = {"input_ids": torch.cat([tokens(1, 9).clamp(max=90), ids], 1), "pixel_values": torch.randn(1, 3, 16, 16)}
    with torch.no_grad():
        expected = model(**inputs).logits
        patch_model(model, SETTINGS)
        assert model.config.text_config._attn_implementation == "mala"
        assert model.config.vision_config._attn_implementation == "sdpa"
        assert model.config.text_config.mala == SETTINGS.to_dict()
        with mala_hf.record_work(model) as report:
            model(**inputs)
        assert {work.name.rsplit(".", 3)[-3] for work in report.layers.values()} == {"layers"}
        assert list(report.layers) == [0, 1]
        unpatch_model(model)
        assert torch.equal(model(**inputs).logits, expected)
    assert model.config.text_config._attn_implementation == "sdpa"
    assert not hasattr(model.config.text_config, "mala")


def test_a_composite_model_loads_with_mala_for_its_text_only(tmp_path):
    vision_language_model().save_pretrained(tmp_path)
    model = hf.LlavaForConditionalGeneration.from_pretrained(tmp_path, attn_implementation={"text_config": "mala"})
    assert model.config.text_config._attn_implementation == "mala"
    with mala_hf.record_work(model) as report:
        model(tokens(1, 9).clamp(max=90))
    assert list(report.layers) == [0, 1]


def test_settings_of_a_composite_model_are_saved_with_its_text_config(tmp_path):
    patch_model(vision_language_model(), SETTINGS).save_pretrained(tmp_path)
    loaded = hf.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.config.text_config.mala == SETTINGS.to_dict()
    assert loaded.config.text_config._attn_implementation == "sdpa"

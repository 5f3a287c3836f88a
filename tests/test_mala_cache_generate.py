# SPDX-License-Identifier: Apache-2.0
"""Generation with a MalaCache reads its INT8 plane, and gives the tokens that DynamicCache gives."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from decode_calls import Calls, record_calls
from mala_caches import assert_like
from models import CACHE, NOISE, SMALL_TILE, attention, padding, tiny, tokens
from offloading import late
from torch.testing import assert_close

import mala_hf
from mala_hf import MalaCache
from mala_hf.cache import MalaLayer

pytestmark = pytest.mark.transformers

PROMPT, NEW = 20, 8
FORM = "int8_two_pass"


@pytest.fixture
def calls(monkeypatch) -> Calls:
    return record_calls(monkeypatch)


def generate(model, ids, cache, name: str = "mala", mala: dict | None = None, **options):
    """New tokens (batch, NEW), scores (batch, NEW, vocabulary) of a greedy generation."""
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    with attention(model, name, **(mala or {})):
        out = model.generate(ids, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


FAMILIES = {"llama": 2, "qwen2": 1, "gemma3": 1, "mistral": 0}  # full-attention layers of two


@pytest.mark.parametrize("padded", [None, padding(PROMPT, (0, PROMPT), (7, PROMPT))], ids=["plain", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_full_layers_read_the_plane_and_tokens_are_those_of_the_dynamic_cache(family, padded, calls):
    model, ids = tiny(family), tokens(2, PROMPT)
    options = {"attention_mask": padded, "mala": {"tau": 1e-6}}  # nothing is skipped
    got, scores = generate(model, ids, MalaCache(config=model.config), **options)
    full = FAMILIES[family]
    forms = [call.form for call in calls.steps]
    assert (forms.count(FORM), forms.count("two_pass")) == (full * (NEW - 1), (2 - full) * (NEW - 1))
    assert {(call.is_masked, call.in_cache) for call in calls.steps} == {(False, True)}
    expected, expected_scores = generate(model, ids, hf.DynamicCache(config=model.config), **options)
    assert got.tolist() == expected.tolist()
    assert_close(scores, expected_scores, **NOISE)


@pytest.mark.parametrize("name", ["mala", "mala_reference"])
def test_a_report_says_that_the_plane_was_read_and_how_much_was_retained(name):
    model, ids = tiny("llama", peaked=4), tokens(2, 60)
    with attention(model, name, tile=SMALL_TILE), mala_hf.record_work(model) as work:
        model.generate(ids, past_key_values=MalaCache(config=model.config), max_new_tokens=NEW, do_sample=False)
    for layer in work.layers.values():
        assert ("int8", "a decode whose keys have an INT8 plane") in layer.choices
        assert layer.choices["int8", "a decode whose keys have an INT8 plane"] == NEW - 1
    assert "INT8 plane" in str(work)
    assert work.work_fraction < 1


SETTINGS = {
    "windows of heads": {"layers": {"0": {"heads": {"0-1": 0.2, "2-": {"window": 9}}}}},
    "every other head": {"layers": {"*": {"heads": {"0": 0.2, "2": 0.2}}}},
    "a dense layer": {"layers": {"0": "sdpa"}},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_of_heads_take_their_part_of_the_plane(settings, calls):
    """Heads whose keys are copied have their plane copied, too."""
    model, ids = tiny("llama", peaked=4), tokens(2, 40)
    mala = {"tile": SMALL_TILE} | SETTINGS[settings]
    got, scores = generate(model, ids, MalaCache(config=model.config), mala=mala)
    assert {call.form for call in calls.steps} == {FORM}
    expected = generate(model, ids, hf.DynamicCache(config=model.config), mala=mala)
    assert got.shape == expected[0].shape
    assert_close(scores[:, :1], expected[1][:, :1], **NOISE)  # the prompt's
    assert (scores[:, 1] - expected[1][:, 1]).abs().max() < 0.2 * expected[1][:, 1].abs().max()


def test_beam_search_reorders_the_plane(calls):
    model, ids = tiny("llama"), tokens(2, PROMPT)
    options = {"num_beams": 3, "mala": {"tau": 1e-6}}
    got, _ = generate(model, ids, MalaCache(config=model.config), **options)
    assert {call.form for call in calls.steps} == {FORM}
    assert got.tolist() == generate(model, ids, hf.DynamicCache(config=model.config), **options)[0].tolist()


@pytest.mark.parametrize("how", ["assistant", "prompt lookup"])
def test_assisted_generation_crops_the_plane(how, calls):
    model, ids = tiny("llama"), tokens(1, PROMPT)
    ids[:, 10:] = ids[:, :10]  # something to look up
    options: dict = {"mala": {"tau": 1e-6}, "max_new_tokens": 12}
    if how == "assistant":
        assistant = tiny("llama")
        with torch.no_grad():
            assistant.lm_head.weight += 0.3 * torch.randn_like(assistant.lm_head.weight)  # wrong now and then
        options["assistant_model"] = assistant
    else:
        options["prompt_lookup_num_tokens"] = 3
    got, _ = generate(model, ids, MalaCache(config=model.config), **options)
    assert FORM in {call.form for call in calls.steps}
    assert max(call.seqlen_q for call in calls.steps if call.form == FORM) > 1
    expected = generate(model, ids, hf.DynamicCache(config=model.config), "eager", max_new_tokens=12)[0]
    assert got.tolist() == expected.tolist()


def test_a_conversation_goes_on_and_a_prompt_is_used_twice():
    """copy.deepcopy of a filled cache, as for a prompt that many requests share."""
    model, ids = tiny("llama"), tokens(1, PROMPT)
    with torch.no_grad(), attention(model, "mala", tau=1e-6):
        cache = MalaCache(config=model.config)
        model(ids[:, :12], **{CACHE: cache})
        for end in (PROMPT, PROMPT - 3):
            out = model(ids[:, 12:end], **{CACHE: copy.deepcopy(cache)}).logits
            assert_close(out, model(ids[:, :end], use_cache=False).logits[:, 12:], **NOISE)
    assert cache.get_seq_length() == 12


def test_a_compiled_model_takes_the_cache_and_leaves_the_plane_alone(calls):
    model, ids = tiny("llama"), tokens(1, PROMPT)
    torch._dynamo.reset()
    with torch.no_grad(), attention(model, "mala", tau=1e-6):
        cache = MalaCache(config=model.config)
        step = torch.compile(model, backend="eager")
        step(ids[:, :12], **{CACHE: cache})
        out = step(ids[:, 12:], **{CACHE: cache}).logits
        assert_close(out, model(ids, use_cache=False).logits[:, 12:], **NOISE)
    torch._dynamo.reset()
    expected = hf.DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    assert_like(cache, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_generation_on_a_gpu_gives_the_tokens_of_the_dynamic_cache(family, offloading):
    """On a GPU that is late: of two layers each is still on its way to the CPU when it is wanted back. Buffers grow once."""
    model, ids = tiny(family).cuda(), tokens(2, PROMPT).cuda()
    options = {"mala": {"tau": 1e-6}, "max_new_tokens": 120}
    cache = MalaCache(config=model.config, offloading=offloading)
    with late(model):
        got, scores = generate(model, ids, cache, **options)
    expected, expected_scores = generate(model, ids, hf.DynamicCache(config=model.config), **options)
    assert got.tolist() == expected.tolist()
    assert_close(scores, expected_scores, atol=2e-3, rtol=1e-3)
    if offloading:
        ours = [layer for layer in cache.layers if isinstance(layer, MalaLayer)]
        assert any(layer._store.buffers[2].device.type == "cpu" for layer in ours)

# SPDX-License-Identifier: Apache-2.0
"""MalaCache: what DynamicCache does, with an INT8 plane that stays that of the keys, and buffers that are not copied per token."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import transformers as hf
from decode_calls import Calls, record_calls
from models import CACHE, NOISE, SMALL_TILE, attention, padding, tiny, tokens
from torch.testing import assert_close
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import mala_hf
from mala_hf import MalaCache
from mala_hf.cache import MalaLayer
from mala_hf.ops import quantize_keys

pytestmark = pytest.mark.transformers

PROMPT, NEW = 20, 8
FORM = "int8_two_pass"


@pytest.fixture
def calls(monkeypatch) -> Calls:
    return record_calls(monkeypatch)


def states(batch: int, new: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (batch, 2, new, 16)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, new, 16, generator=generator), torch.randn(batch, 2, new, 16, generator=generator)


def assert_like(cache: MalaCache, expected: hf.DynamicCache) -> None:
    """Equal keys and values; and the plane is that of the keys."""
    assert cache.get_seq_length() == expected.get_seq_length()
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        if other.get_seq_length() == 0:
            assert layer.get_seq_length() == 0
            continue
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, other.values)
        again = quantize_keys(layer.keys.transpose(1, 2))
        for x, fresh in zip(layer._store.views()[2:], again.tensors, strict=True):
            assert torch.equal(x, fresh)


CHANGES = {
    "nothing": lambda cache: None,
    "crop": lambda cache: cache.crop(-3),
    "crop nothing": lambda cache: cache.crop(0),
    "crop all": lambda cache: cache.crop(-9),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "select by mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
}


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_that_of_the_parent_and_the_plane_follows(change, with_config):
    config = hf.LlamaConfig(num_hidden_layers=2) if with_config else None
    cache, expected = MalaCache(config=config), hf.DynamicCache(config=config)
    for both in (cache, expected):
        for new, seed in ((9, 0), (1, 1)):
            for layer in range(2):
                batch = 3 if seed == 0 or change in ("nothing", "crop nothing", "crop", "crop all", "reorder") else None
                batch = batch or {"repeat": 6, "select": 1, "select by mask": 2}[change]
                both.update(*states(batch, new, seed), layer)
            if seed == 0:
                CHANGES[change](both)
    assert_like(cache, expected)


def test_a_cache_of_another_release_is_cropped_to_a_length_if_its_parent_is():
    layer, parent = MalaLayer(), DynamicLayer()
    for each in (layer, parent):
        each.update(*states(1, 9, 0))
    try:
        parent.crop(4)
    except ValueError:
        with pytest.raises(ValueError, match="positive value"):
            layer.crop(4)
    else:
        layer.crop(4)
    assert layer.get_seq_length() == parent.get_seq_length()
    assert torch.equal(layer.keys, parent.keys)


def test_an_empty_cache_takes_every_change_and_a_reset_one_begins_again():
    cache = MalaCache(config=hf.LlamaConfig(num_hidden_layers=2))
    for change in ("crop", "reorder", "repeat", "select"):
        CHANGES[change](cache)
    assert cache.get_seq_length() == 0
    assert cache.memory().total == 0
    cache.update(*states(3, 9, 0), 0)
    cache.reset()
    assert (cache.get_seq_length(), cache.memory().total) == (0, 0)
    cache.update(*states(1, 2, 1), 0)
    assert torch.equal(cache.layers[0].keys, states(1, 2, 1)[0])


def test_growth_copies_nothing_for_most_tokens():
    """The buffers move a few times in 400 tokens, and a view is all that a step returns."""
    cache = MalaCache()
    moves, places = 0, None
    for token in range(400):
        keys, values = cache.update(*states(1, 1, token), 0)
        layer = cache.layers[0]
        now = [x.data_ptr() for x in layer._store.buffers]
        moves += now != places
        places = now
        assert [keys.data_ptr(), values.data_ptr()] == now[:2]
        assert keys.shape[2] == token + 1
    assert moves <= 4
    assert layer._store.room <= 1.25 * 400 + 128
    assert_like(cache, hf.DynamicCache([(keys, values)]))


def test_memory_is_that_of_the_tensors_there_are():
    cache = MalaCache(config=hf.LlamaConfig(num_hidden_layers=2))
    for layer in range(2):
        cache.update(*states(3, 100, layer), layer)
    memory = cache.memory()
    assert memory.keys == memory.values == 2 * 3 * 2 * 100 * 16 * 4
    assert memory.plane == 2 * 3 * 2 * 100 * (16 + 8)
    assert memory.total == sum(x.nbytes for layer in cache.layers for x in layer._store.buffers)
    assert 0 < memory.reserve < 0.3 * memory.total


def test_layers_of_other_kinds_are_the_parents():
    cache = MalaCache(config=tiny("gemma3").config)
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer, MalaLayer]
    assert all(type(layer) is not MalaLayer for layer in MalaCache(config=tiny("mistral").config).layers)


def test_a_copy_and_a_saved_one_go_on_by_themselves():
    cache = MalaCache(config=hf.LlamaConfig(num_hidden_layers=2))
    for layer in range(2):
        cache.update(*states(2, 9, layer), layer)
    file = io.BytesIO()
    torch.save([(keys.clone(), values.clone()) for keys, values, *_ in cache], file)
    file.seek(0)
    loaded = MalaCache(torch.load(file, weights_only=True))
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    copies = [copy.deepcopy(cache), loaded, torch.load(file, weights_only=False)]
    for other in copies:
        for layer in range(2):
            other.update(*states(2, 1, 7), layer)
    assert cache.get_seq_length() == 9
    expected = hf.DynamicCache()
    for layer in range(2):
        expected.update(*states(2, 9, layer), layer)
        expected.update(*states(2, 1, 7), layer)
    for other in copies:
        assert all(type(layer) is MalaLayer for layer in other.layers)
        assert_like(other, expected)


def test_what_inference_mode_made_goes_on_outside_of_it():
    cache = MalaCache()
    with torch.inference_mode():
        cache.update(*states(1, 5, 0), 0)
    with torch.no_grad():
        keys, _ = cache.update(*states(1, 1, 1), 0)
    assert torch.equal(keys[:, :, :5], states(1, 5, 0)[0])


def test_states_that_do_not_fit_or_require_a_gradient_are_refused():
    cache = MalaCache()
    keys, values = states(2, 3, 0)
    with pytest.raises(ValueError, match=r"torch.no_grad\(\)"):
        cache.update(keys.clone().requires_grad_(), values, 0)
    cache.update(keys, values, 0)
    for other in (states(1, 1, 0), tuple(x.half() for x in states(2, 1, 0))):
        with pytest.raises(ValueError, match="new keys must fit"):
            cache.update(*other, 0)
    assert cache.get_seq_length() == 3


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
    model, ids = tiny(family).cuda(), tokens(2, PROMPT).cuda()
    options = {"mala": {"tau": 1e-6}, "max_new_tokens": 40}
    cache = MalaCache(config=model.config, offloading=offloading)
    got, scores = generate(model, ids, cache, **options)
    expected, expected_scores = generate(model, ids, hf.DynamicCache(config=model.config), **options)
    assert got.tolist() == expected.tolist()
    assert_close(scores, expected_scores, atol=2e-3, rtol=1e-3)
    if offloading:
        ours = [layer for layer in cache.layers if isinstance(layer, MalaLayer)]
        assert any(layer._store.buffers[2].device.type == "cpu" for layer in ours)

# SPDX-License-Identifier: Apache-2.0
"""MalaCache: what DynamicCache does, with an INT8 plane that stays that of the keys, and buffers that are not copied per token."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import transformers as hf
from mala_caches import assert_like
from models import tiny
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from mala_hf import MalaCache
from mala_hf.cache import MalaLayer

pytestmark = pytest.mark.transformers


def states(batch: int, new: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (batch, 2, new, 16)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, new, 16, generator=generator), torch.randn(batch, 2, new, 16, generator=generator)


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

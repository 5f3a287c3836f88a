# SPDX-License-Identifier: Apache-2.0
"""A MalaCache that offloads: no layer is read, written or freed while another stream still works on it, whatever the release allows."""

from __future__ import annotations

import weakref

import pytest
import torch
import transformers as hf
from models import tiny, tokens
from offloading import Layer, Machine, Stream, late

from mala_hf import MalaCache
from mala_hf.growing import GrowingTensors

pytestmark = pytest.mark.transformers


def run_steps(cache, number: int) -> None:
    """Each layer is updated and read, in order, by the stream that is current."""
    for _ in range(number):
        for index, layer in enumerate(cache.layers):
            keys, users = cache.update(torch.empty(1), torch.empty(1), index)
            layer.attend(users)
            del keys


def reporting_cache(machine: Machine, num_layers: int) -> MalaCache:
    """A cache of layers that report."""
    cache = MalaCache(config=hf.LlamaConfig(num_hidden_layers=num_layers), offloading=True)
    cache.layers = [Layer(machine, index) for index in range(num_layers)]
    return cache


@pytest.fixture(params=[False, True], ids=["default stream", "own stream"])
def machine(request, monkeypatch) -> Machine:
    return Machine(monkeypatch, request.param)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_all_work_on_a_layer_is_in_order_and_memory_is_given_back_after_it(num_layers, machine):
    cache = reporting_cache(machine, num_layers)
    run_steps(cache, 3)
    assert machine.faults == []


def test_streams_that_do_not_wait_are_caught(machine, monkeypatch):
    """Else the tests of this page would see nothing."""
    monkeypatch.setattr(Stream, "wait_stream", lambda *_: None)
    run_steps(reporting_cache(machine, 2), 3)
    kinds = {fault.split(" layer ")[0] for fault in machine.faults}
    assert kinds >= {"prefetch of", "update of", "memory of"}


READS = {
    "iteration": lambda cache: list(cache) and [layer.read() for layer in cache.layers],
    "reset": lambda cache: cache.reset(),
    "reorder": lambda cache: cache.reorder_cache(None),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(None),
}


@pytest.mark.parametrize("read", READS)
def test_what_reads_layers_between_steps_waits_for_copies_under_way(read, machine):
    cache = reporting_cache(machine, 2)
    run_steps(cache, 2)
    READS[read](cache)
    run_steps(cache, 1)
    assert machine.faults == []


def test_the_plane_too_is_held_until_the_streams_have_met(machine, monkeypatch):
    def copy(store, device):
        store.buffers = [x.clone() for x in store.buffers]

    monkeypatch.setattr(GrowingTensors, "to", copy)
    cache = MalaCache(config=hf.LlamaConfig(num_hidden_layers=2), offloading=True)
    states = torch.randn(1, 2, 3, 16)
    for index in (0, 1):
        cache.update(states, states, index)
    back = [weakref.ref(x) for x in cache.layers[0]._store.buffers]
    cache.update(states, states, 0)
    assert len(back) == 5
    assert all(x() is not None for x in back)
    cache.update(states, states, 1)
    assert all(x() is None for x in back)


def generate(model, ids, cache, **options):
    model.set_attn_implementation("mala")
    model.config.mala = {"tau": 1e-6}  # nothing is skipped
    return model.generate(ids, past_key_values=cache, do_sample=False, **options).tolist()


WAYS = {"greedy": {}, "beam search": {"num_beams": 3}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_offloading_cache_generates_what_another_does(family, way, machine):
    """Without a GPU nothing moves: that all calls of ``generate`` find what they need."""
    model, ids = tiny(family), tokens(2, 20)
    options = {"max_new_tokens": 8, **WAYS[way]}
    got = generate(model, ids, MalaCache(config=model.config, offloading=True), **options)
    assert got == generate(model, ids, hf.DynamicCache(config=model.config), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_on_a_gpu_that_is_late_an_offloading_cache_generates_what_another_does(family, way, own_stream):
    """Of two layers each is on its way to the CPU when it is wanted back; buffers grow once."""
    model, ids = tiny(family).cuda(), tokens(2, 20).cuda()
    options = {"max_new_tokens": 120, **WAYS[way]}
    expected = generate(model, ids, MalaCache(config=model.config), **options)
    torch.cuda.synchronize()
    with late(model), torch.cuda.stream(torch.cuda.Stream() if own_stream else None):
        got = generate(model, ids, MalaCache(config=model.config, offloading=True), **options)
    assert got == expected

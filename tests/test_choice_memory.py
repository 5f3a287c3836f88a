# SPDX-License-Identifier: Apache-2.0
"""What "auto" remembers of a look at an earlier call: whose it was, for how long, and where nothing may be remembered."""

from __future__ import annotations

import pytest
import torch
from models import tiny, tokens

from mala_hf.ops import attend as attend_module
from mala_hf.ops import call_options, choice_memory, discover_choice, discover_probe, mala_attn_func
from mala_hf.ops.choice_memory import REPEATS, ChoiceMemory, asked_by, memory_key, remembers
from mala_hf.ops.query_tile import Settings
from mala_hf.ops.visibility import fixed_sequences
from mala_hf.ops.work import Choice

ALL = ("fused", "int8", "dense")
DENSE, FUSED = [Choice("dense", "flat")], [Choice("fused", "peaked")]
LENGTH = 8192


class Looks:
    """Stands in for the look: counts of a call that retains ``fraction``, and how often it was asked."""

    def __init__(self, fraction: float = 1.0, heads: int = 2):
        self.fraction, self.heads, self.number = fraction, heads, 0

    def __call__(self, *_) -> torch.Tensor:
        self.number += 1
        return torch.tensor([[round(1000 * self.fraction), 1000]] * self.heads)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    found = Looks()
    monkeypatch.setattr(discover_probe, "sampled_counts", found)
    monkeypatch.setattr(discover_choice, "is_measured", lambda device: True)
    return found


def chosen(memory: ChoiceMemory | None, length: int = LENGTH, may_be=ALL, **numbers) -> Choice:
    """What "auto" does with a call of that length, which is never computed."""
    q, k = (torch.empty(1, length, heads, 128, device="meta") for heads in (4, 2))
    settings = Settings(
        **{"tau": 1.0, "softmax_scale": 0.1, "window": (-1, 0), "softcap": 0.0, "tile": (64, 128)} | numbers
    )
    return discover_choice.choose(q, k, settings, fixed_sequences(1, length, length, 0), may_be, memory)[0]


def test_a_layer_in_training_mode_remembers_nothing_whatever_the_tensors_say():
    layer, x = torch.nn.Identity(), torch.empty(1)
    with torch.no_grad():
        assert remembers(x)
        with asked_by(layer.train()):
            assert not remembers(x)
            with asked_by(layer.eval()):
                assert remembers(x)
            assert not remembers(x)
        assert remembers(x)
    assert not remembers(x.requires_grad_())


def test_a_choice_is_recalled_so_often_and_in_a_graph_without_counting():
    memory = ChoiceMemory()
    assert memory.recall(("a",)) is None
    memory.store(("a",), DENSE)
    assert [memory.recall(("a",)) for _ in range(REPEATS)] == [DENSE] * (REPEATS - 1) + [None]
    assert [memory.recall(("a",), counts=False) for _ in range(3)] == [DENSE] * 3
    assert memory.recall(("b",), counts=False) is None
    memory.store(("a",), FUSED)
    assert memory.recall(("a",)) == FUSED


def test_what_was_stored_first_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(choice_memory, "MAX_ENTRIES", 2)
    memory = ChoiceMemory()
    for name in "aba":
        memory.store((name,), DENSE)
    memory.store(("c",), DENSE)
    assert [memory.recall((name,)) is None for name in "abc"] == [False, True, False]


def test_short_calls_go_the_way_of_the_one_that_was_looked_at(looks):
    memory = ChoiceMemory()
    ways = [chosen(memory) for _ in range(REPEATS)]
    assert looks.number == 1
    assert {choice.way for choice in ways} == {"dense"}
    assert "in an earlier call" not in ways[0].reason
    assert all(choice.reason == f"{ways[0].reason}, in an earlier call" for choice in ways[1:])
    looks.fraction = 0.01
    assert chosen(memory).way == "fused"  # looked at again; INT8 does not pay at this length
    assert looks.number == 2


def test_other_layers_lengths_and_settings_are_looked_at_for_themselves(looks):
    memory, layers = ChoiceMemory(), [object(), object()]
    for layer in layers:
        with asked_by(layer):
            chosen(memory)
    calls = [{}, {"length": 4096}, {"tau": 10.0}, {"softmax_scale": 0.2}, {"may_be": ("fused", "dense")}]
    for call in calls:
        chosen(memory, **call)
    assert looks.number == len(layers) + len(calls)
    with asked_by(layers[1]):
        chosen(memory, length=LENGTH + 100)
    assert looks.number == len(layers) + len(calls)  # a length like one that was seen


@pytest.mark.parametrize(
    ("memory", "options"),
    [(None, {}), (ChoiceMemory(), {"may_be": ("fused", "int8")}), (ChoiceMemory(), {"length": 2047, "may_be": ("fused", "int8")})],
    ids=["no memory", "never dense", "short"],
)  # fmt: skip
def test_no_short_call_is_looked_at_where_it_could_not_be_dense_or_remembered(looks, memory, options):
    assert chosen(memory, **options).way == "fused"
    assert looks.number == 0


@pytest.mark.parametrize(("fraction", "way"), [(0.01, "int8"), (0.3, "fused"), (1.0, "dense")])
def test_calls_long_enough_for_int8_are_remembered_too(looks, fraction, way):
    memory, looks.fraction = ChoiceMemory(), fraction
    assert [chosen(memory, 16384).way for _ in range(REPEATS)] == [way] * REPEATS
    assert looks.number == 1
    assert [chosen(None, 16384).way for _ in range(3)] == [way] * 3
    assert looks.number == 4


def test_long_calls_are_looked_at_each_time_and_remembered_for_graphs(looks, monkeypatch):
    memory = ChoiceMemory()
    assert [chosen(memory, 32768).way for _ in range(3)] == ["dense"] * 3
    assert looks.number == 3
    monkeypatch.setattr(discover_choice, "is_capturing", lambda: True)
    assert [chosen(memory, 32768).way for _ in range(REPEATS + 1)] == ["dense"] * (REPEATS + 1)
    assert chosen(memory, 131072).reason == "a CUDA graph cannot look at scores before it chooses"
    assert looks.number == 3


def test_a_graph_takes_heads_apart_as_an_earlier_call_did(looks, monkeypatch):
    memory = ChoiceMemory()
    settings = Settings(1.0, 0.1, (-1, 0), 0.0, (64, 128))
    q, k = (torch.empty(1, 32768, heads, 128, device="meta") for heads in (4, 2))
    sequences = fixed_sequences(1, 32768, 32768, 0)
    apart = [Choice("fused", "peaked", (0,)), Choice("dense", "flat", (1,))]
    memory.store(memory_key(q, k, settings, sequences, ALL), apart)
    monkeypatch.setattr(discover_choice, "is_capturing", lambda: True)
    found = discover_choice.choose(q, k, settings, sequences, ALL, memory)
    assert [(choice.way, choice.kv_heads) for choice in found] == [("fused", (0,)), ("dense", (1,))]


def test_nothing_is_remembered_where_a_gradient_is_taken(looks, monkeypatch):
    monkeypatch.setattr(call_options, "hands_over", lambda q: True)
    monkeypatch.setattr(discover_choice, "SHORT", 0)
    monkeypatch.setattr(attend_module, "memory", ChoiceMemory())
    q, k, v = (torch.randn(1, 40, heads, 16) for heads in (4, 2, 2))
    for takes_gradient, way in ((True, "fused"), (False, "dense"), (True, "fused")):
        work = mala_attn_func(q.requires_grad_(takes_gradient), k, v, causal=True, return_work=True)[1]
        assert work.choice == way
    with torch.no_grad():
        assert mala_attn_func(q, k, v, causal=True, return_work=True)[1].choice == "dense"
    assert looks.number == 1


@pytest.mark.transformers
def test_every_layer_of_a_model_has_a_memory_of_its_own(monkeypatch):
    asked = []
    choose = attend_module.choose
    monkeypatch.setattr(
        attend_module, "choose", lambda *args: asked.append(choice_memory._layer.get()) or choose(*args)
    )
    monkeypatch.setattr(call_options, "hands_over", lambda q: True)
    model = tiny("llama", attention="mala")
    with torch.no_grad():
        for _ in range(2):
            model(tokens(1, 30), use_cache=False)
    assert asked == [id(layer.self_attn) for layer in model.model.layers] * 2
    assert choice_memory._layer.get() is None

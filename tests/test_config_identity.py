# SPDX-License-Identifier: Apache-2.0
"""A ``MalaConfig`` never changes, so that it can be in a set and a key of a cache: equal ones have equal hashes."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import asdict, replace
from functools import lru_cache
from operator import ior

import pytest

from mala_hf import MalaConfig

pytestmark = pytest.mark.transformers

HEADS = {"0-3": 0.1, 7: "sdpa", -1: {"window": 9}}
LAYERS = {0: "sdpa", "2-5": 0.5, -1: {"tau": 1, "heads": HEADS, "window": 64}}
FULL = MalaConfig(tau=0.5, layers=LAYERS, tile=(4, 4), save_support=False, deterministic=True, discovery="fused")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (MalaConfig(), MalaConfig()),
        (MalaConfig(tau=1), MalaConfig(tau=1.0, layers={})),
        (FULL, MalaConfig.from_dict(json.loads(json.dumps(FULL.to_dict())))),
        (MalaConfig(layers={0: 1, 3: "sdpa"}), MalaConfig(layers={"3": "sdpa", "0": 1.0})),
        (MalaConfig(tile=[8, 8]), MalaConfig(tile=(8, 8))),
    ],
    ids=["defaults", "int and float", "JSON", "order and strings", "tile"],
)
def test_equal_settings_are_one_element_of_a_set(one, other):
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1


def test_each_field_tells_settings_apart():
    others = [
        {"tau": 2.0},
        {"layers": LAYERS | {0: 1.0}},
        {"layers": LAYERS | {-1: {"tau": 1, "heads": HEADS | {7: 1.0}, "window": 64}}},
        {"tile": None},
        {"save_support": True},
        {"deterministic": False},
        {"discovery": "auto"},
        {"kernel": "org/name"},
    ]
    assert len({FULL, *(replace(FULL, **other) for other in others)}) == 1 + len(others)


def test_a_cached_function_takes_settings():
    seen = []
    cached = lru_cache(lambda settings: seen.append(settings) or len(seen))
    assert [cached(FULL), cached(MalaConfig()), cached(replace(FULL))] == [1, 2, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda settings: settings.__setitem__(1, 0.5),
        lambda settings: settings.__delitem__(0),
        lambda settings: settings.pop(0),
        lambda settings: settings.popitem(),
        lambda settings: settings.clear(),
        lambda settings: settings.update({1: 0.5}),
        lambda settings: settings.setdefault(1, 0.5),
        lambda settings: ior(settings, {1: 0.5}),
        lambda settings: settings[-1].update(tau=2.0),
        lambda settings: settings[-1]["heads"].pop(7),
    ],
)
def test_settings_that_were_hashed_do_not_change(change):
    before = hash(FULL)
    with pytest.raises(TypeError, match="cannot be changed: make another one"):
        change(FULL.layers)
    assert hash(FULL) == before
    assert FULL.layers == LAYERS


def test_what_the_user_gave_stays_the_users():
    heads = dict(HEADS)
    config = MalaConfig(layers={0: {"heads": heads}})
    heads[7] = 3.0
    assert config.layers[0]["heads"][7] == "sdpa"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_are_equal(copied):
    assert copied(FULL) == FULL
    assert hash(copied(FULL)) == hash(FULL)
    assert copied(FULL).layers == LAYERS


def test_the_plain_forms_are_for_whoever_wants_to_change_them():
    plain = FULL.to_dict()
    plain["layers"]["-1"]["heads"]["7"] = 1.0
    assert type(plain["layers"]) is dict
    assert asdict(FULL)["layers"] == LAYERS

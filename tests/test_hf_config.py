# SPDX-License-Identifier: Apache-2.0
"""MALA's settings: what is accepted, and that they travel with a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers as hf
from models import CACHE, SMALL_TILE, attention, logits, tiny, tokens

import mala_hf
from mala_hf import MalaConfig
from mala_hf.ops import call_options, operators
from mala_hf.patch import check_discovery

pytestmark = pytest.mark.transformers

SETTINGS = MalaConfig(
    tau=0.5, layers={0: "sdpa", 1: 2.0}, tile=(4, 4), save_support=False, deterministic=True, discovery="fused"
)
BY_HEAD = MalaConfig(
    layers={
        "0-1": "sdpa",
        -1: {"tau": 0.1},
        "5-": {"heads": {"0-3": 0.1, 7: "sdpa", -1: {"window": 9}}, "window": 4096},
    }
)


@pytest.mark.parametrize("wrong", [np.float32(1), np.ones(3), torch.tensor(1.0), "1", True], ids=repr)
def test_a_tau_that_is_no_python_number_is_called_so(wrong):
    for settings in ({"tau": wrong}, {"layers": {0: wrong}}, {"layers": {0: {"heads": {1: {"tau": wrong}}}}}):
        with pytest.raises(
            ValueError, match=rf"a Python number \(int or float\), got .* of type {type(wrong).__name__}"
        ):
            MalaConfig(**settings)


def test_a_tau_of_hundreds_of_digits_is_refused_without_them():
    for settings in ({"tau": 10**400}, {"layers": {0: 10**5000}}):
        with pytest.raises(ValueError, match=r"^.{0,60}, got an integer beyond the range of floats$"):
            MalaConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tau": -1}, "tau"),
        ({"tau": float("nan")}, "tau"),
        ({"tau": float("inf")}, "tau"),
        ({"tau": "1"}, "tau"),
        ({"tau": True}, "tau"),
        ({"layers": [1.0, 1.0]}, "mapping"),
        ({"layers": {"first": 1.0}}, "a layer is named by an index"),
        ({"layers": {1.5: 1.0}}, "a layer is named by an index"),
        ({"layers": {True: 1.0}}, "a layer is named by an index"),
        ({"layers": {"2*": 1.0}}, "a layer is named by an index"),
        ({"layers": {"01": 1.0}}, "a layer is named by an index"),
        ({"layers": {"-0": 1.0}}, "a layer is named by an index"),
        ({"layers": {"1 - 2": 1.0}}, "a layer is named by an index"),
        ({"layers": {"3-1": 1.0}}, "names none"),
        ({"layers": {1: 1.0, "1": 1.0}}, "layer 1 is named twice"),
        ({"layers": {"0-3": 1.0, 2: 1.0}}, "layer 2 is named twice: by '0-3' and by 2"),
        ({"layers": {0: {}}}, r"layers\[0\] may set"),
        ({"layers": {0: {"tua": 1.0}}}, r"layers\[0\] may set"),
        ({"layers": {0: {"tau": None}}}, r"layers\[0\]"),
        ({"layers": {0: {"window": 0}}}, r"window of layers\[0\]"),
        ({"layers": {0: {"window": 4.0}}}, r"window of layers\[0\]"),
        ({"layers": {0: {"heads": [0.5]}}}, "heads must be a mapping"),
        ({"layers": {0: {"heads": {"x": 0.5}}}}, "a head is named by an index"),
        ({"layers": {0: {"heads": {0: -1}}}}, r"layers\[0\], heads\[0\]"),
        ({"layers": {0: {"heads": {0: {"heads": {0: 1}}}}}}, r"layers\[0\], heads\[0\] may set"),
        ({"layers": {0: {"heads": {0: 1.0, "0-1": 1.0}}}}, "head 0 is named twice"),
        ({"tau": {"window": 4}}, "tau"),
        ({"layers": {0: "dense"}}, r"layers\[0\]"),
        ({"layers": {0: -0.1}}, r"layers\[0\]"),
        ({"tile": 64}, "tile"),
        ({"tile": (64, 48)}, "tile"),
        ({"tile": (64, 64, 64)}, "tile"),
        ({"save_support": 1}, "save_support"),
        ({"discovery": "fp8"}, "discovery"),
        ({"discovery": None}, "discovery"),
        ({"deterministic": None}, "deterministic"),
        ({"kernel": "mala-flash-attn"}, "org/name"),
        ({"kernel": "org/name:function"}, "org/name"),
        ({"kernel": 1}, "org/name"),
    ],
)
def test_a_wrong_setting_is_named_in_the_error(settings, said):
    with pytest.raises(ValueError, match=said):
        MalaConfig(**settings)


def test_a_config_survives_json():
    assert MalaConfig.from_dict(json.loads(json.dumps(SETTINGS.to_dict()))) == SETTINGS
    assert MalaConfig.from_dict(MalaConfig().to_dict()) == MalaConfig()
    assert MalaConfig.from_dict(json.loads(json.dumps(BY_HEAD.to_dict()))) == BY_HEAD


def test_the_form_with_single_indices_is_the_same_as_ever():
    assert SETTINGS.to_dict()["layers"] == {"0": "sdpa", "1": 2.0}
    assert MalaConfig(layers={"0": "sdpa", "1": 2.0}).layers == {0: "sdpa", 1: 2.0}


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValueError, match="tua"):
        MalaConfig.from_dict({"tua": 1.0})


def test_the_defaults_are_tau_one_everywhere():
    assert MalaConfig() == MalaConfig(
        tau=1.0, layers={}, tile=None, save_support=None, deterministic=False, discovery="auto", kernel=None
    )
    assert MalaConfig().to_dict() == {"tau": 1.0}
    assert MalaConfig(layers=None) == MalaConfig()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3", "gpt_oss", "phi3"])
def test_settings_are_saved_and_loaded_with_the_model(family, tmp_path):
    settings = SETTINGS if family != "gpt_oss" else MalaConfig(tau=0.5, layers={1: 2.0}, tile=(4, 4))
    model = tiny(family, peaked=4)
    inputs = {"input_ids": tokens(2, 40)}
    expected = logits(model, "mala", inputs, **settings.to_dict())
    mala_hf.patch_model(model, settings).save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="mala")
    assert loaded.config.mala == settings.to_dict()
    with torch.no_grad():
        assert torch.equal(loaded(**inputs, use_cache=False).logits, expected)
    assert not torch.equal(logits(model, "mala", inputs, tau=0), expected)


def test_a_checkpoint_with_settings_loads_where_this_package_is_not_imported(tmp_path):
    model = tiny("llama")
    ids = tokens(1, 9)
    expected = logits(model, "sdpa", {"input_ids": ids})
    mala_hf.patch_model(model, SETTINGS).save_pretrained(tmp_path / "model")
    torch.save((ids, expected), tmp_path / "expected.pt")
    code = f"""
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r})
ids, expected = torch.load({str(tmp_path / "expected.pt")!r})
assert model.config._attn_implementation == "sdpa" and not any(name.startswith("mala_hf") for name in sys.modules)
assert torch.equal(model(ids, use_cache=False).logits, expected)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_each_layer_follows_its_own_setting():
    model = tiny("llama", peaked=4)
    model.config.mala = MalaConfig(tau=1.0, layers={0: "sdpa"}, tile=SMALL_TILE).to_dict()
    model.set_attn_implementation("mala")
    with mala_hf.record_work(model) as report:
        model(tokens(1, 40))
    assert report.layers[0].is_dense
    assert report.layers[0].impls == {"sdpa"}
    assert report.layers[1].tau == 1
    assert report.layers[1].work_fraction.min() < 1
    model.config.mala = MalaConfig(tau=1.0, layers={1: 0}, tile=SMALL_TILE).to_dict()
    with mala_hf.record_work(model) as report:
        model(tokens(1, 40))
    assert report.layers[0].work_fraction.min() < 1
    assert report.layers[1].work_fraction.tolist() == [1] * 4


@pytest.mark.parametrize(
    "settings",
    [
        {"tau": None}, {"tau": True}, {"layers": {"0": None}}, {"layers": {"2": 0.1}}, {"layers": {"00": 0.5}},
        {"layers": [0.5]}, {"tile": 16}, {"taus": 1.0}, {"layers": {"-3": 0.1}}, {"layers": {"0-2": 0.1}},
        {"layers": {"0": 0.1, "-2": 0.1}}, {"layers": {"0-": 0.1, "*": 0.2}}, {"tau": "sdpa"}, {"layers": {"1": {}}},
        {"layers": {"*": {"heads": {"4": 0.1}}}}, {"layers": {"*": {"heads": {"-1": 0.1, "3-": 0.2}}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_written_by_hand_is_refused_where_it_would_be_ignored_or_run_dense(settings):
    model = tiny("llama")
    model.config.mala = settings
    model.set_attn_implementation("mala")
    with pytest.raises(ValueError, match=r"config\.mala"):
        model(tokens(1, 8))


@pytest.mark.parametrize("settings", [{"save_support": 1}, {"deterministic": None}], ids=str)
def test_a_flag_written_by_hand_must_be_one(settings):
    model = tiny("llama")
    model.config.mala = settings
    model.set_attn_implementation("mala")
    with pytest.raises(ValueError, match=next(iter(settings))):
        model(tokens(1, 8))


def test_discovery_reaches_the_kernels_of_a_prefill_and_leaves_decoding_alone(monkeypatch):
    model, ids = mala_hf.patch_model(tiny("llama"), MalaConfig(discovery="dense")), tokens(1, 40)
    with mala_hf.record_work(model) as report:
        found = model.generate(ids, max_new_tokens=3, do_sample=False)
    (dense, fused), rows = zip(*sorted(report.layers[0].choices.items()), strict=True)
    assert dense == ("dense", "asked for; cpu")
    assert fused[0] == "fused"
    assert rows == (1, 2)  # the prompt; two steps
    assert "dense 2 times: asked for" in str(report)
    assert report.to_dict()["layers"][0]["choices"][0] == {"way": "dense", "reason": "asked for; cpu", "calls": 1}
    with attention(model, "eager"):
        assert model.generate(ids, max_new_tokens=3, do_sample=False).tolist() == found.tolist()


@pytest.mark.parametrize("discovery", ["fused", "dense", "auto"])
def test_steps_leave_no_tile_untested_unless_auto_may_choose(discovery, monkeypatch):
    # as on a GPU, where a step over a short cache may be dense
    monkeypatch.setattr(call_options, "hands_over", lambda q: True)
    model, ids = mala_hf.patch_model(tiny("llama"), MalaConfig(discovery=discovery)), tokens(1, 40)
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    with mala_hf.record_work(model) as work:
        model(ids[:, -1:], **{CACHE: cache})
    ways = {way for layer in work.layers.values() for way, _ in layer.choices}
    assert ways == ({"dense"} if discovery == "auto" else {"fused"})


@pytest.mark.parametrize("discovery", ["int8", "auto", "fused", "dense"])
def test_a_discovery_that_no_device_here_can_run_is_refused_at_once(discovery, monkeypatch):
    model, settings = tiny("llama"), MalaConfig(discovery=discovery)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if discovery == "int8":
        with pytest.raises(ValueError, match=r"the model lies on cpu\. Use MalaConfig\(discovery='auto'\)"):
            mala_hf.patch_model(model, settings)
        assert model.config._attn_implementation != "mala"
    else:
        mala_hf.patch_model(model, settings)
    mala_hf.patch_model(model.to("meta"), settings)  # wherever its weights will be


@pytest.mark.parametrize(
    ("devices", "has_gpu", "runs"),
    [
        ("cpu", True, True),  # until it is moved
        ("cuda", True, True),
        ("cpu cuda", True, True),  # offloaded: they are moved when they are used
        ("meta", False, True),
        ("cpu meta", False, False),
        ("mps", False, False),
        ("xpu", True, False),
    ],
    ids=str,
)
def test_int8_is_refused_where_the_weights_can_be_on_no_gpu(devices, has_gpu, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    if runs:
        check_discovery(MalaConfig(discovery="int8"), set(devices.split()))
    else:
        with pytest.raises(ValueError, match="int8"):
            check_discovery(MalaConfig(discovery="int8"), set(devices.split()))


def test_a_discovery_that_does_not_cover_a_layer_is_refused_with_the_way_out():
    model = mala_hf.patch_model(tiny("llama"))
    model.config.mala = {"discovery": "int8"}  # as a checkpoint is loaded
    with pytest.raises(
        ValueError,
        match=r"'int8' does not cover impl='blockwise' on cpu.*[^.]\. Use discovery='auto' \(for a model: MalaConfig\([^.]*\.$",
    ):
        model(tokens(1, 8))
    model.config.mala = {"discovery": "fp8"}
    with pytest.raises(ValueError, match=r"config\.mala.*discovery"):
        model(tokens(1, 8))


def test_an_unknown_setting_is_refused_as_the_docstring_says():
    """By keyword as Python does it, in a dict, of a checkpoint or of the context manager, as a wrong value is."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        MalaConfig(foo=1)
    with pytest.raises(ValueError, match=r"unknown settings \['foo'\]"):
        MalaConfig.from_dict({"foo": 1})
    with pytest.raises(ValueError, match=r"unknown settings \['foo'\]"), mala_hf.mala_attention(tiny("llama"), foo=1):
        pytest.fail("the block ran")


@pytest.mark.parametrize(("saves", "tile"), [(True, (1, 1)), (False, (4, 4))])
def test_a_model_saves_its_support_as_its_settings_say(saves, tile, monkeypatch):
    """Left alone, it is saved where it is small; gradients are the same."""
    saved, forward = [], operators.run_forward
    monkeypatch.setattr(operators, "run_forward", lambda *call: saved.append((out := forward(*call))[4].numel()) or out)
    gradients = []
    for settings in ({}, {"save_support": saves, "deterministic": True}):
        model = mala_hf.patch_model(tiny("llama", peaked=4).train(), MalaConfig(tile=tile, **settings))
        ids = tokens(1, 40)
        model(ids, labels=ids).loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    assert [bool(words) for words in saved] == [not saves, not saves, saves, saves]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))

# SPDX-License-Identifier: Apache-2.0
"""What a converted config says, and code of a checkpoint's own, which runs only if asked."""

from __future__ import annotations

import json
import shutil

import pytest
import transformers as hf
from models import HEAD_DIM, SMALL, WINDOW

from mala_hf import MalaConfig, convert
from mala_hf.convert_config import auto_map_of, converted_config


def composite():
    text = {**SMALL, **HEAD_DIM, "sliding_window": WINDOW}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return hf.Gemma3Config(text_config=text, vision_config=vision)


@pytest.mark.transformers
def test_a_composite_model_has_the_settings_in_its_text_part_alone():
    config = composite()
    raw = json.loads(config.to_json_string())
    found = converted_config(raw, config, MalaConfig(tau=0.5))
    assert found["text_config"].pop("mala") == {"tau": 0.5}
    assert found == raw
    mapped, code = auto_map_of(config)
    assert "AutoModelForImageTextToText" in mapped
    assert '{"text_config": "mala"}' in code


def test_a_name_of_an_attention_implementation_does_not_stay_in_the_config():
    config = hf.LlamaConfig(**SMALL)
    raw = json.loads(config.to_json_string())
    named = raw | {"attn_implementation": "mala", "_attn_implementation": "mala_reference"}
    assert converted_config(named, config, MalaConfig()) == raw | {"mala": {"tau": 1.0}}
    assert (
        converted_config(raw | {"attn_implementation": "eager"}, config, MalaConfig())["attn_implementation"] == "eager"
    )


def test_auto_map_needs_a_model_class_of_transformers():
    config = hf.LlamaConfig(**SMALL)
    config.auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    with pytest.raises(ValueError, match=r"its code is its own, modeling_own"):
        auto_map_of(config)
    with pytest.raises(ValueError, match="no automatic class loads it"):
        auto_map_of(hf.SiglipVisionConfig())


OWN = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({ran!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.filterwarnings("ignore:MALA is not tested with models of the type 'own'")
def test_remote_code_is_not_run_unless_asked_for(place, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    checkpoint, ran = shutil.copytree(place / "tiny", tmp_path / "remote"), tmp_path / "ran"
    (checkpoint / "own.py").write_text(OWN.format(ran=str(ran)))
    config = json.loads((checkpoint / "config.json").read_text()) | {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"trust_remote_code|custom code"):
        convert(checkpoint, tmp_path / "out", dry_run=True)
    assert not ran.exists()
    assert "own.py" in convert(checkpoint, tmp_path / "out", dry_run=True, trust_remote_code=True)["others"]
    assert ran.exists()
    with pytest.raises(ValueError, match=r"its code is its own, own\.OwnForCausalLM"):
        convert(checkpoint, tmp_path / "out", dry_run=True, trust_remote_code=True, auto_map=True)

# SPDX-License-Identifier: Apache-2.0
"""``config.json`` of a converted checkpoint: the source's, with MALA's settings where the text layers read them.

Nothing else that needs this package goes in: a name of an attention implementation there would stop the checkpoint from loading
where the package is not imported.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import transformers

from .config import MalaConfig
from .registration import NAME, REFERENCE_NAME

MODELING = "modeling_mala"
AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText")
IMPLEMENTATION_KEYS = ("attn_implementation", "_attn_implementation")
CODE = '''\
# SPDX-License-Identifier: Apache-2.0
"""{architecture} with MassAlloc Attention, for whatever loads with trust_remote_code=True. Needs the package mala-hf."""

import mala_hf  # noqa: F401  registers "mala"
from transformers import {architecture}


class Mala{architecture}({architecture}):
    """Runs MALA with the settings in the config, unless another attention implementation is asked for."""

    def __init__(self, config, *inputs, **kwargs):
        if config._attn_implementation is None:
            config._attn_implementation = {choice}
        super().__init__(config, *inputs, **kwargs)
'''


def text_config_key(config: Any) -> str:
    """Return the name of the text layers' config among a Transformers config's parts, "" if it is the config itself."""
    text_config = config.get_text_config()
    return next((key for key in config.sub_configs if getattr(config, key, None) is text_config), "")


def attention_choice(config: Any) -> str | dict[str, str]:
    """Return the ``attn_implementation`` that runs the text layers, and no others, with MALA."""
    key = text_config_key(config)
    return {key: NAME} if key else NAME


def converted_config(raw: dict[str, Any], config: Any, settings: MalaConfig) -> dict[str, Any]:
    """Return ``config.json``, which Transformers reads as ``config``, with the settings in the text layers' part.

    Raises ``RuntimeError`` if Transformers would not read them back.
    """
    found = copy.deepcopy(raw)
    key = text_config_key(config)
    part = found.setdefault(key, {}) if key else found
    part["mala"] = settings.to_dict()
    for place in (found, part):
        for name in IMPLEMENTATION_KEYS:
            if place.get(name) in (NAME, REFERENCE_NAME):
                del place[name]
    read = type(config).from_dict(json.loads(json.dumps(found))).get_text_config()
    if getattr(read, "mala", None) != settings.to_dict():
        raise RuntimeError(f"{type(config).__name__} does not keep MALA's settings in {key or 'config.json'}")
    return found


def auto_map_of(config: Any) -> tuple[dict[str, str], str]:
    """Return what ``--auto-map`` adds to ``auto_map`` of ``config.json``, and the module that it names.

    Raises ``ValueError`` for a model whose own code is remote, and one that no automatic class of Transformers loads.
    """
    mappings = {auto: getattr(transformers, auto)._model_mapping for auto in AUTO_CLASSES}
    known = {auto: mapping[type(config)].__name__ for auto, mapping in mappings.items() if type(config) in mapping}
    code_of = getattr(config, "auto_map", None) or {}
    remote = [code_of[auto] for auto in AUTO_CLASSES if not str(code_of.get(auto, MODELING)).startswith(MODELING)]
    if remote or not known:
        reason = f"its code is its own, {remote[0]}" if remote else "no automatic class loads it"
        raise ValueError(
            f"--auto-map needs a model class of Transformers itself, and {config.model_type} has none: {reason}"
        )
    architecture = next(iter(known.values()))
    code = CODE.format(architecture=architecture, choice=json.dumps(attention_choice(config)))
    return {auto: f"{MODELING}.Mala{name}" for auto, name in known.items() if name == architecture}, code

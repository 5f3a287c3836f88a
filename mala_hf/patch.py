# SPDX-License-Identifier: Apache-2.0
"""Switch a loaded model to MALA and back. Nothing of Transformers is replaced: these set what its configs already have a place for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .config import MalaConfig
from .families import warn_unless_tested
from .hub import load_kernel
from .ops.hf_settings import named
from .registration import NAME, REFERENCE_NAME

_BEFORE = "_mala_before"


def patch_model(model: nn.Module, config: MalaConfig | None = None) -> nn.Module:
    """Run the model's text layers with MALA: sets their attention implementation and ``config.mala``; returns ``model``.

    Encoder-decoder models are set as a whole, vision and audio towers of composite models stay as they are. Models that share a config
    object share the setting. Patching a patched model changes its settings. Wrappers (PEFT, ``torch.compile``, DistributedDataParallel)
    are looked through, and weights are never touched: they may be quantised, sharded or offloaded. A compiled model compiles again.

    A kernel that the config names is loaded as :func:`mala_hf.load_kernel` does without options; load it yourself to trust it.

    Warns:
        UserWarning: once for each family that :data:`mala_hf.families.FAMILIES` lacks.

    Raises:
        ValueError: if the model computes its own attention, so that MALA would never run; for layers or heads that it lacks; for a
            discovery that needs a GPU where the model can be on none; for what holds no Transformers model, or several.

    >>> _ = patch_model(model, MalaConfig(tau=1.0, layers={0: "sdpa"}))
    >>> model.config._attn_implementation, model.config.mala
    ('mala', {'tau': 1.0, 'layers': {'0': 'sdpa'}})
    >>> _ = unpatch_model(model)
    >>> model.config._attn_implementation
    'sdpa'
    """
    config = MalaConfig() if config is None else config
    if not isinstance(config, MalaConfig):
        raise ValueError(f"patch_model takes a MalaConfig, got {config!r}")
    inner = _transformers_model(model)
    key, text_config = _text_config(inner)
    _check_can_run(inner, text_config)
    _check_layers(config, text_config)
    check_discovery(config, {parameter.device.type for parameter in inner.parameters()})
    if config.kernel is not None:
        load_kernel(config.kernel)
    warn_unless_tested(text_config)
    before: _Before | None = getattr(inner, _BEFORE, None)
    if before is None:
        setattr(inner, _BEFORE, _Before.of(inner))
    elif not _runs_mala(text_config):  # another attention was chosen since: unpatching goes back to that
        setattr(inner, _BEFORE, replace(before, implementation=text_config._attn_implementation))
    inner.set_attn_implementation({key: NAME})
    text_config.mala = config.to_dict()
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Undo :func:`patch_model`; a model that was not patched stays as it is. Returns ``model``.

    An attention implementation that was chosen after patching stays, too: only the settings in ``config.mala`` are taken back.
    """
    inner = _transformers_model(model)
    before: _Before | None = getattr(inner, _BEFORE, None)
    if before is not None:
        text_config = _text_config(inner)[1]
        if not _runs_mala(text_config):
            before = replace(before, implementation=text_config._attn_implementation)
        before.restore(inner)
        delattr(inner, _BEFORE)
    return model


def check_discovery(config: MalaConfig, devices: set[str]) -> None:
    """Raise ``ValueError`` where the settings' discovery cannot run on a model whose weights lie on these types of devices.

    Weights on "meta" say nothing. Those on "cpu" may be moved to a GPU, by whoever shards them not before they are used; so they are
    refused only where torch sees none.
    """
    lie = devices - {"meta"}
    may_move = lie <= {"cpu"} and torch.cuda.is_available()
    if config.discovery == "int8" and lie and "cuda" not in lie and not may_move:
        raise ValueError(
            f"discovery='int8' runs on a GPU, and the model lies on {', '.join(sorted(lie))}. "
            "Use MalaConfig(discovery='auto'), which takes INT8 where it pays."
        )


@contextmanager
def mala_attention(model: nn.Module, config: MalaConfig | None = None, **settings: Any) -> Iterator[nn.Module]:
    """Patch inside a ``with`` block; what was before is always restored. The settings are the model's, in whatever thread it runs.

    Give a :class:`MalaConfig` or its fields: ``with mala_attention(model, tau=0.5): ...``
    """
    if config is not None and settings:
        raise ValueError(f"give a MalaConfig or its fields, not both: got {config} and {settings}")
    inner = _transformers_model(model)
    before, was_patched = _Before.of(inner), getattr(inner, _BEFORE, None)
    try:
        yield patch_model(model, MalaConfig.from_dict(settings) if config is None else config)
    finally:
        before.restore(inner)
        if was_patched is not None:
            setattr(inner, _BEFORE, was_patched)
        elif hasattr(inner, _BEFORE):
            delattr(inner, _BEFORE)


@dataclass(frozen=True)
class _Before:
    """The text config's attention implementation and its ``mala`` (None: there was none)."""

    implementation: str
    mala: dict[str, Any] | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Before:
        text_config = _text_config(model)[1]
        return cls(text_config._attn_implementation, getattr(text_config, "mala", None))

    def restore(self, model: PreTrainedModel) -> None:
        key, text_config = _text_config(model)
        model.set_attn_implementation({key: self.implementation})
        if self.mala is not None:
            text_config.mala = self.mala
        elif hasattr(text_config, "mala"):
            del text_config.mala


def _runs_mala(text_config: Any) -> bool:
    return text_config._attn_implementation in (NAME, REFERENCE_NAME)


def transformers_models(model: Any) -> list[PreTrainedModel]:
    """The Transformers models in what wraps them, those inside others left out. Raises ``ValueError`` where there is none."""
    found: list[PreTrainedModel] = []
    parts: set[int] = set()
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel) and id(module) not in parts:
            found.append(module)
            parts |= {id(part) for part in module.modules()}
    if not found:
        raise ValueError(f"this takes a Transformers model, or what wraps one, and got a {type(model).__name__}")
    return found


def _transformers_model(model: Any) -> PreTrainedModel:
    """The one Transformers model in what wraps it."""
    found = transformers_models(model)
    if len(found) != 1:
        raise ValueError(
            f"this takes a Transformers model, or what wraps one, and got {len(found)} of them: patch each alone"
        )
    return found[0]


def _text_config(model: PreTrainedModel) -> tuple[str, Any]:
    """The config of the text layers and its name among the sub-configs, "" for the model's own config."""
    text_config = model.config.get_text_config()
    for key in model.config.sub_configs:
        if getattr(model.config, key, None) is text_config:
            return key, text_config
    return "", model.config


def _check_can_run(model: PreTrainedModel, text_config: Any) -> None:
    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is text_config] or [model]
    for part in parts:
        if not part._can_set_attn_implementation():
            raise ValueError(
                f"{type(part).__name__} computes its own attention and never asks Transformers' attention interface, "
                "so it cannot run MALA"
            )


def _check_layers(config: MalaConfig, text_config: Any) -> None:
    """ValueError for layers and heads that the model lacks, or that are named twice."""
    named(tuple(config.layers), getattr(text_config, "num_hidden_layers", None), "layer")
    for setting in config.layers.values():
        if isinstance(setting, Mapping):
            named(tuple(setting.get("heads") or {}), getattr(text_config, "num_attention_heads", None), "head")

# SPDX-License-Identifier: Apache-2.0
"""Switch a loaded model to MALA and back. Nothing of Transformers is replaced: these set what its configs already have a place for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from .config import MalaConfig
from .hub import load_kernel
from .ops.hf_settings import named
from .registration import NAME

_BEFORE = "_mala_before"


def patch_model(model: PreTrainedModel, config: MalaConfig | None = None) -> PreTrainedModel:
    """Run the model's text layers with MALA: sets their attention implementation and ``config.mala``.

    Encoder-decoder models are set as a whole, vision and audio towers of composite models stay as they are.
    Models that share a config object share the setting. Patching a patched model changes its settings.

    A kernel that the config names is loaded as :func:`mala_hf.load_kernel` does without options; load it yourself to trust it.

    Raises:
        ValueError: if the model computes its own attention, so that MALA would never run; or for a layer it does not have.
    """
    config = MalaConfig() if config is None else config
    if not isinstance(model, PreTrainedModel) or not isinstance(config, MalaConfig):
        raise ValueError(
            f"patch_model takes a Transformers model and a MalaConfig, got {type(model).__name__} and {config!r}"
        )
    key, text_config = _text_config(model)
    _check_can_run(model, text_config)
    _check_layers(config, text_config)
    if config.kernel is not None:
        load_kernel(config.kernel)
    if getattr(model, _BEFORE, None) is None:
        setattr(model, _BEFORE, _Before.of(model))
    model.set_attn_implementation({key: NAME})
    text_config.mala = config.to_dict()
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Undo :func:`patch_model`; a model that was not patched stays as it is."""
    before: _Before | None = getattr(model, _BEFORE, None)
    if before is not None:
        before.restore(model)
        delattr(model, _BEFORE)
    return model


@contextmanager
def mala_attention(
    model: PreTrainedModel, config: MalaConfig | None = None, **settings: Any
) -> Iterator[PreTrainedModel]:
    """Patch inside a ``with`` block; what was before is always restored.

    Give a :class:`MalaConfig` or its fields: ``with mala_attention(model, tau=0.5): ...``
    """
    if config is not None and settings:
        raise ValueError(f"give a MalaConfig or its fields, not both: got {config} and {settings}")
    before, was_patched = _Before.of(model), getattr(model, _BEFORE, None)
    try:
        yield patch_model(model, MalaConfig.from_dict(settings) if config is None else config)
    finally:
        before.restore(model)
        if was_patched is None and hasattr(model, _BEFORE):
            delattr(model, _BEFORE)


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

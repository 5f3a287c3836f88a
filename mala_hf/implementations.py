# SPDX-License-Identifier: Apache-2.0
"""The attention implementations of a comparison: names of Transformers, and "mala" once per tau. The first is the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .config import MalaConfig
from .patch import mala_attention
from .registration import NAME


@dataclass(frozen=True)
class Implementation:
    """One column of a comparison; ``tau`` is None for all but "mala", and there for the settings that the model's config holds."""

    name: str
    tau: float | None = None

    @property
    def label(self) -> str:
        """``sdpa`` or ``mala, tau 1``."""
        return self.name if self.tau is None else f"{self.name}, tau {self.tau:g}"


def implementations_of(names: Iterable[str], taus: Iterable[float]) -> list[Implementation]:
    """Return each name in order, "mala" once per tau.

    Raises ``ValueError`` without a name, for one named twice or that Transformers does not know, "mala" without a tau, or a tau that
    MALA refuses.
    """
    names, taus = list(names), list(taus)
    if not names:
        raise ValueError("no attention implementation to evaluate")
    for name in names:
        check_implementation(name)
    for tau in taus:
        MalaConfig(tau=tau)
    if NAME in names and not taus:
        raise ValueError(f'"{NAME}" needs at least one tau')
    found = [
        Implementation(name, None if tau is None else float(tau))
        for name in names
        for tau in (taus if name == NAME else (None,))
    ]
    if len(set(found)) < len(found):
        raise ValueError(f"each implementation once, got {', '.join(one.label for one in found)}")
    return found


def check_implementation(name: str) -> None:
    """Raise ``ValueError`` for a name that Transformers does not know and that cannot be one of the Kernel Hub, ORGANISATION/NAME."""
    known = ("eager", *sorted(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name))
    if name not in known and "/" not in name:
        raise ValueError(f"attention implementations are {', '.join(known)}, got {name!r}")


@contextmanager
def using_implementation(model: Any, name: str, tau: float | None = None) -> Iterator[None]:
    """Run the model with one attention implementation; what was before is always put back.

    "mala" runs with ``tau``, or without one with the settings in the model's config, where there are none with the defaults; and it
    tests every tile: an evaluation of the rule is none of the dense kernels to which ``discovery="auto"`` may hand a call over.
    """
    if name == NAME:
        settings = saved_settings(model) if tau is None else MalaConfig(tau=tau)
        if settings.discovery == "auto":
            settings = replace(settings, discovery="fused")
        with mala_attention(model, settings):
            yield
        return
    original = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(original)


def saved_settings(model: Any) -> MalaConfig:
    """Return the settings in the config of the model's text layers, the defaults where there are none."""
    saved = getattr(model.config.get_text_config(), "mala", None)
    return MalaConfig() if saved is None else MalaConfig.from_dict(saved)

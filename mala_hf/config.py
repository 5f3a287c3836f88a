# SPDX-License-Identifier: Apache-2.0
"""MALA's settings for a model, kept as a plain dict in ``model.config.mala`` so that they travel with the checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .ops.hf import DENSE

KERNEL_NAME = re.compile(r"[^/:@\s]+/[^/:@\s]+(@[^:@\s]+)?")


@dataclass(frozen=True)
class MalaConfig:
    """Settings of one model.

    Attributes:
        tau: dimensionless tolerance >= 0 of all layers not named in ``layers``; 1 is canonical, 0 is full attention.
        layers: {layer index: tau or "sdpa"}; "sdpa" leaves that layer to torch's scaled_dot_product_attention.
        tile: (BLOCK_M, BLOCK_N), powers of two; None for the shipped table. Tiles belong to the rule's definition.
        save_support: whether training keeps the retained tiles for backward, 1 bit each, so that it scores no others; the gradients
            are the same. None: where the bits take at most 1/8 of the output's memory.
        deterministic: demand gradients that repeat bit for bit. All implementations give them anyway.
        kernel: "org/name" or "org/name@revision" of a Hub kernel to run on, in place of the kernels in this package;
            see :func:`mala_hf.load_kernel`.

    Raises:
        ValueError: for anything else; the message says what was got.
    """

    tau: float = 1.0
    layers: Mapping[int, float | str] = field(default_factory=dict)
    tile: tuple[int, int] | None = None
    save_support: bool | None = None
    deterministic: bool = False
    kernel: str | None = None

    def __post_init__(self) -> None:
        _check_tau(self.tau, "tau")
        if not isinstance(self.layers or {}, Mapping):
            raise ValueError(f'layers must be a mapping {{layer index: tau or "sdpa"}}, got {self.layers!r}')
        layers = {_index(index): setting for index, setting in (self.layers or {}).items()}
        for index, setting in layers.items():
            if setting != DENSE:
                _check_tau(setting, f"layers[{index}]", f' or "{DENSE}"')
        object.__setattr__(self, "layers", layers)
        if self.tile is not None:
            tile = tuple(self.tile) if isinstance(self.tile, (tuple, list)) else (self.tile,)
            if len(tile) != 2 or not all(type(n) is int and n >= 1 and n & (n - 1) == 0 for n in tile):
                raise ValueError(f"tile must be two powers of two (BLOCK_M, BLOCK_N), got {self.tile!r}")
            object.__setattr__(self, "tile", tile)
        if self.save_support is not None and not isinstance(self.save_support, bool):
            raise ValueError(f"save_support must be True, False or None, got {self.save_support!r}")
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic must be True or False, got {self.deterministic!r}")
        if self.kernel is not None:
            check_kernel_name(self.kernel)

    def to_dict(self) -> dict[str, Any]:
        """The dict for ``model.config.mala``: JSON types only, so that a saved and reloaded config holds the same."""
        values: dict[str, Any] = {"tau": self.tau}
        if self.layers:
            values["layers"] = {str(index): setting for index, setting in self.layers.items()}
        if self.tile is not None:
            values["tile"] = list(self.tile)
        for name in ("save_support", "deterministic", "kernel"):
            if getattr(self, name) != getattr(MalaConfig, name):
                values[name] = getattr(self, name)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MalaConfig:
        """The inverse of :meth:`to_dict`; missing keys take their defaults."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown settings {unknown}: MALA has {known}")
        return cls(**values)


def check_kernel_name(name: Any) -> None:
    """ValueError unless ``name`` is "org/name" or "org/name@revision"."""
    if not isinstance(name, str) or not KERNEL_NAME.fullmatch(name):
        raise ValueError(f'a kernel is named "org/name" or "org/name@revision", as on the Kernel Hub, got {name!r}')


def _index(index: Any) -> int:
    try:
        if type(index) in (int, str) and int(index) >= 0:
            return int(index)
    except ValueError:
        pass
    raise ValueError(f"layers must be keyed by layer index (an integer >= 0), got {index!r}")


def _check_tau(tau: Any, name: str, alternative: str = "") -> None:
    if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not 0 <= tau < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0{alternative}, got {tau!r}")

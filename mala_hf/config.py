# SPDX-License-Identifier: Apache-2.0
"""MALA's settings for a model, kept as a plain dict in ``model.config.mala`` so that they travel with the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .ops.hf_settings import HeadSettings, named, read_discovery, read_key, read_layer, read_tau

KERNEL_NAME = re.compile(r"[^/:@\s]+/[^/:@\s]+(@[^:@\s]+)?")


class FrozenSettings(dict):
    """A dict that cannot be changed, and that has a hash: of layers or heads, and of what is set for them."""

    def _refuse(self, *arguments: Any, **settings: Any) -> Any:
        raise TypeError("the settings of a MalaConfig cannot be changed: make another one (dataclasses.replace)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))  # the order of items is no part of what equality compares

    def __reduce__(self) -> tuple[Any, ...]:  # a copy is made of the whole: items cannot be set one by one
        return type(self), (dict(self),)


@dataclass(frozen=True)
class MalaConfig:
    """Settings of one model. They never change, so that equal ones have equal hashes: they can be in sets, and keys of a cache.

    Attributes:
        tau: dimensionless tolerance >= 0 of all layers not named in ``layers``; 1 is canonical, 0 is full attention.
        layers: {layers: setting}. Layers are an index (a negative one counts from the end, as in Python), a range with both ends
            ("2-5", "2-" to the last, "-4-" the last four) or "*", all of them; none twice. A setting is a tau, "sdpa" (torch's
            scaled_dot_product_attention), or a dict of

            - ``tau``: either of these; by default that of the model;
            - ``window``: a row sees at most so many keys, counted back from the last that it may see (in causal attention its own).
              It only narrows what the model allows, and it changes the model; causal layers only;
            - ``heads``: {query heads, named as layers are: a tau, "sdpa", or a dict of ``tau`` and ``window``}, which win over
              the layer's.
        tile: (BLOCK_M, BLOCK_N), powers of two; None for the shipped table. Tiles belong to the rule's definition.
        save_support: whether training keeps the retained tiles for backward, 1 bit each, so that it scores no others; the gradients
            are the same. None: where the bits take at most 1/8 of the output's memory.
        deterministic: demand gradients that repeat bit for bit. All implementations give them anyway, but for torch's dense kernels,
            to which ``discovery="auto"`` then hands nothing over.
        discovery: how the tiles to retain are found, as in :func:`mala_hf.ops.mala_attn_func`. "auto" runs whatever is fastest and
            satisfies the rule, on a GPU also dense attention (short or flat layers, steps over a short cache), and
            :func:`mala_hf.record_work` says what it was; "fused" always tests every tile; "int8" and "dense" are done or refused in
            whole sequences, and steps then test every tile, which they do in one way.
        kernel: "org/name" or "org/name@revision" of a Hub kernel to run on, in place of the kernels in this package;
            see :func:`mala_hf.load_kernel`.

    Raises:
        ValueError: for any other value; the message says what was got.
        TypeError: for a keyword that is none of these, as every class raises it (:meth:`from_dict` raises ``ValueError``).
    """

    tau: float = 1.0
    layers: Mapping[int | str, Any] = field(default_factory=dict)
    tile: tuple[int, int] | None = None
    save_support: bool | None = None
    deterministic: bool = False
    discovery: str = "auto"
    kernel: str | None = None

    def __post_init__(self) -> None:
        default = HeadSettings(read_tau(self.tau, "tau"))
        object.__setattr__(self, "layers", _normalized(self.layers or {}, "layer"))
        for key, setting in self.layers.items():
            read_layer(setting, default, key)
        if self.tile is not None:
            tile = tuple(self.tile) if isinstance(self.tile, (tuple, list)) else (self.tile,)
            if len(tile) != 2 or not all(type(n) is int and n >= 1 and n & (n - 1) == 0 for n in tile):
                raise ValueError(f"tile must be two powers of two (BLOCK_M, BLOCK_N), got {self.tile!r}")
            object.__setattr__(self, "tile", tile)
        if self.save_support is not None and not isinstance(self.save_support, bool):
            raise ValueError(f"save_support must be True, False or None, got {self.save_support!r}")
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic must be True or False, got {self.deterministic!r}")
        read_discovery(self.discovery)
        if self.kernel is not None:
            check_kernel_name(self.kernel)

    def to_dict(self) -> dict[str, Any]:
        """The dict for ``model.config.mala``: JSON types only, so that a saved and reloaded config holds the same."""
        values: dict[str, Any] = {"tau": self.tau}
        if self.layers:
            values["layers"] = _with_string_keys(self.layers)
        if self.tile is not None:
            values["tile"] = list(self.tile)
        for name in ("save_support", "deterministic", "discovery", "kernel"):
            if getattr(self, name) != getattr(MalaConfig, name):
                values[name] = getattr(self, name)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MalaConfig:
        """The inverse of :meth:`to_dict`; missing keys take their defaults. Raises ``ValueError`` for keys that are no settings."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown settings {unknown}: MALA has {known}")
        return cls(**values)


def check_kernel_name(name: Any) -> None:
    """ValueError unless ``name`` is "org/name" or "org/name@revision"."""
    if not isinstance(name, str) or not KERNEL_NAME.fullmatch(name):
        raise ValueError(f'a kernel is named "org/name" or "org/name@revision", as on the Kernel Hub, got {name!r}')


def _normalized(settings: Any, what: str) -> FrozenSettings:
    """The settings of layers (or heads) as JSON would give them back: plain values, single indices as integers."""
    if not isinstance(settings, Mapping):
        raise ValueError(f"{what}s must be a mapping {{{what}: setting}}, got {settings!r}")
    found: dict[int | str, Any] = {}
    for key, setting in settings.items():
        first, last = read_key(key, what)
        name = first if first == last else key
        if name in found:
            raise ValueError(f"{what} {name} is named twice")
        found[name] = _normalized_setting(setting)
    counted = [(key, *read_key(key, what)) for key in found]
    # those that count from the end overlap or not in a model that says how many it has
    named(tuple(key for key, first, last in counted if first >= 0 and last is not None and last >= 0), None, what)
    return FrozenSettings(found)


def _normalized_setting(setting: Any) -> Any:
    if not isinstance(setting, Mapping):
        return setting
    values = dict(setting)
    if "heads" in values:
        values["heads"] = _normalized(values["heads"], "head")
    return FrozenSettings(values)


def _with_string_keys(settings: Mapping[int | str, Any]) -> dict[str, Any]:
    """What JSON makes of it; the only nested dicts are settings, and ``heads`` in them."""
    return {
        str(key): _with_string_keys(setting) if isinstance(setting, Mapping) else setting
        for key, setting in settings.items()
    }

# SPDX-License-Identifier: Apache-2.0
"""What a model's settings, the plain dict ``config.mala``, say about one of its layers and the heads in it.

Layers and heads are named alike: an index counts from 0, a negative one from the end as in Python; "2-5" is 2 to 5, both included,
"2-" is 2 to the last, "-4-" the last four, "*" all. Nothing may be named twice. No ``re`` here: a compiler traces this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Optional, Union

import torch

from .checks import is_number, refused_number
from .work import DISCOVERIES

DENSE = "sdpa"
SETTINGS = ("tau", "layers", "tile", "save_support", "deterministic", "discovery", "kernel")
HEAD_SETTINGS = ("tau", "window")
LAYER_SETTINGS = (*HEAD_SETTINGS, "heads")
GRAMMAR = 'an index such as 3 or -1, a range such as "2-5" or "2-", or "*"'

Key = Union[int, str]


@dataclass(frozen=True)
class HeadSettings:
    """Of some query heads: ``tau`` is None where they are dense; ``window``: keys that a row sees at most, None for no limit."""

    tau: Optional[float] = 1.0
    window: Optional[int] = None


@dataclass(frozen=True)
class LayerSettings:
    """Of one layer: ``common`` of all its query heads, but for those that ``heads`` names."""

    common: HeadSettings
    heads: tuple[tuple[Key, HeadSettings], ...] = ()
    tile: Optional[tuple[int, int]] = None
    save_support: Optional[bool] = None
    deterministic: bool = False
    discovery: str = "auto"


def layer_settings(module) -> LayerSettings:
    """What ``module.config.mala`` says about this layer; tau = 1 where nobody said anything.

    Raises:
        ValueError: for settings that no model has, layers that this model lacks, or a layer named twice.
    """
    mala = getattr(getattr(module, "config", None), "mala", None)
    if mala is None:
        return LayerSettings(HeadSettings())
    try:
        return _read(mala, getattr(module, "layer_idx", None), getattr(module.config, "num_hidden_layers", None))
    except ValueError as error:
        raise ValueError(f"config.mala: {error}; see mala_hf.MalaConfig") from None


def _read(mala, index: Optional[int], num_layers: Optional[int]) -> LayerSettings:
    if not isinstance(mala, dict) or not set(mala) <= set(SETTINGS):
        raise ValueError(f"a model's settings are a dict with the keys {SETTINGS}, got {mala!r}")
    layers, tile = mala.get("layers") or {}, mala.get("tile")
    if not isinstance(layers, dict) or not (tile is None or isinstance(tile, (list, tuple))):
        raise ValueError(f"layers must be a dict and tile a pair, got {layers!r} and {tile!r}")
    discovery = read_discovery(mala.get("discovery", "auto"))
    owners = named(tuple(layers), num_layers, "layer")
    default = HeadSettings(read_tau(mala.get("tau", 1.0), "tau"))
    common, heads = read_layer(layers[owners[index]], default, index) if index in owners else (default, ())
    return LayerSettings(
        common,
        heads,
        None if tile is None else tuple(tile),
        mala.get("save_support"),
        mala.get("deterministic", False),
        discovery,
    )


def read_discovery(discovery) -> str:
    """``discovery``, if it is one of DISCOVERIES."""
    if discovery not in DISCOVERIES:
        raise ValueError(f"discovery must be one of {', '.join(DISCOVERIES)}, got {discovery!r}")
    return discovery


def read_layer(setting, default: HeadSettings, key) -> tuple[HeadSettings, tuple[tuple[Key, HeadSettings], ...]]:
    """A layer's setting: that of all its heads, and of those named apart. What it leaves open comes from ``default``.

    Raises:
        ValueError: for anything but a tau, "sdpa", or a dict of tau, window and heads.
    """
    name = f"layers[{key}]"
    common = read_heads(setting, name, default, LAYER_SETTINGS)
    heads = setting.get("heads") or {} if isinstance(setting, dict) else {}
    if not isinstance(heads, dict):
        raise ValueError(f"{name}: heads must be a dict {{head: setting}}, got {heads!r}")
    return common, tuple((head, read_heads(own, f"{name}, heads[{head}]", common)) for head, own in heads.items())


def read_heads(setting, name: str, default: HeadSettings, allowed: tuple[str, ...] = HEAD_SETTINGS) -> HeadSettings:
    """One setting, a tau, "sdpa", or a dict of those ``allowed``. ``name`` says in errors whose it is."""
    values = setting if isinstance(setting, dict) else {"tau": setting}
    unknown = [key for key in values if key not in allowed]
    if unknown or not values:
        raise ValueError(f"{name} may set {', '.join(allowed)}, got {setting!r}")
    tau, window = values.get("tau", DENSE if default.tau is None else default.tau), values.get("window", default.window)
    tau = None if isinstance(tau, str) and tau == DENSE else read_tau(tau, name, f" or {DENSE!r}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"the window of {name} must be a number of keys >= 1, got {window!r}")
    return HeadSettings(tau, window)


def read_tau(tau, name: str, alternative: str = "") -> float:
    """``tau``, if it is one. ``name`` and ``alternative`` say in errors whose it is and what else it could be."""
    if not is_number(tau) or not tau >= 0:
        raise ValueError(refused_number(name, f"a finite number >= 0{alternative}", tau))
    return tau


def named(keys: tuple[Key, ...], count: Optional[int], what: str) -> dict[int, Key]:
    """{index: the key that names it}; ``count``: how many there are, None if nobody knows.

    Raises:
        ValueError: for a key that is none, names what does not exist, or names what another one named.
    """
    return _owners(keys, count, what) if torch.compiler.is_compiling() else _remembered_owners(keys, count, what)


def _owners(keys: tuple[Key, ...], count: Optional[int], what: str) -> dict[int, Key]:
    owners: dict[int, Key] = {}
    for key in keys:
        for index in _indices(read_key(key, what), key, count, what):
            if index in owners:
                raise ValueError(f"{what} {index} is named twice: by {owners[index]!r} and by {key!r}")
            owners[index] = key
    return owners


_remembered_owners = lru_cache(maxsize=1024)(_owners)  # each layer asks at each step


def read_key(key: Key, what: str) -> tuple[int, Optional[int]]:
    """First and last index that a key names, both included; last None: to the end.

    Raises:
        ValueError: for anything that is not written as this file's head says.
    """
    if key == "*":
        return 0, None
    text = str(key) if isinstance(key, (int, str)) and not isinstance(key, bool) else ""
    sign, digits = ("-", text[1:]) if text[:1] == "-" else ("", text)
    first, dash, last = digits.partition("-")
    if not _is_index(sign + first) or (dash and last and not _is_index(last)):
        raise ValueError(f"a {what} is named by {GRAMMAR}, got {key!r}")
    begin = int(sign + first)
    return begin, (int(last) if last else None) if dash else begin


def _is_index(text: str) -> bool:
    digits = text[1:] if text[:1] == "-" else text
    return digits.isdecimal() and str(int(text)) == text


def _indices(ends: tuple[int, Optional[int]], key: Key, count: Optional[int], what: str) -> Iterable[int]:
    first, last = ends
    if count is None:
        if first < 0 or last is None or last < 0:
            raise ValueError(f"{what} {key!r} counts from the end, and this model does not say how many {what}s it has")
        begin, end = first, last
    else:
        begin = first + count if first < 0 else first
        end = count - 1 if last is None else last + count if last < 0 else last
        if not (0 <= begin < count and end < count):
            raise ValueError(f"{what} {key!r} does not exist: the model has {count} {what}s, 0 to {count - 1}")
    if begin > end:
        raise ValueError(f"{what} {key!r} names none: its last lies before its first")
    return range(begin, end + 1)

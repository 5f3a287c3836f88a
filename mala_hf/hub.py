# SPDX-License-Identifier: Apache-2.0
"""MALA's kernels from the Kernel Hub, in place of those in this package: loaded when asked for by name, never otherwise."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from .config import check_kernel_name
from .extras import how_to_install
from .ops import dense
from .ops import hf as ours
from .ops.hf_heads import sharers
from .ops.support_reuse import records_support

KERNEL_VERSION = 1  # of the Hub repository, branch v1

_loaded: dict[str, tuple[ModuleType, ModuleType]] = {}  # kernel, its adapter


def load_kernel(name: str, *, trust_remote_code: bool = False) -> ModuleType:
    """The Hub kernel ``name``, loaded once per process; models whose ``MalaConfig`` names it then run on it.

    Args:
        name: "org/name" (its version 1) or "org/name@revision", a branch, tag or commit. The environment variable LOCAL_KERNELS of
            the package kernels puts a folder in its place.
        trust_remote_code: run code of a publisher that the Hub does not list as trusted.

    Raises:
        ImportError: without the package kernels.
        ValueError: for a publisher that is not trusted; for a kernel that is not MALA's, or not of this package's version.
    """
    check_kernel_name(name)
    if name not in _loaded:
        kernel = _fetched(name, trust_remote_code)
        _loaded[name] = kernel, _adapter_in(kernel, name)
    return _loaded[name][0]


def adapter_of(module: Any) -> ModuleType:
    """The adapter ``hf`` that a layer asks for with ``module.config.mala["kernel"]``: that of this package where it names none.

    Raises:
        ValueError: if the kernel was not loaded: a checkpoint's config alone must not start code from elsewhere.
    """
    mala = getattr(getattr(module, "config", None), "mala", None)
    name = mala.get("kernel") if isinstance(mala, dict) else None
    if name is None:
        return ours
    if name not in _loaded:
        raise ValueError(
            f"this model's settings name the Hub kernel {name!r}, which this process has not loaded: call "
            f"mala_hf.load_kernel({name!r}) first, or choose other settings with mala_hf.patch_model"
        )
    if records_support():
        raise ValueError(
            f"mala_hf.reuse_support does not reach the Hub kernel {name!r}: use load_kernel({name!r}).reuse_support"
        )
    return _loaded[name][1]


def _fetched(name: str, trust_remote_code: bool) -> ModuleType:
    try:
        from kernels import get_kernel
    except ImportError as error:
        raise ImportError(f"the Hub kernel {name!r} needs the package kernels: {how_to_install('hub')}") from error
    repository, _, revision = name.partition("@")
    which = {"revision": revision} if revision else {"version": KERNEL_VERSION}
    return get_kernel(repository, trust_remote_code=trust_remote_code, **which)


def _adapter_in(kernel: ModuleType, name: str) -> ModuleType:
    try:
        adapter = importlib.import_module(f"{kernel.__name__}.hf")
    except ImportError as error:
        raise ValueError(f"{name!r} is not a kernel of MALA: it has no adapter for Transformers") from error
    version = getattr(adapter, "ADAPTER_VERSION", None)
    if version != ours.ADAPTER_VERSION:
        raise ValueError(
            f"the Hub kernel {name!r} has adapter version {version}, this mala-hf works with {ours.ADAPTER_VERSION}: "
            "name another revision of the kernel (org/name@revision), or install the mala-hf that belongs to it"
        )
    adapter.recorders = ours.recorders  # type: ignore[attr-defined]  # record_work hears all layers alike
    importlib.import_module(f"{kernel.__name__}.hf_heads").sharers = sharers  # type: ignore[attr-defined]
    importlib.import_module(f"{kernel.__name__}.dense").offered = dense.offered  # type: ignore[attr-defined]
    return adapter

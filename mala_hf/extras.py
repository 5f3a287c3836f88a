# SPDX-License-Identifier: Apache-2.0
"""Packages that only some uses need, the extras of ``pyproject.toml``: what is missing, and how to install it."""

from __future__ import annotations

from importlib.util import find_spec


def how_to_install(extra: str) -> str:
    """The two ways to an extra, whose commands a shell takes as they are: from a checkout, and by the package's name."""
    return f"pip install '.[{extra}]' in a checkout, else pip install 'mala-hf[{extra}]'"


def require_packages(extra: str, packages: tuple[str, ...], instead: str | None = None) -> None:
    """Raise ``ImportError`` with the command to run when a package of the extra is missing; ``instead``: how to do without."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        way_out = "" if instead is None else f"; or {instead}"
        raise ImportError(f"{', '.join(missing)} not installed: {how_to_install(extra)}{way_out}")

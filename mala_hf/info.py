# SPDX-License-Identifier: Apache-2.0
"""What is installed, from which commit, and what a call of MALA would run here."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .ops.checks import MAX_HEAD_DIM
from .ops.tile_config import DECODE_ROWS, tile_config
from .version import __version__

PACKAGES = ("torch", "transformers", "triton", "kernels", "accelerate", "gguf", "datasets", "flash-attn-4")


def versions() -> dict[str, str | None]:
    """Return the versions of Python, this package and those that matter to it; ``None`` for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "mala-hf": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def checked_out_commit() -> str | None:
    """The commit of the checkout that this file lies in; ``None`` where it lies in none, or where there is no git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU and its thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


def info(head_dim: int = 128) -> dict[str, Any]:
    """Return versions, device, the implementation that ``impl="auto"`` runs, the tiles for ``head_dim``, and registered names.

    Raises ``ValueError`` for a ``head_dim`` that MALA does not cover.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be 1 to {MAX_HEAD_DIM}, got {head_dim}")
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    return {
        "versions": versions(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if on_gpu else None,
        "implementation": "triton" if on_gpu else "blockwise",
        "tiles": {
            "head_dim": head_dim,
            "dtype": str(dtype).removeprefix("torch."),
            "prefill": list(tile_config(head_dim, head_dim, dtype, DECODE_ROWS + 1).tile),
            "decode": list(tile_config(head_dim, head_dim, dtype, 1).tile),
        },
        "registered": [name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if name.startswith("mala")],
    }

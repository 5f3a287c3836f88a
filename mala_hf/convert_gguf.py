# SPDX-License-Identifier: Apache-2.0
"""GGUF files, the offline checkpoint among them, unpacked once into a folder of float32 safetensors that converts like any other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from .checkpoint import OFFLINE_MODEL, gguf_arguments, offline_place
from .convert_source import check_checkpoint

OFFLINE_NAME = "smollm2"


def is_gguf(checkpoint: str) -> bool:
    """Whether this names the offline checkpoint or a GGUF file; ``FileNotFoundError`` for one that is not there."""
    if checkpoint == OFFLINE_NAME and not Path(checkpoint).exists():
        return True
    is_one = Path(checkpoint).suffix == ".gguf" and not Path(checkpoint).is_dir()
    if is_one and not Path(checkpoint).is_file():
        raise FileNotFoundError(f"{checkpoint}: no such file")
    return is_one


def check_named(checkpoint: str) -> None:
    """Raise, as a conversion would, for what cannot be a checkpoint; only what lies here is looked at, not the hub."""
    if not is_gguf(checkpoint):
        check_checkpoint(checkpoint)


def gguf_name(checkpoint: str) -> str:
    """Return what to call it: never a path."""
    return OFFLINE_MODEL if checkpoint == OFFLINE_NAME else Path(checkpoint).stem


def gguf_place(checkpoint: str) -> tuple[Path, dict[str, Any]]:
    """Return folder and ``from_pretrained`` arguments; the offline checkpoint is downloaded if need be. Raises as that does."""
    if checkpoint == OFFLINE_NAME:
        return offline_place()
    return Path(checkpoint).parent, gguf_arguments(Path(checkpoint))


def unpack_gguf(checkpoint: str, folder: Path) -> Path:
    """Write model and tokenizer into ``folder``, in one step that either happens or does not, and return it; done once.

    Every weight is what the file's block formats say, in float32, so nothing is rounded.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if folder.exists():
        return folder
    place, arguments = gguf_place(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **arguments)
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=arguments["gguf_file"])
    tokenizer.model_max_length = model.config.max_position_embeddings  # the file does not say
    scratch = folder.with_name(f"{folder.name}.part")
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.rename(folder)
    except SafetensorError as error:  # of a full disk, for one
        raise OSError(f"cannot unpack {gguf_name(checkpoint)}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder

# SPDX-License-Identifier: Apache-2.0
"""Which files hold a checkpoint's weights, and whether they are whole; headers are read, tensors are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# weights in forms that are not carried into a converted checkpoint
FOREIGN = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz", ".tflite", ".safetensors")
GIT_LFS = b"version https://git-lfs"


def weight_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the safetensors files that Transformers loads from the folder: one, or those of the index.

    Raises ``ValueError`` where there are none, saying what to do, and for an index that is damaged.
    """
    if (folder / WEIGHTS).exists():
        return (WEIGHTS,)
    if (folder / INDEX).exists():
        return tuple(sorted(set(_weight_map(folder).values())))
    foreign = sorted(path.name for path in folder.iterdir() if path.suffix in FOREIGN)
    if not foreign:
        raise ValueError(f"no weights in {folder.name}: neither {WEIGHTS} nor {INDEX}")
    raise ValueError(
        f"{folder.name} has no {WEIGHTS}, only {', '.join(foreign[:3])}{' ...' if len(foreign) > 3 else ''}: load it with "
        "AutoModelForCausalLM.from_pretrained, save_pretrained it to a new folder, and convert that"
    )


def check_weights(folder: Path, files: tuple[str, ...]) -> None:
    """Raise ``ValueError`` naming the first file that is missing, cut off or damaged, or lacks a tensor that the index puts there."""
    expected: dict[str, set[str]] = {name: set() for name in files}
    if files != (WEIGHTS,):
        for tensor, name in _weight_map(folder).items():
            expected[name].add(tensor)
    for name, tensors in expected.items():
        missing = sorted(tensors - _tensors(folder / name))
        if missing:
            raise ValueError(f"{name} lacks {missing[0]}, which {INDEX} puts there: fetch the checkpoint again")


def _tensors(path: Path) -> set[str]:
    """Return the names of a file's tensors; the library compares the header with the size of the file."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing: fetch the checkpoint again")
    with path.open("rb") as stream:
        if stream.read(len(GIT_LFS)) == GIT_LFS:
            raise ValueError(f"{path.name} is a pointer of git-lfs, not the weights: run git lfs pull")
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path.name} is damaged or cut off ({error}): fetch the checkpoint again") from error


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        found: Any = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        names = set(found.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{INDEX} is damaged ({type(error).__name__}): fetch the checkpoint again") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise ValueError(f"{INDEX} names {name!r}, which is no file beside it")
    if not names:
        raise ValueError(f"{INDEX} names no file")
    return dict(found)

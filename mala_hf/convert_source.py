# SPDX-License-Identifier: Apache-2.0
"""The checkpoint to convert: a folder, or a name of the hub; its files are found and checked before anything is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from .convert_weights import FOREIGN, check_weights, weight_files
from .model_place import CONFIG, HUB_NAME, check_hub, hub_errors, no_config

NAME_AND_REVISION = re.compile(HUB_NAME.pattern + r"(@[^@\s]+)?")


@dataclass(frozen=True)
class Source:
    """A checkpoint's folder, what to call it (never a path), its ``config.json``, and its files by their names in the folder.

    ``weights`` are the safetensors that Transformers loads, ``others`` what goes along with them, ``left_out`` weights in other forms.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    weights: tuple[str, ...]
    others: tuple[str, ...]
    left_out: tuple[str, ...]

    def bytes_of(self, names: tuple[str, ...]) -> int:
        """Size of these files; those not downloaded yet count 0."""
        return sum((self.folder / name).stat().st_size for name in names if (self.folder / name).exists())

    def fingerprint(self) -> str:
        """Tell checkpoints apart by their config and by their weights' names, sizes and times, without reading those."""
        stats = [(name, (self.folder / name).stat()) for name in self.weights]
        facts = [self.config, [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]]
        return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def open_source(checkpoint: str, *, download: bool = True) -> Source:
    """Find the files of a folder, or of a hub name ``[org/]name[@revision]``, downloaded if need be, and check them.

    download: without it, a hub name's weights are neither fetched nor checked. Raises ``FileNotFoundError`` for a folder that is not
    there, ``OSError`` for a name that the hub does not give, ``ValueError`` for a checkpoint that is damaged or has no safetensors.
    """
    check_checkpoint(checkpoint)
    if Path(checkpoint).is_dir():
        return read_folder(Path(checkpoint), Path(checkpoint).resolve().name)
    return read_folder(_from_hub(checkpoint, weights=download), checkpoint, with_weights=download)


def check_checkpoint(checkpoint: str) -> None:
    """Raise for what is neither a model's folder nor a name that the hub could have; the hub is not asked."""
    if Path(checkpoint).is_dir():
        _read_config(Path(checkpoint), Path(checkpoint).resolve().name)
    elif Path(checkpoint).exists():
        raise ValueError(f"{checkpoint} is a file: give the folder of the checkpoint")
    elif not NAME_AND_REVISION.fullmatch(checkpoint):
        raise FileNotFoundError(f"{checkpoint}: no such folder")


def read_folder(folder: Path, name: str, *, with_weights: bool = True) -> Source:
    """Return a local checkpoint, checked; raises as ``open_source``."""
    config = _read_config(folder, name)
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(folder)))
    names = [path.relative_to(folder).as_posix() for path in found]
    weights: tuple[str, ...] = ()
    if with_weights or any(one.endswith(".safetensors.index.json") for one in names):
        weights = weight_files(folder)
    if with_weights:
        check_weights(folder, weights)
    foreign = [one for one in names if Path(one).suffix in FOREIGN and one not in weights]
    others = [one for one in names if one not in foreign and one not in weights]
    return Source(folder, name, config, weights, tuple(others), tuple(foreign))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _read_config(folder: Path, name: str) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(no_config(folder, name))
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{CONFIG} of {name} is damaged: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{CONFIG} of {name} is no model's: it has no model_type")
    return config


def _from_hub(checkpoint: str, *, weights: bool) -> Path:
    """Return the folder of the hub's cache; other forms of weights are not downloaded."""
    from huggingface_hub import snapshot_download

    name, _, revision = checkpoint.partition("@")
    ignored = [f"*{suffix}" for suffix in FOREIGN if suffix != ".safetensors" or not weights]
    check_hub(name, revision=revision or None)
    with hub_errors(name, revision):
        return Path(snapshot_download(name, revision=revision or None, ignore_patterns=ignored))

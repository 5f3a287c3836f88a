# SPDX-License-Identifier: Apache-2.0
"""Writing a converted checkpoint: built in a folder of its own and renamed when it is whole, so that it is there or it is not."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from .convert_source import CONFIG, Source

FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}  # a quota is a disk that is full, too
ROOM = 64 << 20  # bytes beside the weights, for everything else


def work_folder(output: Path) -> Path:
    """Return the folder beside the output that holds what a run has finished: hidden, on the same file system."""
    return output.parent / f".{output.name}.mala-hf"


def check_output(output: Path) -> None:
    """Raise ``FileExistsError`` if there is something already, ``FileNotFoundError`` if its parent is not there.

    ``PermissionError`` if nothing can be put into that.
    """
    if output.exists() or output.is_symlink():
        raise FileExistsError(f"{output} exists already: nothing is overwritten; give another name or remove it")
    parent = output.absolute().parent
    if not parent.is_dir():
        raise FileNotFoundError(f"{output.parent}: no such folder to put {output.name} into")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{output.parent}: no permission to put {output.name} into it")


def bytes_to_copy(source: Source, output: Path, *, link: bool) -> int:
    """Return how much the weights will take: nothing where they can be linked, which needs the same file system."""
    device = output.absolute().parent.stat().st_dev
    sizes = [(source.folder / name).stat() for name in source.weights if (source.folder / name).exists()]
    return sum(stat.st_size for stat in sizes if not link or stat.st_dev != device)


def check_room(needed: int, output: Path) -> None:
    """Raise ``OSError`` (no space left) unless the file system has room for so many bytes and a little more."""
    free = shutil.disk_usage(output.absolute().parent).free
    if needed + ROOM > free:
        raise OSError(
            errno.ENOSPC,
            f"no space for {output}: {(needed + ROOM) / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free",
        )


def write_checkpoint(source: Source, output: Path, texts: Mapping[str, str], *, link: bool = True) -> dict[str, int]:
    """Put the source's files and ``texts`` (by name, in place of the source's, ``config.json`` among them) into ``output``.

    Weights are hard-linked where they can be, everything else is copied. Returns how many weights were linked and copied. If
    anything fails, nothing of this is left; without its ``config.json``, which comes last, no folder loads. Raises
    ``FileExistsError`` if the output is there by now, and ``OSError``.
    """
    staging = work_folder(output) / "built"
    shutil.rmtree(staging, ignore_errors=True)
    done = {"linked": 0, "copied": 0}
    try:
        staging.mkdir(parents=True)
        for name in source.weights:
            done[_place(source.folder / name, staging / name, link=link)] += 1
        for name in source.others:
            if name not in texts:
                _place(source.folder / name, staging / name, link=False)
        for name in sorted(texts, key=lambda name: (name == CONFIG, name)):
            _write(staging / name, texts[name])
        _flush(staging)
        check_output(output)
        staging.rename(output)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        if error.errno in FULL:
            raise OSError(
                error.errno,
                f"no space left for {output}: nothing of it was kept, and what was measured is; make room and run this again",
            ) from error
        raise
    _flush(output.absolute().parent)
    return done


def _place(source: Path, target: Path, *, link: bool) -> str:
    """Link or copy one file, whatever links lead to it; return which."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        try:
            os.link(source.resolve(), target)
            return "linked"
        except OSError as error:
            if error.errno in FULL:
                raise
    shutil.copyfile(source, target)
    _flush(target)
    return "copied"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    """Have the disk hold a file or a folder's list of names; Windows has no such call for what is open to be read."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

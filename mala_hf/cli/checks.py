# SPDX-License-Identifier: Apache-2.0
"""What a command checks of its options before it reads a text, asks the hub, or loads a model."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint import check_device
from ..model_place import check_model


def check_numbers(options: argparse.Namespace, **least: int) -> None:
    """Raise ``ValueError`` for an option, a number or several, below its least value; those not given are left out."""
    for name, smallest in least.items():
        given = getattr(options, name)
        numbers = given if isinstance(given, Sequence) else [] if given is None else [given]
        for number in numbers:
            if not number >= smallest:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {smallest}, got {number}")


def check_place(options: argparse.Namespace, folder: Path | None = None, file: Path | None = None) -> None:
    """Raise for a device that is not here, a path that is no model's, and a folder or file that cannot be written.

    ``ValueError`` or ``OSError``; the hub is not asked.
    """
    check_device(options.device)
    needs_tokenizer_only = getattr(options, "prepare", False)
    if getattr(options, "model", None) is not None and not needs_tokenizer_only:
        check_model(options.model, ask_hub=False)
    if folder is not None:
        check_folder(folder)
    if file is not None:
        check_folder(file.absolute().parent)
        if file.is_dir() or (file.exists() and not os.access(file, os.W_OK)):
            raise PermissionError(f"{file}: a folder, or a file that may not be written")


def check_folder(folder: Path) -> None:
    """Raise ``OSError`` unless files can be put into the folder; it may have to be made, and is not made here."""
    here = folder.absolute()
    while not here.exists() and here != here.parent:
        here = here.parent
    if not here.is_dir():
        raise NotADirectoryError(f"{folder} cannot be a folder: {here} is a file")
    if not os.access(here, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder}: no permission to write into {here}")

# SPDX-License-Identifier: Apache-2.0
"""Text to measure on: a file of the user's, or the novel that ships with the package."""

from __future__ import annotations

import gzip
from importlib.resources import files
from pathlib import Path

DEFAULT_TEXT = "Persuasion (Jane Austen, 1818, public domain)"


def default_text() -> str:
    """Return the whole novel *Persuasion*, 467 kB of ASCII, about 115,000 tokens; provenance in ``data/README.md``."""
    return gzip.decompress((files("mala_hf") / "data" / "persuasion.txt.gz").read_bytes()).decode("ascii")


def read_text(path: str | Path | None = None) -> tuple[str, str]:
    """Return ``(text, name)`` of a UTF-8 file, plain or gzip by its ``.gz`` ending; without a path, the default text.

    Raises ``FileNotFoundError`` or another ``OSError`` from reading, and ``ValueError`` when the file is not UTF-8 text or is empty.
    """
    if path is None:
        return default_text(), DEFAULT_TEXT
    path = Path(path)
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return text, path.name

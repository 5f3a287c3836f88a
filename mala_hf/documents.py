# SPDX-License-Identifier: Apache-2.0
"""The documents that perplexity is measured on: the default text, a file, a folder of files, or a data set of the hub."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

from .extras import how_to_install
from .model_place import hub_answers
from .quiet import quiet_data
from .text import read_text

SUFFIXES = (".md", ".rst", ".txt")  # of a folder's files, each also with .gz
DATASET_DOCUMENTS = 50  # of a data set, unless told otherwise


def read_documents(path: str | Path | None = None, limit: int | None = None) -> tuple[list[str], str]:
    """Return the documents of a file (one) or a folder (its texts in the order of their paths), or the default text; and a name.

    Raises ``OSError`` when something cannot be read, ``ValueError`` for a folder without texts, and what is not UTF-8 or empty.
    """
    _check_limit(limit)
    if path is None or not Path(path).is_dir():
        text, name = read_text(path)
        return [text], name
    folder = Path(path)
    files = sorted(file for file in folder.rglob("*") if file.name.removesuffix(".gz").endswith(SUFFIXES))
    if not files:
        raise ValueError(f"{folder} holds no text: no file ends in {', '.join(SUFFIXES)}, or these with .gz")
    return [read_text(file)[0] for file in files[:limit]], folder.resolve().name


def read_dataset(name: str, limit: int | None = None) -> tuple[list[str], str]:
    """Return the first ``limit`` documents (default 50) of a data set ``name[:config[:split]]``, and the name with its split.

    The split is by default ``test``, or the only one there is. The text is the column ``text``, or the only column of texts.
    Raises ``ImportError`` without the package datasets, ``OSError`` when the hub or the data set cannot be reached, and
    ``ValueError`` for a split or column that is not clear, and for a data set without text.
    """
    _check_limit(limit)
    limit = DATASET_DOCUMENTS if limit is None else limit
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"data sets need the package datasets: {how_to_install('eval')}") from error
    place, config, split = [*(part or None for part in name.split(":", 2)), None, None][:3]
    if place is None:
        raise ValueError(f"a data set is NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, got {name!r}")
    if not Path(place).exists() and not hub_answers():  # else each file would be asked for again and again
        raise OSError(
            f"cannot load the data set {place}: the hub does not answer; without a network give a file or folder"
        )
    try:
        with quiet_data(datasets):
            splits = datasets.load_dataset(place, config, streaming=True)
        split = split or ("test" if "test" in splits else next(iter(splits)) if len(splits) == 1 else None)
        if split not in splits:
            raise ValueError(f"{place} has the splits {', '.join(splits)}: say which, as {place}:{config or ''}:SPLIT")
        rows = iter(splits[split])
        first = next(rows, None)
        if first is None:
            raise ValueError(f"{place} has no documents in {split}")
        column = _text_column(place, first)
        texts = (row[column] for row in chain([first], rows))
        found = list(islice((text for text in texts if text.strip()), limit))
    except (ConnectionError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OSError(f"cannot load the data set {place}: {reason}; without a network give a file or folder") from error
    if not found:
        raise ValueError(f"{place} holds no text in {split}")
    return found, f"{name} ({split})"


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"at least one document must be read, got {limit}")


def _text_column(place: str, row: dict[str, Any]) -> str:
    columns = [column for column, value in row.items() if isinstance(value, str)]
    if "text" in columns:
        return "text"
    if len(columns) != 1:
        raise ValueError(f"{place} has no column text, and these columns of texts: {', '.join(columns) or 'none'}")
    return columns[0]

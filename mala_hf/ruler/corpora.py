# SPDX-License-Identifier: Apache-2.0
"""The texts that some tasks need: essays, SQuAD, HotpotQA, a longer list of words. Nothing is downloaded here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..extras import how_to_install
from ..text import read_text

SplitSentences = Callable[[str], list[str]]


def punkt_sentences(text: str) -> list[str]:
    """Split by nltk's English Punkt model, as RULER does.

    Raises ``ImportError`` without nltk, and ``LookupError`` when nltk does not find its data ``punkt_tab``.
    """
    try:
        from nltk.tokenize import sent_tokenize
    except ImportError as error:
        raise ImportError(f"RULER's essay tasks split sentences with nltk: {how_to_install('eval')}") from error
    try:
        return sent_tokenize(text)
    except LookupError as error:
        raise LookupError(
            "nltk has no punkt_tab data here (nltk.download('punkt_tab') or NLTK_DATA); without it, "
            "Corpora(split_sentences=split_at_punctuation) runs, but puts needles in other places than RULER"
        ) from error


def split_at_punctuation(text: str) -> list[str]:
    """Split after each ``.``, ``!`` or ``?`` before white space; needs no data, and splits at abbreviations too."""
    return re.split(r"(?<=[.!?])\s+", text)


def words_of(text: str) -> list[str]:
    """Split at white space, as RULER does its essays."""
    return re.sub(r"\s+", " ", text).split(" ")


@dataclass(frozen=True)
class Corpora:
    """Where the texts of the tasks lie; a task whose text is missing raises ``ValueError``. Files may be gzipped (``.gz``).

    In place of a path, what its file would hold: the words of the essays, or what JSON would give.

    essays: a JSON file ``{"text": ...}``, or plain text (niah_single_2 and 3, niah_multikey_1, niah_multivalue, niah_multiquery).
    squad: SQuAD 2.0 JSON (qa_1). hotpotqa: HotpotQA distractor JSON (qa_2).
    english_words: JSON object whose values are words, for cwe beyond the 8,166 words of wonderwords (about 128K tokens).
    split_sentences: text to sentences, for the essays.
    """

    essays: str | Path | list[str] | None = None
    squad: str | Path | dict[str, Any] | None = None
    hotpotqa: str | Path | list[Any] | None = None
    english_words: str | Path | dict[str, str] | None = None
    split_sentences: SplitSentences = punkt_sentences

    def essay_words(self) -> list[str]:
        """Return all words of the essays, in order."""
        path = self._place("essays")
        if not isinstance(path, Path):
            return path
        text, _ = read_text(path)
        if ".json" in path.suffixes:
            text = _parse(path, text, lambda data: str(data["text"]))
        return words_of(text)

    def read_json(self, name: str, extract: Callable[[Any], Any]) -> Any:
        """Return what ``extract`` makes of the JSON of the corpus ``name``; ``ValueError`` says which file has another form."""
        path = self._place(name)
        if not isinstance(path, Path):
            return extract(path)
        text, _ = read_text(path)
        return _parse(path, text, extract)

    def _place(self, name: str) -> Any:
        """Return the path of a corpus, or what stands in its place."""
        place = getattr(self, name)
        if place is None:
            raise ValueError(f"this task needs a text of yours: Corpora({name}=path)")
        return Path(place) if isinstance(place, str) else place


def _parse(path: Path, text: str, extract: Callable[[Any], Any]) -> Any:
    try:
        return extract(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} has another form than expected: {type(error).__name__} {error}") from error

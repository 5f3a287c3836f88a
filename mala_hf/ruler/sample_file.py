# SPDX-License-Identifier: Apache-2.0
"""Prepared samples in one file: drawn once, read by every run and machine, tokens included.

The file is gzipped JSON lines: what the samples depend on, then one prompt a line.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .prompts import Prompt, Prompter, uses_chat_template
from .sources import find_sources

FORMAT = "mala-hf ruler samples 1"
NAME = "samples.jsonl.gz"
Groups = dict[tuple[int, str], list[Prompt]]  # by length and task, each in order of its index


@dataclass(frozen=True)
class Wanted:
    """Which samples an evaluation needs; chat_template and corpora as in ``uses_chat_template`` and ``find_sources``."""

    tasks: Sequence[str]
    lengths: Sequence[int]
    num_samples: int
    seed: int = 42
    chat_template: str = "auto"
    corpora: str = "auto"

    def missing(self, groups: Groups) -> list[tuple[int, str]]:
        """Return the lengths and tasks of which there are not enough samples."""
        wanted = [(length, task) for length in self.lengths for task in self.tasks]
        return [group for group in wanted if len(groups.get(group, [])) < self.num_samples]

    def choose(self, groups: Groups) -> list[Prompt]:
        """Return the wanted prompts of a complete file: by length, then those with equally long answers side by side."""
        chosen = [
            prompt
            for length in self.lengths
            for task in self.tasks
            for prompt in groups[length, task][: self.num_samples]
        ]
        return sorted(chosen, key=lambda prompt: (prompt.length, prompt.answer_tokens))


def prepare(
    path: Path,
    wanted: Wanted,
    tokenizer: Any,
    *,
    draws: Callable[[list[tuple[int, str]]], Iterable[tuple[int, str]]] = iter,
    notice: Callable[[str], None] = print,
) -> list[Prompt]:
    """Return the wanted prompts from the file at ``path``; those it does not hold yet are drawn and added. ``draws`` may show a bar.

    Raises ``ValueError`` for a file that is damaged, or made for another tokenizer, seed, chat template or text, and as drawing does.
    """
    header, groups = read_samples(path) if path.exists() else ({}, {})
    settings: dict[str, Any] = {
        "tokenizer": fingerprint(tokenizer),
        "seed": wanted.seed,
        "chat_template": uses_chat_template(tokenizer, wanted.chat_template),
    }
    for name, value in settings.items():
        if header and header.get(name) != value:
            raise ValueError(
                f"the samples of {path} have {name} {header.get(name)!r}, not {value!r}: use another folder"
            )
    place = wanted.corpora
    if header:
        known = header["corpora"]["source"]
        if place != "auto" and known not in (place, Path(place).resolve().name):
            raise ValueError(f"the samples of {path} are of the corpora {known}, not {place}: use another folder")
        place = known if known in ("hub", "builtin") else place
    missing = wanted.missing(groups)
    if missing:
        if header and place == "auto":
            raise ValueError(f"{path} lacks samples of the corpora {known}: say where that folder is")
        sources = find_sources(place, {task for _, task in missing}, notice)
        if header and sources.names() != header["corpora"]:
            raise ValueError(
                f"{path} was drawn from {header['corpora']}, here are {sources.names()}: use another folder"
            )
        prompter = Prompter(tokenizer, settings["chat_template"])
        for length, task in draws(missing):
            groups[length, task] = prompter.draw(
                task, length=length, num_samples=wanted.num_samples, seed=wanted.seed, corpora=sources.corpora
            )
        write_samples(path, settings | {"corpora": sources.names()}, groups)
    return wanted.choose(groups)


def read_samples(path: Path) -> tuple[dict[str, Any], Groups]:
    """Return what the samples depend on, and the samples. ``ValueError`` names the file and line that is none."""
    groups: Groups = {}
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            header: dict[str, Any] = {}
            for number, line in enumerate(lines, 1):
                record = json.loads(line)
                if number == 1:
                    if record.pop("format") != FORMAT:
                        raise ValueError("another format")
                    header = record
                    continue
                for name in ("ids", "outputs", "depths"):
                    record[name] = tuple(record[name])
                prompt = Prompt(**record)
                groups.setdefault((prompt.length, prompt.task), []).append(prompt)
    except (gzip.BadGzipFile, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}, line {number}: no prepared sample ({type(error).__name__}: {error})") from error
    if not header:
        raise ValueError(f"{path} holds no prepared samples")
    return header, groups


def read_header(path: Path) -> dict[str, Any]:
    """Return what the samples of a file depend on, without reading them."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        header: dict[str, Any] = json.loads(next(lines))
    del header["format"]
    return header


def write_samples(path: Path, header: dict[str, Any], groups: Groups) -> None:
    """Write everything, in one step that either happens or does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}")
    # no name and time in the gzip header: the same samples are the same bytes
    with scratch.open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as stream:
        stream.write((json.dumps({"format": FORMAT} | header) + "\n").encode())
        for key in sorted(groups):
            for prompt in groups[key]:
                stream.write((json.dumps(asdict(prompt)) + "\n").encode())
    scratch.replace(path)


def fingerprint(tokenizer: Any) -> str:
    """Tell vocabularies apart: the start of the SHA-256 of all tokens with their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]

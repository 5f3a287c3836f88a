# SPDX-License-Identifier: Apache-2.0
"""Answers kept sample by sample, so that a run that was killed goes on where it stopped.

A folder holds ``answers.part-N.jsonl``, one for each process at work, and ``answers.jsonl`` once a run has finished. Each begins with a
line of settings. Lines are appended a batch at a time and flushed to the disk; nothing that is finished is written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = "mala-hf ruler answers 1"
MERGED = "answers.jsonl"


class Key(NamedTuple):
    """What an answer answers, and with which attention."""

    length: int
    task: str
    number: int
    implementation: str
    tau: float | None


@dataclass(frozen=True)
class AnswerStore:
    """The answers in ``folder`` that were made with ``settings`` (JSON types); ``notice`` is told of what had to be dropped."""

    folder: Path
    settings: dict[str, Any]
    rank: int = 0
    notice: Callable[[str], None] = print

    @property
    def part(self) -> Path:
        """The file that this process appends to."""
        return self.folder / f"answers.part-{self.rank}.jsonl"

    def read(self) -> dict[Key, dict[str, Any]]:
        """Return all finished answers, of earlier runs and other processes too.

        Raises ``ValueError`` for a file that is damaged, other than in a last line that was cut off, or made with other settings.
        """
        files = [self.folder / MERGED, *sorted(self.folder.glob("answers.part-*.jsonl"))]
        found: dict[Key, dict[str, Any]] = {}
        for path in files:
            if path.exists():
                answers, cut_off = self._read_file(path)
                if cut_off:
                    self.notice(f"{path.name}: the last line was cut off and is dropped; its sample runs again")
                found |= answers
        return found

    def append(self, answers: Iterable[dict[str, Any]]) -> None:
        """Add answers to this process's file; when this returns they are on the disk."""
        with self.part.open("ab") as stream:
            lines = [json.dumps(answer) + "\n" for answer in answers]
            if stream.tell() == 0:
                lines.insert(0, self._first_line())
            stream.write("".join(lines).encode())
            stream.flush()
            os.fsync(stream.fileno())

    def drop_cut_off_line(self) -> None:
        """Shorten this process's file to its last whole line, so that it can be appended to."""
        if self.part.exists():
            data = self.part.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                os.truncate(self.part, whole)

    def merge(self) -> list[dict[str, Any]]:
        """Write everything into one sorted file and remove the parts; return the answers. For one process, when all are done."""
        answers = [answer for _, answer in sorted(self.read().items(), key=lambda item: _order(item[0]))]
        scratch = self.folder / f".{MERGED}"
        with scratch.open("wb") as stream:
            stream.write("".join([self._first_line(), *(json.dumps(answer) + "\n" for answer in answers)]).encode())
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(self.folder / MERGED)
        for path in self.folder.glob("answers.part-*.jsonl"):
            path.unlink()
        return answers

    def _first_line(self) -> str:
        return json.dumps({"format": FORMAT, "settings": self.settings}) + "\n"

    def _read_file(self, path: Path) -> tuple[dict[Key, dict[str, Any]], bool]:
        """Return the answers of a file, and whether its last line was cut off."""
        *lines, rest = path.read_bytes().split(b"\n")
        answers: dict[Key, dict[str, Any]] = {}
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if number > 1:
                    answers[key_of(record)] = record
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number} is no answer ({type(error).__name__}): repair or remove the file, "
                    "or choose another output folder"
                ) from error
            if number == 1:
                self._check_first_line(path, record)
        return answers, bool(rest)

    def _check_first_line(self, path: Path, record: Any) -> None:
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ValueError(f"{path} was not written by mala-hf ruler: choose another output folder")
        theirs = record.get("settings", {})
        for name, value in self.settings.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"{path} was made with {name} {theirs.get(name)!r}, not {value!r}: choose another output folder"
                )


def key_of(answer: dict[str, Any]) -> Key:
    """Return the key of an answer; ``KeyError`` where a part is missing."""
    return Key(answer["length"], answer["task"], answer["index"], answer["implementation"], answer["tau"])


def _order(key: Key) -> tuple[Any, ...]:
    return (*key[:4], -1.0 if key.tau is None else key.tau)

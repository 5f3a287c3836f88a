# SPDX-License-Identifier: Apache-2.0
"""Rows of a study on the disk as they are measured, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class RowStore:
    """Lines of JSON: the first holds ``settings``, each other one a row. A last line that was cut off is dropped.

    settings: what all rows have in common; JSON types.

    Raises:
        ValueError: for a file of other settings, or none of ours.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.rows: list[Row] = []
        if path.exists():
            self._read()

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        try:
            lines = [json.loads(line) for line in data[:whole].splitlines()]
        except ValueError as error:
            raise ValueError(f"{self.path} is damaged ({error}): remove it, or choose another output") from error
        if lines and lines[0] != {"settings": self.settings}:
            raise ValueError(f"{self.path} was measured with other settings: remove it, or choose another output")
        if whole < len(data):
            os.truncate(self.path, whole)
        self.rows = lines[1:]

    def has(self, **values: Any) -> bool:
        """Whether a row with these values is there."""
        return any(all(row.get(name) == value for name, value in values.items()) for row in self.rows)

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows, all or none; they are on the disk when this returns."""
        new = [json.loads(json.dumps(row)) for row in rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as stream:
            lines = [] if stream.tell() else [{"settings": self.settings}]
            stream.write("".join(json.dumps(line) + "\n" for line in [*lines, *new]).encode())
            stream.flush()
            os.fsync(stream.fileno())
        self.rows += new

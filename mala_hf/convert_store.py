# SPDX-License-Identifier: Apache-2.0
"""Measurements kept one by one, so that a run that was killed goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Measurements:
    """Files in ``folder``, each named after its measurement and all that it depends on; ``made_with`` (JSON types) is common to all."""

    folder: Path
    made_with: dict[str, Any]

    def path(self, name: str, settings: dict[str, Any]) -> Path:
        """Return where a measurement with these settings (JSON types) is kept."""
        key = json.dumps([self.made_with, settings], sort_keys=True)
        return self.folder / f"{name}-{sha256(key.encode()).hexdigest()[:16]}.json"

    def get(self, name: str, settings: dict[str, Any], measure: Callable[[], Any]) -> Any:
        """Return the kept result, or measure, keep and return it: the same JSON types both times."""
        path = self.path(name, settings)
        if not path.exists():
            text = json.dumps(measure())
            self.folder.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(".part")
            with scratch.open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            scratch.replace(path)
        return json.loads(path.read_text("utf-8"))

# SPDX-License-Identifier: Apache-2.0
"""The processes that ``accelerate launch`` started for one evaluation; without it there is one, and nothing is set up."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from ..extras import how_to_install

LONGEST_WAIT = timedelta(days=7)  # for the slowest process


@dataclass(frozen=True)
class Ranks:
    """This process is number ``rank`` of ``count``; each takes its share of the work and files of its own."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    _state: Any = field(default=None, repr=False)

    @classmethod
    def of_environment(cls, device: str | None = None) -> Ranks:
        """Join the processes announced by ``WORLD_SIZE`` and ``RANK``; ``ImportError`` when there are several and no accelerate."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return cls()
        try:
            from accelerate import PartialState
        except ImportError as error:
            raise ImportError(f"several processes need the package accelerate: {how_to_install('eval')}") from error
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        state = PartialState(cpu=on_cpu, timeout=LONGEST_WAIT)
        return cls(state.process_index, state.num_processes, state.local_process_index, state)

    @property
    def is_first(self) -> bool:
        """Whether this process draws samples, merges and reports."""
        return self.rank == 0

    def device(self, asked: str | None) -> str | None:
        """Return the device of this process: the one asked for, or of several processes each its own GPU."""
        if asked in (None, "cuda") and self.count > 1 and torch.cuda.is_available():
            return f"cuda:{self.local_rank}"
        return asked

    def wait(self) -> None:
        """Go on when all processes have come here."""
        if self._state is not None:
            self._state.wait_for_everyone()

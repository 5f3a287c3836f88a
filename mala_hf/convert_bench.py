# SPDX-License-Identifier: Apache-2.0
"""A loaded model and the text it is measured on; each measurement is kept as soon as it is finished."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .config import MalaConfig
from .convert_store import Measurements
from .patch import mala_attention
from .perplexity import Perplexity, check_positions, score_window
from .windows import Window, beginning_token, cut_windows, tokenize
from .work_study import study_work

CPU_LENGTH, GPU_LENGTH = 1024, 8192
# one of each of RULER's four kinds; all can be drawn from what ships with the packages
RULER_TASKS = ("niah_multikey_2", "vt", "fwe", "qa_1")


@dataclass(frozen=True)
class Evidence:
    """What to measure: ``windows`` of ``length`` tokens of a text, and ``ruler_samples`` of each RULER task at that length.

    text: a UTF-8 file, plain or .gz; None for the novel that ships with the package. length: None for 1,024 tokens on a CPU, 8,192
    on a GPU, and no more than the model has positions. ruler_samples: 0 leaves RULER out. Raises ``ValueError`` for what cannot be
    measured.
    """

    text: str | None = None
    length: int | None = None
    windows: int = 4
    ruler_tasks: tuple[str, ...] = RULER_TASKS
    ruler_samples: int = 4

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 32:
            raise ValueError(f"length must be at least 32 tokens, got {self.length}")
        if self.windows < 1:
            raise ValueError(f"at least one window must be measured, got {self.windows}")
        if self.ruler_samples < 0:
            raise ValueError(f"RULER samples must be 0 or more, got {self.ruler_samples}")

    def length_for(self, config: Any, device: torch.device) -> int:
        """Return the length in tokens on a device, for a model's config; ``ValueError`` if it has fewer positions."""
        if self.length:
            check_positions(SimpleNamespace(config=config), self.length)
            return self.length
        most = GPU_LENGTH if device.type == "cuda" else CPU_LENGTH
        return min(most, getattr(config.get_text_config(), "max_position_embeddings", None) or most)


@dataclass
class Bench:
    """A loaded model with what it is measured on: ``length`` tokens in each of ``windows`` windows of ``ids`` (n,), a text's."""

    model: Any
    tokenizer: Any
    store: Measurements
    ids: Tensor
    length: int
    windows: int
    say: Callable[[str], None]
    quiet: bool = False

    @classmethod
    def open(
        cls,
        model: Any,
        tokenizer: Any,
        text: str,
        store: Measurements,
        *,
        parts: int,
        say: Callable[[str], None],
        quiet: bool,
    ) -> Bench:
        """Tokenize the text, which must be long enough for ``parts`` times the windows; ``ValueError`` otherwise."""
        length, windows = store.made_with["length"], store.made_with["windows"]
        ids = tokenize(tokenizer, text)
        needed = parts * windows * (length - (beginning_token(tokenizer) is not None))
        if len(ids) < needed:
            raise ValueError(
                f"the text has {len(ids)} tokens, fewer than the {needed} of {parts * windows} windows: choose a smaller length or "
                "another text"
            )
        return cls(model, tokenizer, store, ids, length, windows, say, quiet)

    def part(self, number: int) -> Tensor:
        """Return the ids of one part of the text: part 0 is what settings are chosen on, and evidence is of the last."""
        size = self.windows * (self.length - (beginning_token(self.tokenizer) is not None))
        return self.ids[number * size : (number + 1) * size]

    def windows_of(self, part: int) -> list[Window]:
        """Return the windows of a part."""
        return cut_windows(
            [self.part(part)], self.length, max_windows=self.windows, bos=beginning_token(self.tokenizer)
        )

    def nll(self, part: int, config: MalaConfig | None) -> float:
        """Return the mean negative log-likelihood of a part in nats per token; with full attention where there are no settings."""
        label = "full attention" if config is None else "MALA"

        def measure() -> float:
            self.say(f"perplexity of {self.windows} x {self.length} tokens, part {part} of the text: {label}")
            windows = self.windows_of(part)
            with _attention(self.model, config):
                nll = [score_window(self.model, window)[0].double().mean().item() for window in windows]
            return Perplexity(tuple(nll), tuple(window.scored for window in windows)).nll

        settings = {"part": part, "mala": None if config is None else config.to_dict()}
        return check_nll(self.store.get("nll", settings, measure), label)

    def study(self, part: int, taus: Sequence[float]) -> dict[str, Any]:
        """Return the work study of a part's first window at these taus, omitted mass measured exactly."""
        from .demo import layer_progress

        def measure() -> dict[str, Any]:
            self.say(
                f"work and fidelity of each layer on {self.length} tokens at tau {', '.join(f'{tau:g}' for tau in taus)}"
            )
            ids = self.windows_of(part)[0].input_ids
            with layer_progress(self.model, "layers", disable=self.quiet):
                found = study_work(self.model, ids, taus, audit=True).to_dict()
            return {"runs": found["runs"]}

        found: dict[str, Any] = self.store.get("study", {"part": part, "taus": list(taus)}, measure)
        return found


def check_nll(nll: float, label: str) -> float:
    """Return nats per token that are a number; ``ValueError`` otherwise."""
    if not math.isfinite(nll):
        raise ValueError(f"the perplexity with {label} is no number: the weights are damaged, or their dtype overflows")
    return nll


@contextmanager
def _attention(model: Any, config: MalaConfig | None) -> Iterator[None]:
    """Full attention, which the model was loaded with, or MALA."""
    if config is None:
        yield
    else:
        with mala_attention(model, config):
            yield

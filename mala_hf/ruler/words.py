# SPDX-License-Identifier: Apache-2.0
"""The English words that keys and word lists are made of, from wonderwords; another version has other words."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from itertools import accumulate

from ..extras import how_to_install

WONDERWORDS = "3.0.1"


@cache
def read_words(kind: str) -> tuple[str, ...]:
    """Return the ``noun``, ``adjective`` or ``verb`` list; ``ImportError`` without wonderwords or with another version."""
    try:
        installed = version("wonderwords")
    except PackageNotFoundError:
        installed = "none"
    if installed != WONDERWORDS:
        raise ImportError(
            f"RULER's words are those of wonderwords {WONDERWORDS}, found {installed}: {how_to_install('eval')}"
        )
    lines = (files("wonderwords") / "assets" / f"{kind}list.txt").read_text("utf-8").splitlines()
    return tuple(line.rstrip() for line in lines)


def all_words() -> list[str]:
    """Return nouns, adjectives and verbs, sorted, each once."""
    return sorted({word for kind in ("noun", "adjective", "verb") for word in read_words(kind)})


class Keys:
    """All distinct ``adjective-noun`` in sorted order, made when asked for: there are six million.

    Adjectives sort by themselves, except where one begins another up to a hyphen ("old", "old-fashioned"): their keys interleave,
    so such adjectives share a block, which is sorted whole. Indices are 0 .. len - 1.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted(set(nouns))
        self._blocks: list[list[str]] = []  # adjectives with their hyphen
        for start in sorted({f"{adjective}-" for adjective in adjectives}):
            if self._blocks and start.startswith(self._blocks[-1][0]):
                self._blocks[-1].append(start)
            else:
                self._blocks.append([start])
        self._merged = {i: self._keys(block) for i, block in enumerate(self._blocks) if len(block) > 1}
        sizes = [len(self._merged.get(i, self._nouns)) for i in range(len(self._blocks))]
        self._ends = list(accumulate(sizes))

    def _keys(self, block: list[str]) -> list[str]:
        return sorted({start + noun for start in block for noun in self._nouns})

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str:
        block = bisect_right(self._ends, index)
        from_end = index - self._ends[block]  # negative
        if block in self._merged:
            return self._merged[block][from_end]
        return self._blocks[block][0] + self._nouns[from_end]

# SPDX-License-Identifier: Apache-2.0
"""Windows of tokenised documents, fixed or overlapping; every token of a document but its first is scored at most once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """Token ids (1, at most length) of one document, of which the last ``scored`` count; the ones before are their context."""

    input_ids: Tensor
    scored: int
    document: int = 0


def cut_windows(
    documents: Sequence[Tensor],
    length: int,
    *,
    stride: int | None = None,
    max_windows: int | None = None,
    bos: int | None = None,
) -> list[Window]:
    """Cut each document, ids (n,) or (1, n), into windows that start every ``stride`` tokens, and take the first ``max_windows`` of it.

    By default the stride is the length: windows do not overlap, and each scores all of its tokens but the first. With a
    smaller one a window scores what the one before did not reach, so that each token but those of the first window has at
    least ``length - stride`` tokens of context. The last window of a document may be shorter. With ``bos`` every window
    begins with that token, which counts in the length and is never scored.
    Raises ``ValueError`` when a shape is another, a number too small, or nothing is left to score.
    """
    body = length - (bos is not None)
    stride = body if stride is None else stride
    if body < 2:
        raise ValueError(f"a window needs at least 2 tokens, got length {length}")
    if not 1 <= stride <= body:
        raise ValueError(f"stride must be from 1 to the {body} tokens of text in a window, got {stride}")
    if max_windows is not None and max_windows < 1:
        raise ValueError(f"max_windows must be at least 1, got {max_windows}")
    windows: list[Window] = []
    for number, document in enumerate(documents):
        ids = document[0] if document.dim() == 2 and document.shape[0] == 1 else document
        if ids.dim() != 1:
            raise ValueError(f"input_ids must have shape (n,) or (1, n), got {tuple(document.shape)}")
        starts = range(0, max(1, len(ids) - (body - stride)), stride)
        reached = 0
        for start in islice(starts, max_windows):
            part = ids[start : start + body]
            if bos is not None:
                part = torch.cat([part.new_tensor([bos]), part])
            scored = min(start + body, len(ids)) - reached
            scored = min(scored, len(part) - 1)
            reached = start + body
            if scored > 0:
                windows.append(Window(part[None], scored, number))
    if not windows:
        raise ValueError(f"nothing to score: the text has {sum(one.numel() for one in documents)} token(s)")
    return windows


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """Return the ids (n,) of a text of any length, without special tokens."""
    return tokenizer(text, return_tensors="pt", add_special_tokens=False, truncation=False, verbose=False).input_ids[0]


def beginning_token(tokenizer: Any) -> int | None:
    """Return the token that the tokenizer puts before every text, for models that were trained to see it; None without one."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("a").input_ids[:1] == [bos] else None

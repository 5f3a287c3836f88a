# SPDX-License-Identifier: Apache-2.0
"""The token ids of a user's text, as the model would read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .windows import beginning_token, tokenize

CHARACTERS_A_TOKEN = 8  # more than any language model's vocabulary averages


def prompt_ids(tokenizer: Any, text: str, length: int | None = None, *, at_most: int | None = None) -> Tensor:
    """Return ids (1, L) of the text's beginning, after the token that the tokenizer puts before every text, if any.

    length: exactly so many tokens, that one included. at_most: where no length is given, the most.
    Raises ``ValueError`` for a length below 2, a text that has fewer tokens than asked for, and one with none.
    """
    if length is not None and length < 2:
        raise ValueError(f"length must be at least 2 tokens, got {length}")
    wanted = at_most if length is None else length
    ids = tokenize(tokenizer, text if wanted is None else text[: CHARACTERS_A_TOKEN * wanted])
    if not len(ids):
        raise ValueError("the text has no tokens")
    bos = beginning_token(tokenizer)
    if bos is not None:
        ids = torch.cat([ids.new_tensor([bos]), ids])
    if length is not None and len(ids) < length:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than the length {length}")
    return ids[None, :wanted]

# SPDX-License-Identifier: Apache-2.0
"""The support of an attention call: which tiles its query tiles retained, one bit each.

``support`` is int32 (num_sequences, num_heads, q_tiles, words): bit ``j % 32`` of word ``j // 32`` belongs to key tile ``j``.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .visibility import Sequences

BITS = 32  # of a word


@triton.jit
def set_bit(words, index, mask):
    """Set bit ``index`` of a row of words; other programs may be setting other bits of it."""
    tl.atomic_or(words + index // 32, 1 << (index % 32), mask=mask, sem="relaxed")


def empty_support(sequences: Sequences, num_heads: int, tile: tuple[int, int], device: torch.device) -> Tensor:
    """A support in which nothing is retained."""
    q_tiles, k_tiles = sequences.tile_grid(tile)
    words = math.ceil(k_tiles / BITS)
    return torch.zeros(sequences.num_sequences, num_heads, q_tiles, words, dtype=torch.int32, device=device)

# SPDX-License-Identifier: Apache-2.0
"""A map of retained tiles as bits, in PyTorch: what the kernels' ``support`` holds, written and read without Triton.

``support`` is int32 (..., words): bit ``j % 32`` of word ``j // 32`` belongs to key tile ``j``.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 32  # of a word


def support_shape(num_sequences: int, num_heads: int, grid: tuple[int, int]) -> tuple[int, int, int, int]:
    """Shape of a support for ``grid`` (q_tiles, k_tiles); numbers may be symbolic."""
    q_tiles, k_tiles = grid
    return num_sequences, num_heads, q_tiles, -(-k_tiles // BITS)


def pack_support(retained: Tensor) -> Tensor:
    """bool (..., k_tiles) as int32 (..., words)."""
    words = torch.nn.functional.pad(retained, (0, -retained.shape[-1] % BITS)).unflatten(-1, (-1, BITS))
    bits = torch.arange(BITS, device=retained.device)
    return (words.to(torch.int64) << bits).sum(-1).to(torch.int32)  # bit 31 wraps into the sign


def unpack_support(support: Tensor, k_tiles: int) -> Tensor:
    """int32 (..., words) as bool (..., k_tiles)."""
    bits = torch.arange(BITS, device=support.device)
    return (((support[..., None] >> bits) & 1) == 1).flatten(-2)[..., :k_tiles]


def empty_support(num_sequences: int, num_heads: int, grid: tuple[int, int], device: torch.device) -> Tensor:
    """A support in which nothing is retained."""
    return torch.zeros(support_shape(num_sequences, num_heads, grid), dtype=torch.int32, device=device)

# SPDX-License-Identifier: Apache-2.0
"""Which rows and keys each sequence has, and which keys a row may see.

Every layout (fixed, padded on either side, packed, a cache longer than its content) becomes one description: sequence ``b`` owns
query rows ``q_begin <= i < q_end`` and keys ``k_begin <= j < k_end``. Its last row is aligned with its last key; ``window`` counts
the keys to the left and right of the aligned one (-1: unlimited), so causal attention is ``window_right = 0``. Tiles start at the
first row that sees a key and at ``k_begin``: padding never changes which keys share a tile, hence never changes a result. (A mask
operand hides keys without moving tiles.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

ROWS_PER_MASK_CHUNK = 1024


@dataclass(frozen=True)
class Sequences:
    """``bounds`` int32 (num_sequences, 4) of (q_begin, q_end, k_begin, k_end), or None where all share ``common``.

    ``is_packed``: the sequences lie one after the other in tensors of batch size 1.
    """

    num_sequences: int
    max_seqlen_q: int
    max_seqlen_k: int
    common: tuple[int, int, int, int]
    bounds: Optional[Tensor] = None
    is_packed: bool = False

    def tile_grid(self, tile: tuple[int, int]) -> tuple[int, int]:
        """(q_tiles, k_tiles) of the longest sequence."""
        return -(-self.max_seqlen_q // tile[0]), -(-self.max_seqlen_k // tile[1])

    def groups(self) -> Iterator[tuple[slice, slice, tuple[int, int, int, int]]]:
        """(sequence slice, batch slice, bounds) of sequences that can be computed together. Reads ``bounds`` on the host."""
        if self.bounds is None:
            yield slice(0, self.num_sequences), slice(0, self.num_sequences), self.common
            return
        for b, bounds in enumerate(self.bounds.tolist()):
            yield slice(b, b + 1), slice(0, 1) if self.is_packed else slice(b, b + 1), tuple(bounds)


def _first_seeing_row(q_begin, q_end, k_begin, k_end, window_right: int):
    """First row that can see a key; works on ints and on tensors."""
    blind = (q_end - q_begin) - (k_end - k_begin) - window_right
    blind = blind.clamp(min=0) if isinstance(blind, Tensor) else max(blind, 0)
    first = q_begin + blind
    return torch.minimum(first, q_end) if isinstance(first, Tensor) else min(first, q_end)


def fixed_sequences(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    window_right: int,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
) -> Sequences:
    """Sequences of tensors (batch, seqlen, heads, head_dim); the three lengths are int tensors (batch,) or None."""
    if seqused_q is None and seqused_k is None and leftpad_k is None:
        q_begin = _first_seeing_row(0, seqlen_q, 0, seqlen_k, window_right) if window_right >= 0 else 0
        return Sequences(batch, seqlen_q, seqlen_k, (q_begin, seqlen_q, 0, seqlen_k))
    device = next(lengths.device for lengths in (seqused_q, seqused_k, leftpad_k) if lengths is not None)

    def clamped(lengths: Optional[Tensor], default: int, limit: int) -> Tensor:
        if lengths is None:
            return torch.full((batch,), default, dtype=torch.int32, device=device)
        return lengths.to(torch.int32).clamp(0, limit)

    q_end, k_end = clamped(seqused_q, seqlen_q, seqlen_q), clamped(seqused_k, seqlen_k, seqlen_k)
    k_begin = torch.minimum(clamped(leftpad_k, 0, seqlen_k), k_end)
    return _ragged(torch.zeros_like(q_end), q_end, k_begin, k_end, window_right, seqlen_q, seqlen_k, is_packed=False)


def packed_sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, window_right: int
) -> Sequences:
    """Sequences of tensors (total, heads, head_dim) with boundaries cu_seqlens (num_sequences + 1,)."""
    cu_q, cu_k = cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32)
    return _ragged(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], window_right, max_seqlen_q, max_seqlen_k, is_packed=True)


def _ragged(q_begin, q_end, k_begin, k_end, window_right, max_seqlen_q, max_seqlen_k, *, is_packed) -> Sequences:
    if window_right >= 0:
        q_begin = _first_seeing_row(q_begin, q_end, k_begin, k_end, window_right)
    bounds = torch.stack([q_begin, q_end, k_begin, k_end], 1).contiguous()
    return Sequences(len(bounds), max_seqlen_q, max_seqlen_k, (0, 0, 0, 0), bounds, is_packed)


def visible_range(position: Tensor, seqlen_k: int, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """First and one-past-last key that a row aligned with key ``position`` sees by window and length."""
    left, right = window
    low = (position - left).clamp(min=0) if left >= 0 else torch.zeros_like(position)
    high = (position + right + 1).clamp(max=seqlen_k) if right >= 0 else torch.full_like(position, seqlen_k)
    return low, torch.maximum(low, high)


def visible_keys_under_mask(mask: Tensor, seqlen_q: int, window: tuple[int, int]) -> Tensor:
    """int32 (batch or 1, num_heads or 1, seqlen_q): keys a row sees by window and ``mask``.

    mask is bool (batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k).
    """
    seqlen_k = mask.shape[-1]
    position = torch.arange(seqlen_q, device=mask.device) + seqlen_k - seqlen_q
    low, high = visible_range(position, seqlen_k, window)
    if mask.shape[-2] == 1 or mask.stride(-2) == 0:  # the same keys for every row: differences of one running count
        running = torch.nn.functional.pad(mask[..., 0, :].cumsum(-1), (1, 0))
        return (running[..., high] - running[..., low]).to(torch.int32)
    key = torch.arange(seqlen_k, device=mask.device)
    counts = []
    for start in range(0, seqlen_q, ROWS_PER_MASK_CHUNK):
        rows = slice(start, start + ROWS_PER_MASK_CHUNK)
        legal = (key >= low[rows, None]) & (key < high[rows, None])
        counts.append((mask[..., rows, :] & legal).sum(-1, dtype=torch.int32))
    return torch.cat(counts, -1) if counts else mask.new_zeros(*mask.shape[:2], 0, dtype=torch.int32)

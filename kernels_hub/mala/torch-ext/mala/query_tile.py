# SPDX-License-Identifier: Apache-2.0
"""One query tile of the blockwise form: its rows, their thresholds, and its scores, a chunk of keys at a time.

Letters in the shape comments: B batch, K num_kv_heads, G query heads per KV head, M rows, T key tiles, N keys of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from .visibility import visible_range

KEYS_PER_CHUNK = 4096
NEG_INF = -math.inf


@dataclass(frozen=True)
class Settings:
    """Numbers of one call: ``window`` (left, right) with causal folded in, ``softcap`` 0 for none, ``tile`` (BLOCK_M, BLOCK_N)."""

    tau: float
    softmax_scale: float
    window: tuple[int, int]
    softcap: float
    tile: tuple[int, int]


def log_threshold(visible_keys: Tensor, tau: float) -> Tensor:
    """log(tau / L_q), capped at 0; -inf for tau = 0."""
    return torch.log((tau / visible_keys.clamp(min=1)).clamp(max=1.0))


class QueryTile:
    """One query tile of a group of sequences: its rows, threshold and the scores of a chunk of keys."""

    def __init__(self, q, k, seqlens, rows, settings: Settings, mask: Optional[Tensor]):
        seqlen_q, seqlen_k = seqlens
        block_n = settings.tile[1]
        self.k, self.settings, self.rows = k, settings, rows
        self.q = q[:, :, :, rows] * settings.softmax_scale  # (B, K, G, M, D)
        self.mask = None if mask is None else mask[..., rows, :]  # (B, K or 1, G or 1, M, seqlen_k)
        position = torch.arange(rows.start, rows.stop, device=q.device) + seqlen_k - seqlen_q
        self.low, self.high = visible_range(position, seqlen_k, settings.window)  # (M,)
        ends = (
            torch.tensor([rows.start, rows.stop - 1]) + seqlen_k - seqlen_q
        )  # both grow with the row: the ends bound all rows
        (min_low, self.all_low), (self.all_high, max_high) = (
            x.tolist() for x in visible_range(ends, seqlen_k, settings.window)
        )
        visible = self.high - self.low
        if self.mask is not None:
            keys = torch.arange(seqlen_k, device=q.device)
            in_window = (keys >= self.low[:, None]) & (keys < self.high[:, None])
            visible = (self.mask & in_window).sum(-1)
        self.threshold = log_threshold(visible, settings.tau).to(q.dtype)  # (..., M)
        first, last = min_low // block_n, math.ceil(max_high / block_n)
        step = max(1, KEYS_PER_CHUNK // block_n)
        # whole tiles, from the diagonal toward earlier keys
        self.chunks = [
            (max(first, end - step) * block_n, min(end * block_n, seqlen_k)) for end in range(last, first, -step)
        ]

    def scores(self, start: int, stop: int) -> tuple[Tensor, Optional[Tensor]]:
        """Scores (B, K, G, M, N) of keys start to stop, -inf where illegal, and the legal pairs (None: all legal)."""
        b, kv_heads, groups, m, d = self.q.shape
        scores = (self.q.reshape(b, kv_heads, groups * m, d) @ self.k[:, :, start:stop].mT).view(
            b, kv_heads, groups, m, stop - start
        )
        if self.settings.softcap:
            scores = self.settings.softcap * torch.tanh(scores / self.settings.softcap)
        legal = None
        if self.mask is not None or start < self.all_low or stop > self.all_high:
            keys = torch.arange(start, stop, device=scores.device)
            legal = (keys >= self.low[:, None]) & (keys < self.high[:, None])  # (M, N)
            if self.mask is not None:
                legal = legal & self.mask[..., start:stop]
            scores = scores.masked_fill_(~legal, NEG_INF)
        return scores, legal

    def by_tile(self, x: Tensor, fill: float) -> Tensor:
        """(..., N) -> (..., T, BLOCK_N), the ragged last tile filled up."""
        block_n = self.settings.tile[1]
        missing = -x.shape[-1] % block_n
        return (torch.nn.functional.pad(x, (0, missing), value=fill) if missing else x).unflatten(-1, (-1, block_n))


def finite(x: Tensor) -> Tensor:
    """``x`` with 0 for -inf: what may be subtracted from -inf. A NaN stays."""
    return x.where(x != NEG_INF, 0)


def heads_first(x: Tensor, kv_heads: int) -> Tensor:
    """(B, L, H, D) -> (B, K, G, L, D)."""
    return x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)


def grouped_mask(mask: Optional[Tensor], kv_heads: int, seqlen_q: int) -> Optional[Tensor]:
    """(B or 1, heads or 1, rows or 1, keys) -> (B or 1, K or 1, G or 1, seqlen_q, keys)."""
    if mask is None:
        return None
    mask = mask.expand(-1, -1, seqlen_q, -1)
    return mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (kv_heads, -1))


def query_tiles(seqlen_q: int, block_m: int) -> list[slice]:
    """The rows of each query tile."""
    return [slice(start, min(start + block_m, seqlen_q)) for start in range(0, seqlen_q, block_m)]

# SPDX-License-Identifier: Apache-2.0
"""Whether discovery in INT8 pays for a call: a few query rows are scored first. Either way the result is the same, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .decode import launch_decode
from .query_tile import Settings
from .tile_config import MAX_DECODE_ROWS, decode_launch
from .tma import nvidia_major
from .visibility import Sequences, fixed_sequences
from .work import NOT_VISIBLE, RETAINED

# measured on an H200 with head_dim 128 (docs/performance.md); elsewhere nothing is known, so nothing is tried
MIN_SEQLEN = 16384
HEAD_DIM = 128
MAX_FRACTION = 0.05  # of the tiles, retained: beyond, walking the candidates costs more than INT8 scores save


def choose_discovery(q: Tensor, k: Tensor, v: Tensor, settings: Settings, sequences: Sequences) -> str:
    """ "int8" or "fused". Waits for the device, so a call that is captured in a CUDA graph is always "fused"."""
    q_begin, q_end, _, seqlen_k = sequences.common
    shortest = min(q_end - q_begin, seqlen_k)
    if nvidia_major(q.device) != 9 or q.shape[-1] != HEAD_DIM or shortest < MIN_SEQLEN:
        return "fused"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "fused"
    middle = (q_begin + q_end) // 2
    retained, visible = (
        sum(counts) for counts in zip(*(_probe(q, k, v, settings, sequences, end) for end in (middle, q_end)))
    )
    return "int8" if int(retained) <= MAX_FRACTION * int(visible) else "fused"


def _probe(
    q: Tensor, k: Tensor, v: Tensor, settings: Settings, sequences: Sequences, end: int
) -> tuple[Tensor, Tensor]:
    """Retained and visible tiles of the last rows before ``end``, all heads, against the full normalizer."""
    group = q.shape[2] // k.shape[2]
    tokens = max(1, MAX_DECODE_ROWS // group)
    seqlen_k = k.shape[1]
    if settings.window[1] >= 0:  # the rows' own last key is the last one
        seqlen_k -= sequences.common[1] - end
    rows, keys, values = q[:, end - tokens : end], k[:, :seqlen_k], v[:, :seqlen_k]
    tile = tokens, decode_launch(q.shape[-1], v.shape[-1], q.dtype).block_n
    seen = fixed_sequences(q.shape[0], tokens, seqlen_k, settings.window[1])
    tiles = launch_decode(
        rows, keys, values, replace(settings, tile=tile), seen, None, "two_pass", return_work=True
    )[2]  # fmt: skip
    assert tiles is not None
    return (tiles == RETAINED).sum(), (tiles != NOT_VISIBLE).sum()

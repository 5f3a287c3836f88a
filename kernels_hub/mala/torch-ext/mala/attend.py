# SPDX-License-Identifier: Apache-2.0
"""One checked call: whether its support is saved, recorded or known already; the operator; what it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from . import operators
from .query_tile import Settings
from .support_bits import support_shape
from .support_reuse import record_support, records_support, replayed_support
from .visibility import Sequences
from .work import Work

MIN_RATIO_TO_OUT = 8  # bytes of out over those of a support that is saved without being asked for


@dataclass(frozen=True)
class Call:
    """All of a call but its tensors."""

    settings: Settings
    sequences: Sequences
    impl: str
    return_work: bool
    save_support: Optional[bool]
    discovery: str
    form: str = "single"
    num_splits: int = 0


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
    call: Call,
    block_table: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Optional[Work]]:
    """out, lse, and the work if it is asked for; tensors as :func:`blockwise.forward` takes them.

    With a ``block_table`` (batch, pages), which only a decode on a GPU takes, k and v are (pages, page_size, num_kv_heads, ...).
    """
    settings, sequences = call.settings, call.sequences
    sinks = None if sinks is None else sinks.contiguous()  # the kernels read it, and a table of pages, by index
    block_table = None if block_table is None else block_table.to(torch.int32).contiguous()
    q_tiles, k_tiles = sequences.tile_grid(settings.tile)
    shape = support_shape(sequences.num_sequences, q.shape[2], (q_tiles, k_tiles))
    records, known = records_support(), replayed_support(shape, q.device)
    if call.save_support is False and (records or known is not None):
        raise ValueError("reuse_support keeps the support of every call: leave save_support at None, or set it to True")
    saves = known is None and (records or _saves_support(call, q, k, v, sinks, shape))
    if call.impl == "reference" and (saves or known is not None):
        raise ValueError("the reference scores every tile again and saves no support: leave save_support at None")
    out, lse, tiles, certificate, found = operators.run_forward(
        q, k, v, sinks, mask, sequences.bounds, known, sequences.max_seqlen_q, sequences.max_seqlen_k, sequences.is_packed,
        settings.tau, settings.softmax_scale, *settings.window, settings.softcap, *settings.tile, call.impl, call.discovery,
        call.form, call.num_splits, block_table, call.return_work, saves,
    )  # fmt: skip
    if records:
        record_support(found)
    if not call.return_work:
        return out, lse, None
    certificate = certificate[0] if sequences.is_packed else certificate
    saved_bytes = (found if known is None else known).nbytes
    rows = _rows_of_tiles(call, q_tiles, q.device)
    work = Work(tiles, certificate, rows, settings.tile, call.impl, saved_bytes, call.form)
    return out, lse, work


def _saves_support(call: Call, q, k, v, sinks, shape: tuple[int, int, int, int]) -> bool:
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in (q, k, v, sinks)):
        return False
    if call.save_support is not None:
        return call.save_support
    num_sequences, num_heads, q_tiles, words = shape
    support_bytes = num_sequences * num_heads * q_tiles * words * torch.int32.itemsize
    out_bytes = q.shape[0] * q.shape[1] * num_heads * v.shape[3] * q.element_size()
    return call.impl != "reference" and support_bytes * MIN_RATIO_TO_OUT <= out_bytes


def _rows_of_tiles(call: Call, q_tiles: int, device: torch.device) -> Tensor:
    sequences, block_m = call.sequences, call.settings.tile[0]
    if sequences.bounds is None:
        q_begin, q_end = sequences.common[:2]
        lengths = torch.full((sequences.num_sequences,), q_end - q_begin, dtype=torch.int32, device=device)
    else:
        lengths = sequences.bounds[:, 1] - sequences.bounds[:, 0]
    starts = torch.arange(q_tiles, dtype=torch.int32, device=device) * block_m
    return (lengths[:, None] - starts).clamp(0, block_m)

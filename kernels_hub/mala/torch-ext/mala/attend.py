# SPDX-License-Identifier: Apache-2.0
"""One checked call: whether its support is saved, recorded or known already; the operator; what it reports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional

import torch
from torch import Tensor

from . import operators
from .choice_memory import memory, remembers
from .dense import (
    NAMES,
    OWN,
    affordable_backend,
    dense_attention_in_graph,
    dense_attention_with_lse,
    dense_backend,
    dense_tiles,
    offered_attention,
)
from .discover_choice import choose
from .key_plane import KeyPlane
from .query_tile import Settings
from .support_bits import support_shape
from .support_reuse import is_reusing_support, record_support, records_support, replayed_support
from .visibility import Sequences
from .work import INSTEAD, Choice, Work

MIN_RATIO_TO_OUT = 8  # bytes of out over those of a support that is saved without being asked for


@dataclass(frozen=True)
class Call:
    """All of a call but its tensors.

    ``may_be``: the ways among which it is to be chosen; none where ``discovery`` is one. ``dense_reason``: why a decode retains every
    tile, as a short one may; empty where it does not.
    """

    settings: Settings
    sequences: Sequences
    impl: str
    return_work: bool
    save_support: Optional[bool]
    discovery: str
    may_be: tuple[str, ...] = ()
    form: str = "single"
    num_splits: int = 0
    dense_reason: str = ""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
    call: Call,
    block_table: Optional[Tensor] = None,
    key_plane: Optional[KeyPlane] = None,
) -> tuple[Tensor, Optional[Tensor], Optional[Work]]:
    """out, lse, and the work if it is asked for; tensors as :func:`blockwise.forward` takes them.

    With a ``block_table`` (batch, pages), which only a decode on a GPU takes, k and v are (pages, page_size, num_kv_heads, ...).
    ``key_plane`` is read by the form "int8_two_pass" alone.
    lse is None where a compiled graph calls torch's dense attention, which ``may_be`` then has to allow.
    """
    choices, backend = _choices(q, k, v, call)
    if len(choices) == 1:
        return _attend_as(choices[0], backend, q, k, v, sinks, mask, call, block_table, key_plane)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    works = []
    for choice in choices:
        assert choice.kv_heads is not None  # of one of several choices
        of_keys = _indices(choice.kv_heads, 1, q.device)
        of_queries = _indices(choice.kv_heads, q.shape[2] // k.shape[2], q.device)
        own = q.index_select(2, of_queries), k.index_select(2, of_keys), v.index_select(2, of_keys)
        own_sinks = None if sinks is None else sinks.index_select(0, of_queries)
        part, part_lse, work = _attend_as(choice, backend, *own, own_sinks, None, call, None)
        out.index_copy_(2, of_queries, part)
        assert part_lse is not None  # no compiler looks at scores
        lse.index_copy_(1, of_queries, part_lse)
        if work is not None:
            works.append((of_queries, work))
    return out, lse, _together(works, q.shape[2]) if call.return_work else None


def _indices(heads: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """``size`` numbers from ``head * size`` on for each of the heads, without a copy from the host, which no CUDA graph takes in."""
    return torch.cat([torch.arange(head * size, (head + 1) * size, device=device) for head in heads])


def _choices(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[list[Choice], Optional[str]]:
    """The ways that the call takes, and the dense kernel that is at hand for it."""
    if call.form != "single":
        if call.dense_reason:
            return [Choice("dense", call.dense_reason)], OWN
        if call.form == "int8_two_pass":
            return [Choice("int8", "a decode whose keys have an INT8 plane")], None
        return [Choice("fused", "a decode has one way")], None
    if call.discovery == "dense":
        backend = dense_backend(q, k, v, call.settings)
        if backend is None:
            raise ValueError(
                f"discovery='dense': torch's cuDNN and FlashAttention kernels refuse this call or are switched off. {INSTEAD}"
            )
        return [Choice("dense", f"asked for; {backend}")], backend
    may_be = call.may_be or (("fused", "int8") if call.discovery == "auto" else ())
    if not may_be:
        return [_as_it_runs(Choice(call.discovery, "asked for, or all that covers the call"), call)], None
    is_compiling, backend = torch.compiler.is_compiling(), None
    if len(may_be) > 1 and not is_compiling and operators.needs_operator([q, k, v]):
        return [Choice("fused", "a transform or a dispatch mode has to see MALA's own operator")], None
    if "dense" in may_be and not is_compiling:
        backend = None if is_reusing_support() else dense_backend(q, k, v, call.settings)
        may_be = may_be if backend else tuple(way for way in may_be if way != "dense")
    choices = choose(q, k, call.settings, call.sequences, may_be, memory if remembers(q, k, v) else None)
    return [_as_it_runs(choice, call) for choice in choices], backend


def _as_it_runs(choice: Choice, call: Call) -> Choice:
    if choice.way == "int8" and call.return_work:
        return replace(
            choice, way="fused", reason=f"{choice.reason}; a call that returns its work scores every tile exactly"
        )
    return choice


def _attend_as(
    choice: Choice,
    backend: Optional[str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
    call: Call,
    block_table: Optional[Tensor],
    key_plane: Optional[KeyPlane] = None,
) -> tuple[Tensor, Optional[Tensor], Optional[Work]]:
    settings, sequences, way = call.settings, call.sequences, choice.way
    if way == "dense":
        if call.discovery != "dense" and backend is not None:
            offer = None if backend == OWN else offered_attention(q, k, v, settings)
            if offer is not None:
                kernel, results = offer
                choice = replace(choice, reason=f"{choice.reason}; by {kernel.name}")
                return *results, _dense_work(choice, kernel.impl, q, call)
            backend = affordable_backend(backend, q, k, v, settings)
            choice = replace(choice, reason=f"{choice.reason}; {NAMES[backend]}")
        if backend != OWN:
            return *_dense_attention(backend, q, k, v, settings), _dense_work(choice, "sdpa", q, call)
        settings, way = replace(settings, tau=0.0), "fused"
    sinks = None if sinks is None else sinks.contiguous()  # the kernels read it, and a table of pages, by index
    block_table = None if block_table is None else block_table.to(torch.int32).contiguous()
    plane = key_plane.tensors if call.form == "int8_two_pass" and key_plane is not None else (None, None, None)
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
        settings.tau, settings.softmax_scale, *settings.window, settings.softcap, *settings.tile, call.impl, way,
        call.form, call.num_splits, block_table, *plane, call.return_work, saves,
    )  # fmt: skip
    if records:
        record_support(found)
    if not call.return_work:
        return out, lse, None
    certificate = certificate[0] if sequences.is_packed else certificate
    saved_bytes = (found if known is None else known).nbytes
    rows = _rows_of_tiles(call, q_tiles, q.device)
    work = Work(tiles, certificate, rows, settings.tile, call.impl, saved_bytes, call.form, (choice,))
    return out, lse, work


def _dense_attention(
    backend: Optional[str], q: Tensor, k: Tensor, v: Tensor, settings: Settings
) -> tuple[Tensor, Optional[Tensor]]:
    if backend is None:
        return dense_attention_in_graph(q, k, v, settings), None
    with torch.autocast(q.device.type, enabled=False):
        return dense_attention_with_lse(q, k, v, settings, backend)


def _dense_work(choice: Choice, impl: str, q: Tensor, call: Call) -> Optional[Work]:
    if not call.return_work:
        return None
    settings, sequences, num_heads = call.settings, call.sequences, q.shape[2]
    tiles = dense_tiles(settings, sequences, num_heads, q.device)
    nothing = torch.zeros(q.shape[0], num_heads, q.shape[1], device=q.device)
    rows = _rows_of_tiles(call, tiles.shape[2], q.device)
    return Work(tiles, nothing, rows, settings.tile, impl, choices=(choice,))


def _together(works: list[tuple[Tensor, Work]], num_heads: int) -> Work:
    """The work of all heads, from that of some each: (their query heads, their work)."""
    heads = torch.cat([of_queries for of_queries, _ in works]).argsort()
    parts = [work for _, work in works]
    tiles, certificate = (
        torch.cat([getattr(part, name) for part in parts], 1).index_select(1, heads)
        for name in ("tiles", "certificate")
    )
    return replace(
        parts[0],
        tiles=tiles,
        certificate=certificate,
        impl=", ".join(sorted({part.impl for part in parts}, reverse=True)),
        support_bytes=sum(part.support_bytes for part in parts),
        choices=tuple(choice for part in parts for choice in part.choices),
    )


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

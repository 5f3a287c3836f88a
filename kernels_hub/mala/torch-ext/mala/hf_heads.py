# SPDX-License-Identifier: Apache-2.0
"""Query heads of one layer with settings of their own: which run in one call, with which keys and values, and where they go.

Equal settings share a call. It takes only key-value heads that serve an equal number of its query heads, each of them once: it stays
grouped-query attention without repeated keys, and gradients of keys are sums in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import Tensor

from .hf_settings import HeadSettings, LayerSettings, named
from .work import Work

# each returns (place, size) of this process among those that share the heads of its layers, or None
sharers: list[Callable[[], Optional[tuple[int, int]]]] = []


@dataclass(frozen=True)
class HeadGroup:
    """Query heads of one call and the key-value heads that serve them, in rising order; None: all of them."""

    settings: HeadSettings
    heads: Optional[tuple[int, ...]] = None
    kv_heads: Optional[tuple[int, ...]] = None

    def of_queries(self, x: Tensor, dim: int) -> Tensor:
        """The group's part of a tensor with one entry per query head along ``dim``, or one for all."""
        return x if x.shape[dim] == 1 else _taken(x, self.heads, dim)

    def of_keys(self, x: Tensor, dim: int) -> Tensor:
        """The group's part of a tensor with one entry per key-value head along ``dim``."""
        return _taken(x, self.kv_heads, dim)


@dataclass(frozen=True)
class HeadWork:
    """What a recorder hears of one call: its ``work`` (None for dense heads), its tau, and the query heads it had.

    ``heads`` are counted over all ``total`` of the layer, also where processes share them; over those of this process, and
    ``total`` is None, where nobody knows which they are.
    """

    work: Optional[Work]
    tau: Optional[float]
    heads: tuple[int, ...]
    total: Optional[int]

    @classmethod
    def of(cls, group: HeadGroup, work: Optional[Work], num_heads: int, first: Optional[int], total: int) -> HeadWork:
        """Of one group among a process's ``num_heads``; ``first`` and ``total`` as in :func:`head_groups`."""
        heads = range(num_heads) if group.heads is None else group.heads
        places = tuple(head + (first or 0) for head in heads)
        return cls(work, group.settings.tau, places, None if first is None else total)


def head_groups(
    settings: LayerSettings, num_heads: int, num_kv_heads: int, first: Optional[int], total: int
) -> list[HeadGroup]:
    """The calls of one layer.

    Args:
        num_heads, num_kv_heads: of the tensors at hand.
        first, total: which query heads of the model these are: ``first`` is the first of them, None if nobody knows.

    Raises:
        ValueError: for heads that the layer lacks, a head named twice, and settings by head where ``first`` is not known.
    """
    if not settings.heads:
        return [HeadGroup(settings.common)]
    if first is None:
        raise ValueError(
            f"config.mala sets single heads, and this process has {num_heads} of the model's {total} without saying which: "
            "set whole layers instead"
        )
    by_key = dict(settings.heads)
    try:
        owners = named(tuple(by_key), total, "head")
    except ValueError as error:
        raise ValueError(f"config.mala: {error}; see mala_hf.MalaConfig") from None
    own = [by_key[owners[head]] if head in owners else settings.common for head in range(first, first + num_heads)]
    if all(one == own[0] for one in own):
        return [HeadGroup(own[0])]
    ratio = num_heads // num_kv_heads
    heads_of: dict[tuple[HeadSettings, int], list[int]] = {}
    for head, one in enumerate(own):
        shares = own[head - head % ratio : head - head % ratio + ratio].count(one)
        heads_of.setdefault((one, shares), []).append(head)
    return [
        HeadGroup(one, tuple(heads), tuple(sorted({head // ratio for head in heads})))
        for (one, _), heads in heads_of.items()
    ]


def put_together(outs: list[Tensor], groups: list[HeadGroup]) -> Tensor:
    """out (batch, seqlen, num_heads, v_head_dim) of the groups' outputs (batch, seqlen, their heads, v_head_dim)."""
    if len(outs) == 1:
        return outs[0]
    order = [head for group in groups for head in group.heads or ()]
    return _taken(torch.cat(outs, 2), tuple(order.index(head) for head in range(len(order))), 2)


def head_share(module, num_heads: int) -> tuple[Optional[int], int]:
    """(first, total): which of the model's query heads a layer's ``num_heads`` are; first is None if nobody knows.

    Processes share them in order. Under tensor parallelism weights are distributed tensors, which say at which place this one is;
    of others ``sharers`` may know.
    """
    total = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if not isinstance(total, int) or total <= num_heads:
        return 0, num_heads
    meshes = (getattr(weight, "device_mesh", None) for weight in module.parameters())
    places = [(mesh.get_local_rank(), mesh.size()) for mesh in meshes if mesh is not None and mesh.ndim == 1]
    for found in (*places, *(share() for share in sharers)):
        if found is not None and found[1] * num_heads == total:
            return found[0] * num_heads, total
    return None, total


def _taken(x: Tensor, indices: Optional[tuple[int, ...]], dim: int) -> Tensor:
    """``x`` at these places of ``dim``: a view where they are equally far apart."""
    if indices is None or indices == tuple(range(x.shape[dim])):
        return x
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    places = range(indices[0], indices[-1] + 1, step) if step > 0 else range(0)
    if indices == tuple(places):
        return x[(slice(None),) * dim + (slice(places.start, places.stop, step),)]
    return x.index_select(dim, torch.tensor(indices, device=x.device))

# SPDX-License-Identifier: Apache-2.0
"""What a row is measured on: synthetic inputs with so many retained slots, flat ones, or captured q, k, v."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..ops import mala_attn_func
from ..workloads import Inputs, calibrated_inputs, captured_inputs, flat_kv_heads, peaked_inputs


@dataclass(frozen=True)
class Workload:
    """``slots`` retained key slots per query to aim at in the heads that are not flat; None where nothing can be aimed at.

    seqlen: None for all tokens that were captured.
    """

    seqlen: int | None
    slots: float | None
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    flat_share: float = 0.0
    captured: Path | None = None

    def __post_init__(self) -> None:
        if min(1 if self.seqlen is None else self.seqlen, self.num_heads, self.num_kv_heads, self.head_dim) < 1:
            raise ValueError(f"sizes of a workload must be at least 1, got {self}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} KV heads do not divide {self.num_heads} query heads")

    @property
    def name(self) -> str:
        """Says in a line what it is."""
        aim = "" if self.slots is None else f", {self.slots:g} slots"
        flat = f", {self.flat_share:g} flat" if self.flat_share else ""
        heads = f", {self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}" if self.captured is None else ""
        return f"{self.seqlen or 'all'} tokens{aim}{flat}{heads}"

    def inputs(self, device: torch.device) -> Inputs:
        """The tensors, bfloat16 on a GPU and float32 on the CPU."""
        place: dict[str, Any] = {"dtype": bench_dtype(device), "device": device}
        if self.captured is not None:
            return captured_inputs(self.captured, self.seqlen, **place)
        assert self.seqlen is not None
        shape: dict[str, Any] = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
        }
        if self.slots is None:
            return peaked_inputs(self.seqlen, links=0.0, flat_share=self.flat_share, **shape, **place)
        return calibrated_inputs(self.seqlen, self.slots, measured_slots, flat_share=self.flat_share, **shape, **place)


def workloads_of(
    lengths: Sequence[int], slots: Sequence[float], flat_share: float, shape: dict[str, Any]
) -> list[Workload]:
    """Every length with every number of slots; where all heads are flat, one row for each length."""
    all_flat = flat_kv_heads(flat_share, shape["num_kv_heads"]) == shape["num_kv_heads"]
    aims: list[float | None] = [None] if all_flat else [*slots]
    return [Workload(length, aim, flat_share=flat_share, **shape) for length in lengths for aim in aims]


def workload_of(shape: str) -> Workload:
    """The workload of ``Q,KV,D,LENGTH,SLOTS``: query heads, KV heads, head_dim, tokens, and retained slots to aim at, or ``flat``.

    ``SLOTS:SHARE`` makes a share of the KV heads flat. Raises ``ValueError`` for anything else.
    """
    try:
        *sizes, aim = shape.split(",")
        num_heads, num_kv_heads, head_dim, seqlen = map(int, sizes)
        slots, _, share = aim.partition(":")
        flat_share = 1.0 if slots == "flat" else float(share or 0)
        goal = None if slots == "flat" else float(slots)
    except ValueError:
        raise ValueError(f"a shape is Q,KV,D,LENGTH,SLOTS, SLOTS a number, number:share or flat, got {shape}") from None
    if goal is not None and not goal > 0:
        raise ValueError(f"slots must be above 0, got {shape}")
    return Workload(seqlen, goal, num_heads, num_kv_heads, head_dim, flat_share)


def bench_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU, float32 on the CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def measured_slots(inputs: Inputs) -> float:
    """Retained key slots per query, mean over the heads that are not flat."""
    _, work = mala_attn_func(inputs.q, inputs.k, inputs.v, causal=True, discovery="fused", return_work=True)
    return work.key_slots_per_query[:, inputs.flat_heads :].mean().item()


def described(workload: Workload, inputs: Inputs) -> dict[str, Any]:
    """The beginning of a row: what the inputs are."""
    return {
        "seqlen": inputs.q.shape[1],
        "num_heads": inputs.q.shape[2],
        "num_kv_heads": inputs.k.shape[2],
        "head_dim": inputs.q.shape[3],
        "dtype": str(inputs.q.dtype).removeprefix("torch."),
        "causal": True,
        "requested_slots": workload.slots,
        "flat_heads": inputs.flat_heads,
        "captured": None if workload.captured is None else workload.captured.name,
    }


def copies_of(inputs: Inputs, copies: int) -> list[Inputs]:
    """The inputs and their clones, ``copies`` in all."""
    clones = [Inputs(inputs.q.clone(), inputs.k.clone(), inputs.v.clone()) for _ in range(copies - 1)]
    return [inputs, *clones]

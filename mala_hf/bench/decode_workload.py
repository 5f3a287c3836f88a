# SPDX-License-Identifier: Apache-2.0
"""What a row of the decode is measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..ops import mala_attn_func
from ..workloads import Inputs, captured_inputs
from .decode_inputs import DecodeShape, decode_inputs
from .workload import bench_dtype

# of a run without arguments: batch, query heads, KV heads, context; and one where all heads are flat
SHAPES = (
    (1, 16, 8, 131072),
    (8, 16, 8, 131072),
    (8, 32, 8, 32768),
    (1, 16, 8, 32768),
    (1, 16, 8, 8192),
    (8, 32, 8, 8192),
)
FLAT_SHAPE = (1, 16, 8, 131072)


@dataclass(frozen=True)
class DecodeWorkload:
    """A shape with ``slots`` retained key slots per query to aim at, or ``context`` tokens (None: all) of captured q, k, v."""

    shape: DecodeShape | None
    slots: float = 400.0
    flat_share: float = 0.0
    captured: Path | None = None
    context: int | None = None

    @property
    def name(self) -> str:
        """Says in a line what it is."""
        if self.shape is None:
            return f"the last of {self.context or 'all'} tokens of {self.captured}"
        one = self.shape
        flat = f", flat share {self.flat_share:g}" if self.flat_share else ""
        return f"batch {one.batch}, {one.num_heads}/{one.num_kv_heads} heads, context {one.context}, {self.slots:g} slots{flat}"

    def inputs(self, device: torch.device) -> Inputs:
        """One query for each sequence, over its whole cache; bfloat16 on a GPU and float32 on the CPU."""
        dtype = bench_dtype(device)
        if self.shape is None:
            assert self.captured is not None
            found = captured_inputs(self.captured, self.context, dtype=dtype, device=device)
            return Inputs(found.q[:, -1:].contiguous(), found.k, found.v)
        return decode_inputs(
            self.shape, self.slots, decode_slots, flat_share=self.flat_share, dtype=dtype, device=device
        )


def decode_slots(inputs: Inputs) -> float:
    """Retained key slots per query of the two-pass form, mean over the heads that are not flat."""
    _, work = mala_attn_func(inputs.q, inputs.k, inputs.v, causal=True, decode="two_pass", return_work=True)
    return work.key_slots_per_query[:, inputs.flat_heads :].mean().item()


def parsed_shape(text: str, head_dim: int) -> DecodeShape:
    """The shape ``BATCH,QUERY_HEADS,KV_HEADS,CONTEXT``; ``ValueError`` for another text."""
    try:
        batch, num_heads, num_kv_heads, context = map(int, text.split(","))
    except ValueError:
        raise ValueError(f"a shape is BATCH,QUERY_HEADS,KV_HEADS,CONTEXT, got {text!r}") from None
    return DecodeShape(batch, num_heads, num_kv_heads, context, head_dim)


def decode_workloads(
    shapes: Sequence[str], slots: Sequence[float], head_dim: int, flat_share: float
) -> list[DecodeWorkload]:
    """Every shape with every number of slots; without shapes ``SHAPES``, and after them ``FLAT_SHAPE`` with flat heads only."""
    given = [parsed_shape(text, head_dim) for text in shapes] or [DecodeShape(*one, head_dim) for one in SHAPES]
    found = [DecodeWorkload(one, aim, flat_share) for one in given for aim in slots]
    return found if shapes else [*found, DecodeWorkload(DecodeShape(*FLAT_SHAPE, head_dim), slots[0], 1.0)]

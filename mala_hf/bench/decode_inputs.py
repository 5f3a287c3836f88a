# SPDX-License-Identifier: Apache-2.0
"""One new token over a long cache, with a stated amount of retained work: the cache is made once, the query fitted to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..workloads import NOISE, SEGMENT, Inputs, flat_kv_heads, segment_codes

TOLERANCE = 0.05  # of the slots that were asked for
STEPS = 8


@dataclass(frozen=True)
class DecodeShape:
    """batch sequences of ``context`` tokens, of which the last is new."""

    batch: int
    num_heads: int
    num_kv_heads: int
    context: int
    head_dim: int = 128

    def __post_init__(self) -> None:
        if min(self.batch, self.num_heads, self.num_kv_heads, self.context, self.head_dim) < 1:
            raise ValueError(f"sizes of a decode must be at least 1, got {self}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} KV heads do not divide {self.num_heads} query heads")


def decode_inputs(
    shape: DecodeShape,
    slots: float,
    measure: Callable[[Inputs], float],
    *,
    flat_share: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> Inputs:
    """q (batch, 1, num_heads, head_dim) over k, v (batch, context, ...) for which ``measure`` comes near ``slots``.

    Keys as in ``workloads.peaked_inputs``. A query carries the code of its own segment and of earlier ones, fewer in the first heads
    than in the last; how many is found by measuring, and what came out is what the row of the benchmark states. The query heads of a KV
    head share what they retain. flat_share: of the KV heads, the first; with 1 all are Gaussian, and nothing is fitted.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    batch, kv_heads, dim = shape.batch, shape.num_kv_heads, shape.head_dim
    groups, flat = shape.num_heads // kv_heads, flat_kv_heads(flat_share, kv_heads)
    segments = -(-shape.context // SEGMENT)
    codes = segment_codes(normal(batch, segments, kv_heads, dim))
    k, v = (torch.empty(batch, shape.context, kv_heads, dim, dtype=dtype, device=device) for _ in "kv")
    for b in range(batch):  # one sequence at a time: memory
        v[b] = normal(shape.context, kv_heads, dim)
        noise = normal(shape.context, kv_heads, dim)
        k[b] = codes[b].repeat_interleave(SEGMENT, 0)[: shape.context] + NOISE * noise
        k[b, :, :flat] = noise[:, :flat]
    own = codes[:, -1].repeat_interleave(groups, 1)  # (batch, num_heads, head_dim)
    noise = normal(batch, shape.num_heads, dim)
    rounding = torch.rand(batch, shape.num_heads, 1, generator=generator, device=device)
    earlier = torch.rand(batch, segments - 1, shape.num_heads, generator=generator, device=device).argsort(1)
    factors = torch.linspace(0.5, 1.5, shape.num_heads, device=device)[:, None]

    def inputs(links: float) -> Inputs:
        counts = (links * factors + rounding).floor().clamp(max=segments - 1)  # never falls with links
        query = own + NOISE * noise
        for link in range(int(counts.max())):
            chosen = earlier[:, link].view(batch, kv_heads, groups).mT[..., None]  # (batch, groups, kv_heads, 1)
            linked = codes.gather(1, chosen.expand(-1, -1, -1, dim))
            query = query + linked.transpose(1, 2).flatten(1, 2) * (counts > link)
        query[:, : flat * groups] = noise[:, : flat * groups]
        return Inputs(query[:, None].to(dtype), k, v, links, flat * groups)

    if flat == kv_heads:
        return inputs(0.0)
    low, high = 0.0, 2.0 * slots / SEGMENT
    best = (math.inf, inputs(low))
    for _ in range(STEPS):
        found = inputs((low + high) / 2)
        got = measure(found)
        if abs(got - slots) < best[0]:
            best = (abs(got - slots), found)
        if best[0] <= TOLERANCE * slots:
            break
        low, high = (found.links, high) if got < slots else (low, found.links)
    return best[1]

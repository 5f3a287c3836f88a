# SPDX-License-Identifier: Apache-2.0
"""Synthetic attention inputs with a stated amount of retained work.

The sequence is cut into segments of 128 tokens, each with a random unit code. Keys carry the code of their segment plus noise;
queries carry the code of their own segment and of a few earlier ones, so the mass of a row lies in its own and the linked segments.
The number of links sets the retained work; ``calibrated_inputs`` finds it by measuring.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SEGMENT = 128
PEAK_LOGIT = 20.0  # score of a matching pair; unrelated pairs stay near 0 with deviation ~2
NOISE = 0.7


@dataclass(frozen=True)
class Inputs:
    """q (batch, seqlen, num_heads, head_dim), k, v, and the mean number of links per query segment."""

    q: Tensor
    k: Tensor
    v: Tensor
    links: float


def peaked_inputs(
    seqlen: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    links: float,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    seed: int = 0,
) -> Inputs:
    """Inputs whose query segments attend to themselves and to ``links`` earlier segments on average.

    Heads differ: head h has ``links`` times a factor between 0.5 and 1.5.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    segments = -(-seqlen // SEGMENT)
    amplitude = (PEAK_LOGIT * head_dim**0.5) ** 0.5
    codes = torch.nn.functional.normalize(normal(batch, segments, num_kv_heads, head_dim), dim=-1)
    groups = num_heads // num_kv_heads
    head_codes = codes.repeat_interleave(groups, 2)  # (batch, segments, num_heads, head_dim)
    factors = torch.linspace(0.5, 1.5, num_heads, device=device)
    counts = torch.poisson((links * factors).expand(batch, segments, num_heads), generator=generator)
    queries = head_codes.clone()
    for link in range(int(counts.max()) if counts.numel() else 0):
        uniform = torch.rand(batch, segments, num_heads, generator=generator, device=device)
        earlier = (uniform * torch.arange(segments, device=device)[:, None]).long()  # (batch, segments, num_heads)
        linked = torch.gather(head_codes, 1, earlier[..., None].expand(-1, -1, -1, head_dim))
        queries += linked * (counts > link)[..., None]
    k = torch.empty(batch, seqlen, num_kv_heads, head_dim, dtype=dtype, device=device)
    q = torch.empty(batch, seqlen, num_heads, head_dim, dtype=dtype, device=device)
    for out, code in ((k, codes), (q, queries)):
        for b in range(batch):
            tokens = code[b].repeat_interleave(SEGMENT, 0)[:seqlen] * amplitude
            out[b] = tokens + NOISE * normal(*tokens.shape)
    v = normal(batch, seqlen, num_kv_heads, head_dim).to(dtype)
    return Inputs(q, k, v, links)


def calibrated_inputs(
    seqlen: int, slots: float, measure: Callable[[Inputs], float], *, tolerance: float = 0.05, steps: int = 12, **shape
) -> Inputs:
    """Peaked inputs for which ``measure`` (retained key slots per query) comes nearest to ``slots``; stops within ``tolerance``."""
    low, high = 0.0, 2.0 * slots / SEGMENT
    best: tuple[float, Inputs] = (math.inf, peaked_inputs(seqlen, links=low, **shape))
    for _ in range(steps):
        inputs = peaked_inputs(seqlen, links=(low + high) / 2, **shape)
        got = measure(inputs)
        if abs(got - slots) < abs(best[0] - slots):
            best = (got, inputs)
        if abs(got - slots) <= tolerance * slots:
            break
        low, high = (inputs.links, high) if got < slots else (low, inputs.links)
    return best[1]

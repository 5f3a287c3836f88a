# SPDX-License-Identifier: Apache-2.0
"""Inputs on which a tile's maximum walks over its limit by single roundings: where a backward would keep what a forward skipped."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from backward_calls import run_backward, run_forward
from calls import Call, build
from inputs import Case
from torch import Tensor


def _in_parts(x: Tensor, dtype: torch.dtype, parts: int = 4) -> Tensor:
    """float32 numbers as ``parts`` numbers of ``dtype`` that sum up to them: (.., parts)."""
    result = []
    for _ in range(parts):
        result.append(x.to(dtype))
        x = x - result[-1].float()
    return torch.stack(result, -1)


@dataclass(frozen=True)
class Walk:
    """One row, three key tiles of ``case.tile``; the middle tile's maximum is what walks, and every sequence of a batch is a step.

    Scores are written into keys; ``shift`` is added to all of them. ``cancelling``: products of that size that sum up to zero beside
    each score, so that its rounding is theirs and depends on the order of the sum.
    """

    case: Case
    dtype: torch.dtype
    device: str
    shift: float = 0.0
    cancelling: float = 0.0
    steps: int = 24

    def around_the_limit(self) -> tuple[float, float]:
        """Where to start and to end so that a forward that leaves itself some slack is crossed too."""
        lse = float(self._last_tile().double().logsumexp(-1))
        limit, rounding = lse - math.log(3 * self.case.tile[1]), torch.finfo(torch.float32).eps
        below, above = (rounding * (n * (1 + abs(lse)) + 4 * self.cancelling) for n in (60, 8))
        return limit - below, limit + above

    def call(self, start: float, end: float) -> Call:
        block_n, head_dim = self.case.tile[1], self.case.head_dim
        scores = torch.full((self.steps, 3, block_n), self.shift - 30.0)
        scores[:, 2] = self._last_tile()
        scores[:, 1, 3] = torch.linspace(start, end, self.steps, dtype=torch.float64).float()
        parts = _in_parts(scores.flatten(1), self.dtype)
        q = torch.zeros(self.steps, 1, 1, head_dim, dtype=self.dtype)
        k = torch.zeros(self.steps, 3 * block_n, 1, head_dim, dtype=self.dtype)
        q[..., : parts.shape[-1]], q[..., head_dim // 2 :] = 1.0, 1.0
        k[:, :, 0, : parts.shape[-1]] = parts
        k[..., head_dim // 2 :: 2], k[..., head_dim // 2 + 1 :: 2] = self.cancelling, -self.cancelling
        case = self.case.with_(seqlen_q=1, seqlen_k=3 * block_n, num_heads=1, softmax_scale=1.0, causal=False)
        tensors = {"q": q, "k": k, "v": torch.randn(k.shape, generator=torch.Generator().manual_seed(1)).to(self.dtype)}
        return build(case, self.dtype, self.device).with_(**{name: x.to(self.device) for name, x in tensors.items()})

    def _last_tile(self) -> Tensor:
        return self.shift + torch.randn(self.case.tile[1], generator=torch.Generator().manual_seed(0))


def assert_nested_at_ties(walk: Walk) -> None:
    """Step by step over the limit, then between two steps: no tile that forward skipped is kept, with and without its support."""
    start, end = walk.around_the_limit()
    for _ in range(2):
        call = walk.call(start, end)
        forward = run_forward(call)
        kept = (forward.support >> 1 & 1).flatten()
        crossing = int((1 - kept).sum())
        assert 0 < crossing < walk.steps, "the walk does not cross the limit"
        do = torch.ones_like(forward.out)
        found = run_backward(call, forward, do, needs=(False, False, False)).support
        again = (found & ~forward.support).flatten().nonzero().flatten().tolist()
        assert not again, (
            f"steps {again} keep a tile that forward skipped; forward keeps the middle one from {crossing} on"
        )
        saved = run_backward(call, forward, do, forward.support, needs=(False, False, False)).support
        assert torch.equal(saved, found)
        step = (end - start) / (walk.steps - 1)
        start, end = start + (crossing - 2) * step, start + (crossing + 1) * step

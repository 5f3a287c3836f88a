# SPDX-License-Identifier: Apache-2.0
"""Inputs on which a tile's maximum walks over its limit by single roundings: where a backward would keep what a forward skipped."""

from __future__ import annotations

import math

import torch
from calls import Call, build
from gradients import run_backward, run_forward
from inputs import Case
from torch import Tensor


def _in_parts(x: Tensor, dtype: torch.dtype, parts: int = 4) -> Tensor:
    """float32 numbers as ``parts`` numbers of ``dtype`` that sum up to them: (.., parts)."""
    result = []
    for _ in range(parts):
        result.append(x.to(dtype))
        x = x - result[-1].float()
    return torch.stack(result, -1)


def near_ties(
    case: Case, dtype: torch.dtype, device: str, shift: float, cancelling: float = 0.0, steps: int = 24
) -> Call:
    """One row, three key tiles, ``steps`` sequences: the middle tile's maximum walks over its limit by single roundings.

    Scores are written into keys; ``shift`` is added to all of them. ``cancelling``: products of that size that sum up to zero beside
    each score, so that its rounding is theirs and depends on the order of the sum.
    """
    block_n = case.tile[1]
    generator = torch.Generator().manual_seed(int(abs(shift)) + block_n)
    scores = torch.full((steps, 3, block_n), shift - 30.0)
    scores[:, 2] = shift + torch.randn(block_n, generator=generator)
    lse = float(scores[0, 2].double().logsumexp(-1))
    rounding = torch.finfo(torch.float32).eps
    below, above = (n * (1 + abs(lse)) + 4 * cancelling for n in (60, 8))  # a forward may leave itself some slack
    walk = torch.linspace(-below, above, steps, dtype=torch.float64)
    scores[:, 1, 3] = (lse - math.log(3 * block_n) + rounding * walk).float()
    parts = _in_parts(scores.flatten(1), dtype)
    k = torch.zeros(steps, 3 * block_n, 1, case.head_dim, dtype=dtype)
    k[:, :, 0, : parts.shape[-1]] = parts
    q = torch.zeros(steps, 1, 1, case.head_dim, dtype=dtype)
    q[..., : parts.shape[-1]] = 1.0
    half = case.head_dim // 2
    q[..., half:] = 1.0
    k[..., half::2], k[..., half + 1 :: 2] = cancelling, -cancelling
    v = torch.randn(*k.shape, generator=generator).to(dtype)
    case = case.with_(seqlen_q=1, seqlen_k=3 * block_n, num_heads=1, softmax_scale=1.0, causal=False)
    return build(case, dtype, device).with_(q=q.to(device), k=k.to(device), v=v.to(device))


def assert_nested_at_ties(call: Call) -> None:
    """Some sequences keep the middle tile and some skip it; none is kept again, with and without the saved support."""
    forward = run_forward(call)
    kept = (forward.support >> 1 & 1).flatten()
    assert 0 < kept.sum() < len(kept), "the walk does not cross the limit"
    do = torch.ones_like(forward.out)
    found = run_backward(call, forward, do, needs=(False, False, False)).support
    again = (found & ~forward.support).flatten().nonzero().flatten().tolist()
    assert not again, (
        f"steps {again} of {len(kept)} keep a tile that forward skipped ({int(kept.sum())} keep the middle one)"
    )
    saved = run_backward(call, forward, do, forward.support, needs=(False, False, False)).support
    assert torch.equal(saved, found)

# SPDX-License-Identifier: Apache-2.0
"""What must be right before anything is timed: outputs and gradients beside full attention in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.reference import full_attention_head, legal_pairs

MAX_OUTPUT_ERROR = 0.02  # of a bfloat16 output; a wrong tile gives errors near 1
MAX_GRADIENT_ERROR = 0.03
CHECKED_ROWS = 128


def full_attention(q: Tensor, k: Tensor, v: Tensor, rows: int = CHECKED_ROWS) -> Tensor:
    """Full causal attention of the last ``rows`` queries in float32, (batch, rows, num_heads, v_head_dim)."""
    rows = min(rows, q.shape[1])
    kv_heads = k.shape[2]
    groups = q.shape[2] // kv_heads
    legal = legal_pairs(rows, k.shape[1], (-1, 0)).to(q.device).repeat_interleave(groups, 0)  # token by token
    out = q.new_empty(q.shape[0], rows, kv_heads, groups, v.shape[-1], dtype=torch.float32)
    for b in range(q.shape[0]):  # one KV head at a time: memory
        for head in range(kv_heads):
            packed = q[b, -rows:, head * groups : (head + 1) * groups].flatten(0, 1).float()
            found = full_attention_head(
                packed, k[b, :, head].float(), v[b, :, head].float(), legal, softmax_scale=q.shape[-1] ** -0.5
            )[0]
            out[b, :, head] = found.unflatten(0, (rows, groups))
    return out.flatten(2, 3)


def relative_error(out: Tensor, truth: Tensor) -> float:
    """Relative L2 error of the last rows of ``out``; the largest of any sequence. NaN where ``out`` has one."""
    difference = out[:, -truth.shape[1] :].float() - truth
    return (difference.flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)).max().item()


def check(name: str, error: float, limit: float = MAX_OUTPUT_ERROR) -> float:
    """``error``; raises ``RuntimeError`` where it is above the limit, so that no figure is reported for a wrong result."""
    if not error < limit:
        raise RuntimeError(f"{name} is wrong: relative error {error:.3g}; no timing is reported")
    return error

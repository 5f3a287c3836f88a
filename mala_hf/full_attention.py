# SPDX-License-Identifier: Apache-2.0
"""Full attention in float32, straight from its definition: outputs, what it gives to skipped tiles, gradients.

One causal sequence, a few rows at a time, so that memory grows with the length and not with its square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .ops import Work, mala_attn_func
from .ops.work import SKIPPED

ROWS = 64  # at a time, where no tile says how many


@dataclass(frozen=True)
class LayerCall:
    """What one layer asks attention for, on one causal sequence without a cache.

    q (1, L, H, D), k (1, L, K, D), v (1, L, K, E); ``window``: keys that a row sees, its own included, None for all;
    ``sinks``: (H,) logits that join each row's normalizer.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None

    def mala(self, tau: float, **options: Any) -> Any:
        """Run MALA on it, every tile tested; ``options`` and the result are those of ``mala_attn_func``."""
        left = -1 if self.window is None else self.window - 1
        return mala_attn_func(
            self.q, self.k, self.v, tau=tau, causal=True, softmax_scale=self.softmax_scale, window=(left, -1),
            softcap=self.softcap, sinks=self.sinks, **{"discovery": "fused", **options},
        )  # fmt: skip

    def leaves(self) -> LayerCall:
        """Return the same call on copies of q, k and v that take gradients."""
        q, k, v = (x.detach().clone().requires_grad_() for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, sinks=None if self.sinks is None else self.sinks.detach())


def full_attention(call: LayerCall, works: Sequence[Work] = ()) -> tuple[Tensor, list[Tensor]]:
    """Return out (L, H, E), and for each work the mass (H, L) that full attention gives to the tiles which it says were skipped.

    All works have the same tile.
    """
    length, num_heads = call.q.shape[1:3]
    q, k, v = (_heads_first(x) for x in (call.q, call.k, call.v))
    block_m, block_n = works[0].tile if works else (ROWS, ROWS)
    out = q.new_empty(num_heads, length, v.shape[-1])
    omitted = [q.new_empty(num_heads, length) for _ in works]
    for q_tile, start in enumerate(range(0, length, block_m)):
        stop = min(start + block_m, length)
        p = _probabilities(call, q[:, start:stop], k[:, :stop], start)  # (H, M, N)
        out[:, start:stop] = p @ _per_query_head(v[:, :stop], num_heads)
        for work, mass in zip(works, omitted, strict=True):
            is_skipped = work.tiles[0, :, q_tile] == SKIPPED  # (H, k_tiles)
            mass[:, start:stop] = (p * is_skipped.repeat_interleave(block_n, -1)[:, None, :stop]).sum(-1)
    return out.transpose(0, 1), omitted


def full_gradients(call: LayerCall, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 dq, dk, dv, shaped like q, k and v, for the incoming gradient do (1, L, H, E)."""
    length, num_heads = call.q.shape[1:3]
    q, k, v = (_heads_first(x) for x in (call.q, call.k, call.v))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    do = _heads_first(do)
    for start in range(0, length, ROWS):
        stop = min(start + ROWS, length)
        leaves = [x.detach().requires_grad_() for x in (q[:, start:stop], k[:, :stop], v[:, :stop])]
        with torch.enable_grad():
            out = _probabilities(call, leaves[0], leaves[1], start) @ _per_query_head(leaves[2], num_heads)
        dq[:, start:stop], dk_part, dv_part = torch.autograd.grad(out, leaves, do[:, start:stop])
        dk[:, :stop] += dk_part
        dv[:, :stop] += dv_part
    dq, dk, dv = (x.transpose(0, 1)[None] for x in (dq, dk, dv))
    return dq, dk, dv


def _heads_first(x: Tensor) -> Tensor:
    """Float32 (heads, L, dim) of (1, L, heads, dim)."""
    return x[0].detach().float().transpose(0, 1)


def _per_query_head(x: Tensor, num_heads: int) -> Tensor:
    """Repeat each key-value head for its group of query heads."""
    return x.repeat_interleave(num_heads // x.shape[0], 0)


def _probabilities(call: LayerCall, query: Tensor, key: Tensor, start: int) -> Tensor:
    """Probabilities (H, M, N) of rows start to start + M over all N keys up to the last of them; a sink takes its share."""
    num_heads, rows, keys = query.shape[0], query.shape[1], key.shape[1]
    scores = call.softmax_scale * query @ _per_query_head(key, num_heads).transpose(1, 2)
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    hidden = torch.ones(rows, keys, dtype=torch.bool, device=query.device).triu(start + 1)
    if call.window is not None:
        hidden |= torch.ones_like(hidden).tril(start - call.window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if call.sinks is None:
        return scores.softmax(-1)
    sink = call.sinks.detach().float()[:, None, None].expand(num_heads, rows, 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]

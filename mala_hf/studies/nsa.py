# SPDX-License-Identifier: Apache-2.0
"""NSA, native sparse attention (Yuan et al., 2025, arXiv 2502.11089): three branches over the same queries, weighed by gates.

Compression: keys in blocks of ``compressed`` tokens, one every ``stride``, become one key each through an MLP that knows their places.
Selection: the compressed probabilities, shared out over blocks of ``selected`` tokens and summed over the query heads of a KV head, say
which ``count`` blocks to attend to in full; the first block and the last two, the query's own among them, always count as chosen.
Window: the last ``window`` tokens. Each branch has keys and values of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import masked_attention, window_attention
from .block_attention import block_attention, block_mask

FIRST, LAST = 1, 2  # blocks that are always selected


@dataclass(frozen=True)
class NSAShape:
    """Lengths in tokens, and how many blocks are selected."""

    compressed: int = 32
    stride: int = 16
    selected: int = 64
    count: int = 16
    window: int = 512

    def __post_init__(self) -> None:
        if min(self.compressed, self.stride, self.selected, self.window) < 1 or self.count < FIRST + LAST:
            raise ValueError(f"lengths must be at least 1 and count at least {FIRST + LAST}, got {self}")
        if self.compressed % self.stride or self.selected % self.stride:
            raise ValueError(f"the stride must divide the compressed and the selected length, got {self}")

    def compressed_blocks(self, seqlen: int) -> int:
        """Compressed keys of a sequence: only whole blocks are compressed."""
        return max(0, (seqlen - self.compressed) // self.stride + 1)


def nsa_slots(seqlen: int, shape: NSAShape) -> float:
    """Key slots per query of the three branches together, mean over the queries of a sequence."""
    query = torch.arange(seqlen)
    compressed = (torch.div(query + 1 - shape.compressed, shape.stride, rounding_mode="floor") + 1).clamp(min=0)
    own = query % shape.selected + 1
    earlier = shape.selected * (query // shape.selected).clamp(max=shape.count - 1)
    return (compressed + own + earlier + (query + 1).clamp(max=shape.window)).double().mean().item()


class Compression(nn.Module):
    """The MLP that makes one key (or value) of a block of them; shared by the heads."""

    def __init__(self, head_dim: int, shape: NSAShape) -> None:
        super().__init__()
        self.length, self.stride = shape.compressed, shape.stride
        self.places = nn.Parameter(0.02 * torch.randn(self.length, head_dim))
        self.mlp = nn.Sequential(
            nn.Linear(self.length * head_dim, 2 * head_dim), nn.GELU(), nn.Linear(2 * head_dim, head_dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, num_kv_heads, head_dim) as (batch, blocks, num_kv_heads, head_dim)."""
        if x.shape[1] < self.length:
            return x[:, :0]
        blocks = x.unfold(1, self.length, self.stride)  # (batch, blocks, num_kv_heads, head_dim, length)
        return self.mlp((blocks.transpose(-1, -2) + self.places.to(x.dtype)).flatten(-2))


def importance_of(p: Tensor, seqlen: int, shape: NSAShape) -> Tensor:
    """Probabilities of compressed blocks (..., compressed blocks) shared out over the selected blocks (..., selected blocks).

    Equation 9: a selected block gets a compressed block's probability once for every stride that the two have in common.
    """
    strides = -(-seqlen // shape.selected) * shape.selected // shape.stride
    covered = sum(
        F.pad(p, (first, strides - p.shape[-1] - first)) for first in range(shape.compressed // shape.stride)
    )  # (..., strides)
    return covered.unflatten(-1, (-1, shape.selected // shape.stride)).sum(-1)  # type: ignore[union-attr]


def visible_compressed(start: int, rows: int, compressed_blocks: int, shape: NSAShape, device: torch.device) -> Tensor:
    """bool (rows, compressed blocks): True where the block ended at or before the query; the first row is token ``start``."""
    ends = torch.arange(compressed_blocks, device=device) * shape.stride + shape.compressed - 1
    return torch.arange(start, start + rows, device=device)[:, None] >= ends


def compressed_rows(q: Tensor, k: Tensor, v: Tensor, start: int, shape: NSAShape) -> tuple[Tensor, Tensor]:
    """The compressed branch of the queries from token ``start`` on: out like q, zeros for rows that see no block; and p_cmp.

    q (batch, rows, num_heads, head_dim), k and v (batch, blocks, num_kv_heads, head_dim). p_cmp: (batch, num_kv_heads, rows, blocks),
    without a gradient, summed over the query heads of a KV head.
    """
    num_kv_heads, groups = k.shape[2], q.shape[2] // k.shape[2]
    visible = visible_compressed(start, q.shape[1], k.shape[1], shape, q.device)
    scores = torch.einsum("bqkgd,bnkd->bkgqn", q.unflatten(2, (num_kv_heads, groups)), k) * q.shape[-1] ** -0.5
    p = (
        scores.float().masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
    )  # a row that sees none has no softmax
    out = torch.einsum("bkgqn,bnkd->bqkgd", p.to(v.dtype), v).flatten(2, 3)
    return out, p.detach().sum(2)


@torch.no_grad()
def selected_blocks(p: Tensor, start: int, seqlen: int, shape: NSAShape) -> Tensor:
    """Blocks before each query's own that are selected: int64 (batch, rows, num_kv_heads, count - 1), -1 for none.

    p: p_cmp of the queries from token ``start`` on.
    """
    importance = importance_of(p, seqlen, shape)  # (batch, kv heads, rows, selected blocks)
    numbers = torch.arange(importance.shape[-1], device=p.device)
    own = torch.arange(start, start + p.shape[2], device=p.device)[:, None] // shape.selected
    always = (numbers < FIRST) | (numbers > own - LAST)
    importance = importance.masked_fill(always, torch.inf).masked_fill(numbers >= own, -torch.inf)
    best = importance.topk(min(shape.count - 1, len(numbers)), sorted=False)
    return best.indices.where(best.values > -torch.inf, -1).transpose(1, 2)


def compressed_branch(q: Tensor, k: Tensor, v: Tensor, shape: NSAShape, rows: int | None) -> tuple[Tensor, Tensor]:
    """The compressed branch of a sequence, and the blocks that it selects, as in :func:`selected_blocks`.

    rows: queries at a time, whose backward forms the scores again; None: all at once.
    """
    seqlen = q.shape[1]
    if rows is None:
        out, p = compressed_rows(q, k, v, 0, shape)
        return out, selected_blocks(p, 0, seqlen, shape)
    outs, chosen = [], []
    for start in range(0, seqlen, rows):
        out, p = checkpoint(compressed_rows, q[:, start : start + rows], k, v, start, shape, use_reentrant=False)
        outs.append(out)
        chosen.append(selected_blocks(p, start, seqlen, shape))
    return torch.cat(outs, 1), torch.cat(chosen, 1)


def nsa_attention(
    q: Tensor,
    keys: tuple[Tensor, Tensor, Tensor],
    values: tuple[Tensor, Tensor, Tensor],
    gates: Tensor,
    shape: NSAShape,
    *,
    masked: bool = False,
    rows: int | None = None,
) -> Tensor:
    """Causal NSA of a whole sequence: out like q.

    Args:
        q: (batch, seqlen, num_heads, head_dim).
        keys, values: of the branches: compressed (batch, blocks, num_kv_heads, head_dim), selected and window (batch, seqlen, ...).
        gates: (batch, seqlen, num_heads, 3), of the branches in that order.
        masked: form all scores of the selected and the window branch; the same result.
        rows: queries whose compressed scores are formed at once; None: all.
    """
    compressed, chosen = compressed_branch(q, keys[0], values[0], shape, rows)
    chosen = chosen.repeat_interleave(q.shape[2] // keys[1].shape[2], 2)
    if masked:
        selected = masked_attention(q, keys[1], values[1], block_mask(chosen, q.shape[1], shape.selected))
    else:
        selected = block_attention(q, keys[1], values[1], chosen, shape.selected)
    return gated(gates, compressed, selected, window_attention(q, keys[2], values[2], shape.window))


def gated(gates: Tensor, *branches: Tensor) -> Tensor:
    """The branches (batch, rows, num_heads, head_dim) weighed by their gates (batch, rows, num_heads, branches)."""
    parts = zip(gates.unbind(-1), branches, strict=True)
    return torch.stack([gate[..., None].to(branch.dtype) * branch for gate, branch in parts]).sum(0)


class NSA(nn.Module):
    """The layer: projections of each branch, compression, gates, output."""

    def __init__(self, d_model: int, num_heads: int, shape: NSAShape, num_kv_heads: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.shape = num_heads, num_kv_heads or num_heads, shape
        head_dim = d_model // num_heads
        self.query = nn.Linear(d_model, d_model)
        self.key_values = nn.Linear(d_model, 6 * self.num_kv_heads * head_dim)
        self.gates = nn.Linear(d_model, 3 * num_heads)
        self.compress_keys, self.compress_values = (Compression(head_dim, shape) for _ in range(2))
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, d_model) to the same."""
        q = self.query(x).unflatten(-1, (self.num_heads, -1))
        k1, k2, k3, v1, v2, v3 = self.key_values(x).unflatten(-1, (6, self.num_kv_heads, -1)).unbind(2)
        keys, values = (self.compress_keys(k1), k2, k3), (self.compress_values(v1), v2, v3)
        gates = self.gates(x).unflatten(-1, (self.num_heads, 3)).sigmoid()
        return self.out(nsa_attention(q, keys, values, gates, self.shape, masked=not x.is_cuda).flatten(2))


@torch.no_grad()
def nsa_decode(
    q: Tensor,
    keys: tuple[Tensor, Tensor, Tensor],
    values: tuple[Tensor, Tensor, Tensor],
    gates: Tensor,
    shape: NSAShape,
) -> Tensor:
    """One new token, the last of the selected and window caches, the compressed cache kept: (batch, 1, num_heads, head_dim).

    Raises ``ValueError`` where the context does not end with a whole selected block.
    """
    batch, seqlen, num_kv_heads, head_dim = keys[1].shape
    if seqlen % shape.selected:
        raise ValueError(f"a context of {seqlen} tokens does not end with a block of {shape.selected}")
    compressed, p = compressed_rows(q, keys[0], values[0], seqlen - 1, shape)
    earlier = selected_blocks(p, seqlen - 1, seqlen, shape)[:, 0]  # (batch, kv heads, count - 1)
    own = earlier.new_full((*earlier.shape[:2], 1), seqlen // shape.selected - 1)
    chosen = torch.cat([earlier, own], -1)
    sequence = torch.arange(batch, device=q.device).view(-1, 1, 1)
    head = torch.arange(num_kv_heads, device=q.device).view(-1, 1)
    keys_of, values_of = (
        x.unflatten(1, (-1, shape.selected)).permute(0, 3, 1, 2, 4)[sequence, head, chosen].flatten(2, 3)
        for x in (keys[1], values[1])
    )  # (batch, kv heads, count * selected, head_dim)
    grouped = q.view(batch, num_kv_heads, -1, head_dim)
    none = chosen.repeat_interleave(shape.selected, -1)[:, :, None] >= 0
    selected = F.scaled_dot_product_attention(grouped, keys_of, values_of, attn_mask=none).reshape(q.shape)
    recent_keys, recent_values = (x[:, -shape.window :].transpose(1, 2) for x in (keys[2], values[2]))
    window = F.scaled_dot_product_attention(grouped, recent_keys, recent_values).reshape(q.shape)
    return gated(gates, compressed, selected, window)

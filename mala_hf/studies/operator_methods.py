# SPDX-License-Identifier: Apache-2.0
"""The methods of the operator benchmark: each a function of the same q, k, v, its decode, and its own definition on the last rows.

The definition is float32 attention under the mask that the method chose, differentiable; what is timed must agree with it. Index keys
of DSA and gates of NSA come from hidden states that a benchmark of attention does not have: they are Gaussian, and the compression of
NSA is untrained. Times do not depend on that. Outputs do: only MALA's and MoBA's distance from full attention says something.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..bench.baselines import sdpa
from ..flops import causal_slots
from ..ops import mala_attn_func
from .attention import window_attention
from .block_attention import block_mask
from .dsa import causal_rows, dsa_slots
from .moba import block_means, chosen_blocks, moba_attention, moba_decode, moba_slots
from .nsa import Compression, NSAShape, compressed_branch, compressed_rows, gated, nsa_attention, nsa_decode, nsa_slots
from .token_gather import dsa_attention, dsa_decode, selected_numbers

Decode = Callable[[Tensor, Tensor, Tensor], Tensor]


class Method(Protocol):
    """What the benchmark asks of a method; q (1, seqlen, num_heads, head_dim), k and v (1, seqlen, num_kv_heads, head_dim)."""

    implementation: str  # what runs, in words

    def slots(self, seqlen: int) -> float | None:
        """Key slots per query of the forward, mean; None where the inputs decide."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal, out like q."""

    def selection(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """What it chose, for ``definition``."""

    def definition(self, q: Tensor, k: Tensor, v: Tensor, selection: Any) -> Tensor:
        """Float32 out of the queries ``q``, the last of the sequence."""

    def decode(self, k: Tensor, v: Tensor) -> Decode:
        """Attention of one new token over caches like these; what a cache keeps beside keys and values is made here."""


def masked_rows(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Float32 attention of the last queries (1, rows, num_heads, head_dim) under a mask (1, num_heads or 1, rows, keys)."""
    outs, groups = [], q.shape[2] // k.shape[2]
    for head in range(q.shape[2]):  # one at a time: memory
        scores = q[0, :, head].float() @ k[0, :, head // groups].float().T * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed[0, head % allowed.shape[1]], -torch.inf)
        outs.append(scores.softmax(-1) @ v[0, :, head // groups].float())
    return torch.stack(outs, 1)[None]


def last_rows(q: Tensor, k: Tensor) -> Tensor:
    """bool (1, 1, rows, keys): the causal mask of the last queries."""
    rows = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=k.device)
    return causal_rows(rows, k.shape[1])[None, None]


@dataclass
class Dense:
    """Methods whose definition is full attention: full attention itself, and MALA."""

    implementation: str
    run: Callable[..., Any]
    run_decode: Callable[..., Any]
    work_of: Callable[[int], float | None]

    def slots(self, seqlen: int) -> float | None:
        """As in :class:`Method`."""
        return self.work_of(seqlen)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As in :class:`Method`."""
        return self.run(q, k, v)

    def selection(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Nothing: what is left out counts as an error."""

    def definition(self, q: Tensor, k: Tensor, v: Tensor, selection: None) -> Tensor:
        """As in :class:`Method`."""
        return masked_rows(q, k, v, last_rows(q, k))

    def decode(self, k: Tensor, v: Tensor) -> Decode:
        """As in :class:`Method`."""
        return self.run_decode


def full(device: torch.device) -> Dense:
    """Full attention: cuDNN's on a GPU."""
    backend = SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.MATH
    run = functools.partial(sdpa, backend=backend)
    name = "cuDNN through torch" if device.type == "cuda" else "torch, plain"
    return Dense(name, run, run, lambda seqlen: causal_slots(seqlen) / seqlen)


def mala(device: torch.device) -> Dense:
    """MALA at tau = 1 as it is called without options."""
    run = functools.partial(mala_attn_func, causal=True)
    name = "mala_hf.ops, Triton" if device.type == "cuda" else "mala_hf.ops, blockwise"
    return Dense(name, run, run, lambda seqlen: None)


@dataclass
class MoBA:
    """MoBA with ``topk`` blocks of ``block`` keys."""

    block: int
    topk: int
    implementation: str = "PyTorch: gates and routing; attention by torch's FlashAttention-2"

    def slots(self, seqlen: int) -> float:
        """As in :class:`Method`."""
        return moba_slots(seqlen, self.block, self.topk)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As in :class:`Method`."""
        return moba_attention(q, k, v, block=self.block, topk=self.topk)

    def selection(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The chosen blocks of all queries."""
        return chosen_blocks(q, k, self.block, self.topk)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, selection: Tensor) -> Tensor:
        """As in :class:`Method`."""
        return masked_rows(q, k, v, block_mask(selection[:, -q.shape[1] :], k.shape[1], self.block))

    def decode(self, k: Tensor, v: Tensor) -> Decode:
        """As in :class:`Method`; the cache keeps the blocks' means."""
        return functools.partial(moba_decode, means=block_means(k, self.block), block=self.block, topk=self.topk)


@dataclass
class DSA:
    """DSA with Gaussian index queries, keys and weights."""

    seqlen: int
    topk: int
    heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype
    implementation: str = "PyTorch: index scores, torch.topk, gathered keys and values; attention by torch"

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(2)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device, dtype=self.dtype)

        self.index = (
            normal(1, self.seqlen, self.heads, self.head_dim),
            normal(1, self.seqlen, self.head_dim),
            normal(1, self.seqlen, self.heads),
        )

    def slots(self, seqlen: int) -> float:
        """As in :class:`Method`."""
        return dsa_slots(seqlen, self.topk)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As in :class:`Method`."""
        return dsa_attention(q, k, v, selected_numbers(*self.index, self.topk))

    def selection(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The numbers of the selected tokens."""
        return selected_numbers(*self.index, self.topk)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, selection: Tensor) -> Tensor:
        """As in :class:`Method`."""
        rows, keys = q.shape[1], k.shape[1]
        allowed = torch.zeros(1, rows, keys, dtype=torch.bool, device=q.device)
        return masked_rows(q, k, v, allowed.scatter_(2, selection[:, -rows:].long(), True)[:, None])

    def decode(self, k: Tensor, v: Tensor) -> Decode:
        """As in :class:`Method`; the cache keeps index keys."""
        qi, ki, w = self.index
        index = qi[:, -1:].clone(), ki.clone(), w[:, -1:].clone()
        return functools.partial(dsa_decode, index=index, topk=self.topk)


class NSA:
    """NSA with the same keys and values in all branches, Gaussian gates, and an untrained compression.

    rows: queries whose compressed scores are formed at once; None: all.
    """

    implementation = (
        "PyTorch: compression, selection and routing; selected and window branch by torch's FlashAttention-2"
    )

    def __init__(self, shape: NSAShape, q: Tensor, rows: int | None = None) -> None:
        torch.manual_seed(2)
        self.shape, self.rows = shape, rows
        self.gates = torch.randn(*q.shape[:3], 3, device=q.device).sigmoid()
        self.compress: list[Callable[[Tensor], Tensor]] = [
            Compression(q.shape[-1], shape).to(q.device, q.dtype).requires_grad_(False) for _ in range(2)
        ]

    def slots(self, seqlen: int) -> float:
        """As in :class:`Method`; the compressed keys are counted too."""
        return nsa_slots(seqlen, self.shape)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As in :class:`Method`."""
        keys, values = (self.compress[0](k), k, k), (self.compress[1](v), v, v)
        return nsa_attention(q, keys, values, self.gates, self.shape, rows=self.rows)

    def selection(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The selected blocks of all queries, by KV head."""
        return compressed_branch(q, self.compress[0](k), self.compress[1](v), self.shape, self.rows)[1]

    def definition(self, q: Tensor, k: Tensor, v: Tensor, selection: Tensor) -> Tensor:
        """As in :class:`Method`."""
        rows, keys = q.shape[1], k.shape[1]
        small_k, small_v = (compress(x).float() for compress, x in zip(self.compress, (k, v), strict=True))
        compressed, _ = compressed_rows(q.float(), small_k, small_v, keys - rows, self.shape)
        chosen = selection[:, -rows:].long().repeat_interleave(q.shape[2] // k.shape[2], 2)
        selected = masked_rows(q, k, v, block_mask(chosen, keys, self.shape.selected))
        later = torch.arange(keys - rows, keys, device=k.device)[:, None] - self.shape.window
        window = masked_rows(q, k, v, last_rows(q, k) & (torch.arange(keys, device=k.device) > later))
        return gated(self.gates[:, -rows:], compressed, selected, window)

    def decode(self, k: Tensor, v: Tensor) -> Decode:
        """As in :class:`Method`; the cache keeps compressed keys and values."""
        compressed = self.compress[0](k), self.compress[1](v)
        gates = self.gates[:, -1:].clone()

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return nsa_decode(q, (compressed[0], k, k), (compressed[1], v, v), gates, self.shape)

        return run


class PackagedNSA(NSA):
    """The kernels of the package flash-linear-attention for the compressed and the selected branch.

    They want groups of 16 query heads or a larger power of two, and compress by the means of whole selected blocks. The package's own
    window branch needs the package flash-attn besides, so the window is torch's. Raises ``ImportError`` where it is not installed.
    """

    implementation = "flash-linear-attention: compressed and selected branch; window by torch's FlashAttention-2"

    def __init__(self, shape: NSAShape, q: Tensor) -> None:
        super().__init__(replace(shape, compressed=shape.selected, stride=shape.selected), q)
        self.package = import_module("fla.ops.nsa.parallel")
        means = functools.partial(block_means, block=shape.selected)
        self.compress = [lambda x: means(x).to(x.dtype)] * 2

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As in :class:`Method`."""
        compressed, selected, window = self.gates.to(q.dtype).unbind(-1)
        options = {"block_counts": self.shape.count, "block_size": self.shape.selected}
        out = self.package.parallel_nsa(q, k, v, g_cmp=compressed, g_slc=selected, **options)
        return out + window[..., None] * window_attention(q, k, v, self.shape.window)

    def selection(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The blocks that the package selects, its own block among them."""
        return self.package.parallel_nsa_topk(
            q=q, k=self.compress[0](k), TK=k.shape[1], lse=None,
            block_counts=self.shape.count, block_size=self.shape.selected, scale=q.shape[-1] ** -0.5,
        )  # fmt: skip

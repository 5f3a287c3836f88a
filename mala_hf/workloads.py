# SPDX-License-Identifier: Apache-2.0
"""Attention inputs with a stated amount of retained work: synthetic, and captured from a model.

The synthetic sequence is cut into segments of 128 tokens, each with a random unit code. Keys carry the code of their segment plus
noise; queries carry the code of their own segment and of a few earlier ones, so the mass of a row lies in its own and the linked
segments. The number of links sets the retained work; ``calibrated_inputs`` finds it by measuring. A share of the heads can be flat:
Gaussian queries and keys, of which nearly nothing can be skipped. ``bench/decode_inputs.py`` has the one for a new token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

SEGMENT = 128
PEAK_LOGIT = 20.0  # score of a matching pair; unrelated pairs stay near 0 with deviation ~2
NOISE = 0.7


@dataclass(frozen=True)
class Inputs:
    """q (batch, seqlen, num_heads, head_dim), k, v; the mean links per query segment; how many query heads, the first, are flat."""

    q: Tensor
    k: Tensor
    v: Tensor
    links: float = 0.0
    flat_heads: int = 0


def peaked_inputs(
    seqlen: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    links: float,
    batch: int = 1,
    flat_share: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    seed: int = 0,
) -> Inputs:
    """Inputs whose query segments attend to themselves and to ``links`` earlier segments on average.

    Heads differ: head h has ``links`` times a factor between 0.5 and 1.5. flat_share: of the KV heads, rounded; the first ones, with
    their query heads, are flat. 1 is the worst case of the method.
    """
    flat = flat_kv_heads(flat_share, num_kv_heads)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    segments = -(-seqlen // SEGMENT)
    codes = segment_codes(normal(batch, segments, num_kv_heads, head_dim))
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
            tokens = code[b].repeat_interleave(SEGMENT, 0)[:seqlen]
            out[b] = tokens + NOISE * normal(*tokens.shape)
    v = normal(batch, seqlen, num_kv_heads, head_dim).to(dtype)
    if flat:
        k[:, :, :flat] = normal(batch, seqlen, flat, head_dim)
        q[:, :, : flat * groups] = normal(batch, seqlen, flat * groups, head_dim)
    return Inputs(q, k, v, links, flat * groups)


def segment_codes(directions: Tensor) -> Tensor:
    """Codes of that direction (..., head_dim), of a length for which two equal ones score ``PEAK_LOGIT``."""
    amplitude = (PEAK_LOGIT * directions.shape[-1] ** 0.5) ** 0.5
    return torch.nn.functional.normalize(directions, dim=-1) * amplitude


def flat_kv_heads(flat_share: float, num_kv_heads: int) -> int:
    """How many KV heads a share is; ``ValueError`` for a share that is none."""
    if not 0 <= flat_share <= 1:
        raise ValueError(f"the share of flat heads must lie between 0 and 1, got {flat_share}")
    return round(flat_share * num_kv_heads)


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


def captured_inputs(path: str | Path, seqlen: int | None, *, dtype: torch.dtype, device: str | torch.device) -> Inputs:
    """The first ``seqlen`` tokens (None: all) of captured q, k, v: exactly the sequence of that length. All groups side by side.

    path: a safetensors file with tensors ``q``, ``k``, ``v``, or ``q.NAME``, ``k.NAME``, ``v.NAME`` for each group NAME, of the shape
    (heads, length, head_dim) or (1, heads, length, head_dim). Every group has as many query heads to a KV head.
    Raises ``ValueError`` for another content, ``OSError`` for a file that cannot be read.
    """
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    groups = sorted({name.partition(".")[2] for name in tensors}) or [""]
    parts: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    for letter, heads in parts.items():
        for group in groups:
            name = f"{letter}.{group}" if group else letter
            if name not in tensors:
                raise ValueError(f"{path} lacks the tensor {name}")
            x = tensors[name]
            x = x[0] if x.ndim == 4 and len(x) == 1 else x
            if x.ndim != 3:
                raise ValueError(f"{path}: {name} must be (heads, length, head_dim), got {tuple(x.shape)}")
            heads.append(x)
    if len({(len(q) / len(k), len(k) / len(v)) for q, k, v in zip(*parts.values(), strict=True)}) > 1:
        raise ValueError(f"{path}: its groups differ in query heads to a KV head")
    length = min(x.shape[1] for heads in parts.values() for x in heads)
    seqlen = length if seqlen is None else seqlen
    if not 1 <= seqlen <= length:
        raise ValueError(f"{path} holds {length} tokens, got a length of {seqlen}")

    def batched(heads: list[Tensor]) -> Tensor:
        together = torch.cat([x[:, :seqlen] for x in heads]).transpose(0, 1)[None]
        return together.to(device=device, dtype=dtype).contiguous()

    return Inputs(batched(parts["q"]), batched(parts["k"]), batched(parts["v"]))

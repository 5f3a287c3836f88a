# SPDX-License-Identifier: Apache-2.0
"""A case made into tensors and arguments of a public function, and its legal pairs, written without the package.

Whatever lies outside the sequences (padding, unused cache, gaps of strided views) is NaN: it must not reach a result.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from inputs import FAMILIES, Case, Shape
from torch import Tensor

from mala_hf import ops

NAN = float("nan")


@dataclass(frozen=True)
class Call:
    """Arguments of one public call: q, k, v (4-D, or 3-D where packed) and options."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict = field(default_factory=dict)

    @property
    def is_packed(self) -> bool:
        return self.q.ndim == 3

    def with_(self, **changes) -> Call:
        """The same call with other tensors (q, k, v) or other options."""
        tensors = {name: changes.pop(name) for name in ("q", "k", "v") if name in changes}
        return replace(self, **tensors, options={**self.options, **changes})

    def run(self, impl: str, **more):
        """The public function's result."""
        function = ops.mala_attn_varlen_func if self.is_packed else ops.mala_attn_func
        return function(self.q, self.k, self.v, impl=impl, **{**self.options, **more})

    def tensors_and_sinks(self) -> list[Tensor]:
        sinks = self.options.get("sinks")
        return [self.q, self.k, self.v] + ([] if sinks is None else [sinks])


@dataclass(frozen=True)
class Head:
    """One query head of one sequence: its index in the work's maps, where it lies, and the legal pairs (rows, keys).

    ``rows`` begins at the first row that sees a key by causal alignment: query tiles count from there.
    """

    sequence: int
    batch: int
    head: int
    kv_head: int
    rows: slice
    keys: slice
    legal: Tensor


def _sequence_bounds(call: Call) -> list[tuple[int, int, int, int]]:
    options = call.options
    if call.is_packed:
        cu_q, cu_k = options["cu_seqlens_q"].tolist(), options["cu_seqlens_k"].tolist()
        return [(cu_q[s], cu_q[s + 1], cu_k[s], cu_k[s + 1]) for s in range(len(cu_q) - 1)]
    bounds = []
    for b in range(call.q.shape[0]):

        def length(name: str, default: int, b: int = b) -> int:
            return default if options.get(name) is None else int(options[name][b])

        bounds.append(
            (0, length("seqused_q", call.q.shape[1]), length("leftpad_k", 0), length("seqused_k", call.k.shape[1]))
        )
    return bounds


def heads(call: Call) -> Iterator[Head]:
    """Every head of every sequence that has rows and keys."""
    options, num_heads = call.options, call.q.shape[-2]
    left, right = options.get("window", (-1, -1))
    right = 0 if options.get("causal") else right
    for sequence, (q_begin, q_end, k_begin, k_end) in enumerate(_sequence_bounds(call)):
        i, j = torch.arange(q_begin, q_end)[:, None], torch.arange(k_begin, k_end)[None, :]
        distance = (j - k_end) - (i - q_end)  # 0: the key that the row is aligned with
        legal = torch.ones(distance.shape, dtype=torch.bool)
        if right >= 0:
            legal &= distance <= right
            blind = max(0, (q_end - q_begin) - max(k_end - k_begin, 0) - right)
            q_begin, legal = min(q_begin + blind, q_end), legal[blind:]
            distance = distance[blind:]
        if left >= 0:
            legal &= distance >= -left
        if not legal.numel():
            continue
        for head in range(num_heads):
            b = 0 if call.is_packed else sequence
            head_legal = legal
            if options.get("mask") is not None:
                mask = options["mask"].broadcast_to(call.q.shape[0], num_heads, call.q.shape[1], call.k.shape[1])
                head_legal = legal & mask[b, head, q_begin:q_end, k_begin:k_end].cpu()
            kv_head = head // (num_heads // call.k.shape[-2])
            rows, keys = slice(q_begin, q_end), slice(k_begin, k_end)
            yield Head(sequence, b, head, kv_head, rows, keys, head_legal.to(call.q.device))


def _generator(case: Case, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(case.id.encode()) + seed)


def _with_gaps(x: Tensor, how: str) -> Tensor:
    """The same values in a view whose storage has NaN between them; ``how`` picks the strides."""
    if how == "heads first":  # as Transformers hands tensors over
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    batch, seqlen, num_heads, head_dim = x.shape
    storage = x.new_full((batch, 2 * seqlen, num_heads, head_dim + 8), NAN)
    storage[:, ::2, :, :head_dim] = x
    return storage[:, ::2, :, :head_dim]


def _mask(case: Case, generator: torch.Generator) -> Tensor | None:
    shape: Shape = case.shape
    if case.mask is None:
        return None
    if case.mask == "keys":  # (batch, 1, 1, seqlen_k): a left-padded batch with holes
        mask = torch.rand(shape.batch, 1, 1, shape.seqlen_k, generator=generator) < 0.8
        for b in range(shape.batch):
            mask[b, ..., : 21 * b] = False
        return mask
    size = (1, 1) if case.mask == "full" else (shape.batch, shape.num_heads)
    mask = torch.rand(*size, shape.seqlen_q, shape.seqlen_k, generator=generator) < 0.7
    mask[..., 5, :] = False  # a row that sees nothing
    mask[..., 32:, 16:48] = False  # whole tiles that are illegal
    return mask


def _packed(case: Case, generator: torch.Generator) -> tuple[list[Tensor], dict]:
    shape = case.shape
    q_lengths = [shape.seqlen_q, 0, 17, 1, 33][: case.batch]
    extra = shape.seqlen_k - shape.seqlen_q
    k_lengths = [length + extra for length in q_lengths]
    if extra:
        k_lengths[-1] = 0  # rows without any key
    parts = [
        FAMILIES[case.family](
            replace(shape, batch=1, seqlen_q=m, seqlen_k=n) if n else Shape(1, m, 0, *_dims(shape)), generator
        )
        if n
        else tuple(x[None] for x in _empty_keys(shape, m, generator))
        for m, n in zip(q_lengths, k_lengths, strict=True)
    ]
    cu_q, cu_k = ([0, *torch.tensor(lengths).cumsum(0).tolist()] for lengths in (q_lengths, k_lengths))
    options = {f"cu_seqlens_{name}": torch.tensor(cu, dtype=torch.int32) for name, cu in (("q", cu_q), ("k", cu_k))}
    return [torch.cat([part[i][0] for part in parts]) for i in range(3)], options


def _dims(shape: Shape) -> tuple[int, int, int, int]:
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.v_head_dim


def _empty_keys(shape: Shape, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, num_kv_heads, head_dim, v_head_dim = _dims(shape)
    q = torch.randn(rows, num_heads, head_dim, generator=generator)
    return q, torch.zeros(0, num_kv_heads, head_dim), torch.zeros(0, num_kv_heads, v_head_dim)


def _lengths(case: Case) -> dict[str, Tensor]:
    """Per-sequence lengths, each batch element another."""
    shape = case.shape

    def per_sequence(*values: int) -> Tensor:
        return torch.tensor(values[: shape.batch], dtype=torch.int32).clamp(min=0)

    seqlen_q, seqlen_k = shape.seqlen_q, shape.seqlen_k
    if case.layout == "padded":
        return {
            "leftpad_k": per_sequence(0, 13, 40),
            "seqused_k": per_sequence(seqlen_k, seqlen_k - 7, seqlen_k - 21),
            "seqused_q": per_sequence(seqlen_q, seqlen_q - 7, seqlen_q - 21),
        }
    if case.layout == "cache":
        return {"leftpad_k": per_sequence(11, 0, 0), "seqused_k": per_sequence(seqlen_k - 20, 5, seqlen_k)}
    return {}


def build(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Call:
    """The call that ``case`` describes, with values rounded to ``dtype``."""
    generator = _generator(case, seed)
    options: dict = {}
    if case.layout == "packed":
        tensors, options = _packed(case, generator)
    else:
        tensors = (
            list(FAMILIES[case.family](case.shape, generator))
            if case.shape.seqlen_k
            else _keyless(case.shape, generator)
        )
        options = dict(_lengths(case))
    options |= {
        "tau": case.tau,
        "causal": case.causal,
        "window": case.window,
        "softcap": case.softcap,
        "tile": case.tile,
    }
    if case.layout != "packed":
        options["decode"] = "single"
    if case.softmax_scale is not None:
        options["softmax_scale"] = case.softmax_scale
    if case.sinks is not None:
        sinks = 14.0 + 3.0 * torch.randn(case.num_heads, generator=generator)  # as large as the scores of peaked inputs
        options["sinks"] = torch.full_like(sinks, -torch.inf) if case.sinks == "none" else sinks
    if case.mask is not None:
        options["mask"] = _mask(case, generator)
    tensors = [x.to(dtype) for x in tensors]
    if case.strided:
        tensors = [_with_gaps(x, how) for x, how in zip(tensors, ("heads first", "gaps", "gaps"), strict=True)]
    tensors = [x.to(device) for x in tensors] if device != "cpu" else tensors
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    call = Call(case, *tensors, options)
    if case.layout in ("padded", "cache"):
        _poison_outside(call)
    return call


def _keyless(shape: Shape, generator: torch.Generator) -> list[Tensor]:
    return [torch.stack([part] * shape.batch) for part in _empty_keys(shape, shape.seqlen_q, generator)]


def _poison_outside(call: Call) -> None:
    for b, (q_begin, q_end, k_begin, k_end) in enumerate(_sequence_bounds(call)):
        call.q[b, :q_begin], call.q[b, q_end:] = NAN, NAN
        for x in (call.k, call.v):
            x[b, :k_begin], x[b, k_end:] = NAN, NAN

# SPDX-License-Identifier: Apache-2.0
"""What the fuzz draws: calls of the public functions with any shapes, strides, types, masks, lengths and settings they accept.

Whatever belongs to no sequence is NaN, as in ``calls.py``.
"""

from __future__ import annotations

import math

import torch
from calls import NAN, Call
from hypothesis import strategies as st
from inputs import FAMILIES, NOT_IN_16_BIT, Case, Shape
from torch import Tensor

from mala_hf.ops import quantize_keys

SMALL_DIMS = (1, 2, 3, 5, 8, 16, 17, 24, 33)
DIMS_OF_FAMILY = {"peaked": 4, "needle": 9, "outlier_channels": 4}  # at least
TAUS = (0.0, 0.1, 0.9, 1.0, 1.0, 1.0, 1.0, 3.0, 30.0, 1e6)
TILES = [(m, n) for m in (1, 2, 4, 8, 16) for n in (1, 2, 4, 8, 16, 32)]
KERNEL_TILES = [(m, n) for m in (16, 32) for n in (16, 32)]
FLOATS = (torch.float64, torch.float32, torch.float32, torch.float16, torch.bfloat16)
UP_TO_3, UP_TO_40, MORE_KEYS = st.integers(0, 3), st.integers(0, 40), st.integers(-20, 40)
FORMS = ("two_pass", "int8_two_pass", "split")
LAYOUTS = ("contiguous", "heads first", "gaps", "offset", "backward batch")


def seeds(draw) -> torch.Generator:
    """A generator for what need not shrink."""
    return torch.Generator().manual_seed(draw(st.integers(0, 2**20)))


@st.composite
def shapes(draw, seqlens_q=UP_TO_40, more_keys=MORE_KEYS, batch=UP_TO_3) -> Shape:
    """Sizes of a call; ``more_keys``: seqlen_k - seqlen_q."""
    seqlen_q = draw(seqlens_q)
    num_kv_heads = draw(st.integers(1, 2))
    return Shape(
        draw(batch), seqlen_q, max(0, seqlen_q + draw(more_keys)), num_kv_heads * draw(st.integers(1, 3)), num_kv_heads,
        draw(st.sampled_from(SMALL_DIMS)), draw(st.sampled_from(SMALL_DIMS)),
    )  # fmt: skip


SHAPES = shapes()


def placed(x: Tensor, how: str) -> Tensor:
    """The values of ``x`` (batch, seqlen, heads, dim) in another layout, with NaN in what lies between them."""
    if how == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "gaps":
        storage = x.new_full((x.shape[0], 2 * x.shape[1], x.shape[2], x.shape[3] + 3), NAN)
        storage[:, ::2, :, : x.shape[3]] = x
        return storage[:, ::2, :, : x.shape[3]]
    if how == "offset":
        storage = x.new_full((x.numel() + 1,), NAN)
        return storage[1:].view(x.shape).copy_(x)
    if how == "backward batch":  # sequence before batch
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x


def operands(
    draw, shape: Shape, dtype: torch.dtype, generator: torch.Generator, but: tuple[str, ...] = ("near_threshold",)
) -> list[Tensor]:
    """q, k, v of a family that has these sizes; ``but``: not those, whose ties are decided by rounding."""
    smallest = min(shape.head_dim, shape.v_head_dim)
    fits = [
        name
        for name in FAMILIES
        if smallest >= DIMS_OF_FAMILY.get(name, 1)
        and ((shape.seqlen_k and shape.batch) or name == "flat")
        and name not in but
        and not (dtype in (torch.float16, torch.bfloat16) and name in NOT_IN_16_BIT)
    ]
    family = FAMILIES[draw(st.sampled_from(fits))]
    tensors = [x.to(dtype) for x in family(shape, generator)]
    return [placed(x, draw(st.sampled_from(LAYOUTS))) for x in tensors]


def drawn_settings(draw, shape: Shape, generator: torch.Generator, tiles=TILES) -> dict:
    """Numbers, sinks and flags that all functions take."""
    sides = st.sampled_from([-1, -1, -1, 0, 1, 5, 17, 100])
    options = {
        "tau": draw(st.sampled_from(TAUS)),
        "causal": draw(st.booleans()),
        "window": (draw(sides), draw(sides)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0, 20.0])),
        "tile": draw(st.sampled_from(tiles)),
    }
    if draw(st.booleans()):
        options["softmax_scale"] = draw(st.sampled_from([0.02, 0.3, 1.0]))
    kind = draw(st.sampled_from(["none", "none", "learned", "some", "large"]))
    if kind != "none":
        sinks = 3 * torch.randn(shape.num_heads, generator=generator) + (30.0 if kind == "large" else 0.0)
        options["sinks"] = sinks.index_fill(0, torch.tensor([0]), -math.inf) if kind == "some" else sinks
    return options


def _mask(draw, shape: Shape, generator: torch.Generator) -> Tensor:
    """bool, of fewer or more dimensions, of one or of all batch entries, heads and rows."""
    full = shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_k
    size = [n if draw(st.booleans()) else 1 for n in full[:3]] + [full[3]]
    mask = torch.rand(*size, generator=generator) < draw(st.sampled_from([0.1, 0.5, 0.9]))
    if draw(st.booleans()) and all(n == 1 for n in size[:2]):
        mask = mask[0, 0]
    return mask


def _lengths(draw, shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """Some of the three lengths, as int32 or int64."""

    def each(high: Tensor | int) -> Tensor:
        high = torch.as_tensor(high).expand(shape.batch)
        return (
            (torch.rand(shape.batch, generator=generator) * (high + 1))
            .floor()
            .to(draw(st.sampled_from([torch.int32, torch.int64])))
        )

    options = {}
    if draw(st.booleans()):
        options["seqused_q"] = each(shape.seqlen_q)
    if draw(st.booleans()):
        options["seqused_k"] = each(shape.seqlen_k)
    if draw(st.booleans()):
        options["leftpad_k"] = each(options.get("seqused_k", shape.seqlen_k))
    return options


@st.composite
def fixed_calls(draw, dtypes=FLOATS, tiles=TILES, sizes=SHAPES, is_decode: bool = False) -> Call:
    """A call of ``mala_attn_func``; of what a decode covers, if ``is_decode``."""
    generator, shape, dtype = seeds(draw), draw(sizes), draw(st.sampled_from(dtypes))
    # a decode compares with a row's largest score, which equal or saturated ones share up to a rounding
    tied = ("near_threshold", *(("constant_keys", "huge_norms", "outlier_channels") if is_decode else ()))
    q, k, v = operands(draw, shape, dtype, generator, tied)
    options = {**drawn_settings(draw, shape, generator, tiles), "decode": "single"}
    if is_decode and options["softcap"]:
        options["softcap"] = 40.0
    surroundings = draw(st.sampled_from(["none", "lengths", "lengths"] + ["mask"] * (not is_decode)))
    if surroundings == "mask":
        options["mask"] = _mask(draw, shape, generator)
    if surroundings == "lengths":
        options |= _lengths(draw, shape, generator)
        for b in range(shape.batch):
            q[b, int(options.get("seqused_q", [shape.seqlen_q] * shape.batch)[b]) :] = NAN
            for x in (k, v):
                x[b, : int(options.get("leftpad_k", [0] * shape.batch)[b])] = NAN
                x[b, int(options.get("seqused_k", [shape.seqlen_k] * shape.batch)[b]) :] = NAN
    return Call(Case(), q, k, v, options)


@st.composite
def packed_calls(draw, dtypes=FLOATS, tiles=TILES) -> Call:
    """A call of ``mala_attn_varlen_func``: sequences of any lengths, and rows behind the last that belong to none."""
    generator, dtype = seeds(draw), draw(st.sampled_from(dtypes))
    count = draw(st.integers(0, 4))
    lengths_q = [draw(st.integers(0, 24)) for _ in range(count)]
    lengths_k = lengths_q if draw(st.booleans()) else [draw(st.integers(0, 24)) for _ in range(count)]
    rows, keys = sum(lengths_q) + draw(st.sampled_from([0, 0, 3])), sum(lengths_k) + draw(st.sampled_from([0, 0, 3]))
    shape = draw(shapes(st.just(rows), st.just(keys - rows), st.just(1)))
    q, k, v = (x[0] for x in operands(draw, shape, dtype, generator))
    q[sum(lengths_q) :], k[sum(lengths_k) :], v[sum(lengths_k) :] = NAN, NAN, NAN
    options = drawn_settings(draw, shape, generator, tiles)
    for name, lengths in (("q", lengths_q), ("k", lengths_k)):
        boundaries = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        options[f"cu_seqlens_{name}"] = boundaries.to(draw(st.sampled_from([torch.int32, torch.int64])))
        if draw(st.booleans()):
            options[f"max_seqlen_{name}"] = max(lengths, default=0) + draw(st.integers(0, 3))
    return Call(Case(), q, k, v, options)


@st.composite
def decode_calls(draw, dtypes=FLOATS, tiles=TILES) -> tuple[Call, str, int]:
    """A call of ``mala_attn_func`` that a decode covers, its form and its number of splits."""
    sizes = shapes(st.integers(1, 12), st.integers(-3, 90), st.integers(1, 2))
    call, form = draw(fixed_calls(dtypes, tiles, sizes, is_decode=True)), draw(st.sampled_from(FORMS))
    if form == "int8_two_pass" and call.q.dtype == torch.float64:  # a plane's numbers are float32
        form = "two_pass"
    if form == "int8_two_pass":
        call = call.with_(key_plane=quantize_keys(call.k, impl="blockwise"))
    return call, form, draw(st.sampled_from([1, 2, 3, 7, 100]))

# SPDX-License-Identifier: Apache-2.0
"""The fuzz of the Transformers adapter: every kind of mask, against full attention over pairs that are written down here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import torch
from fuzz_inputs import operands, seeds, shapes
from hypothesis import strategies as st
from torch import Tensor

from mala_hf.ops.hf import mala_attention_forward, mala_reference_attention_forward

KINDS = ("none", "left padding", "right padding", "bool", "float", "packed lengths", "packed positions")


@dataclass(frozen=True)
class Layer:
    """Arguments of the adapter, and the pairs (batch or 1, heads or 1, rows, keys) that may attend."""

    tensors: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    options: dict
    legal: Tensor
    tau: float
    tile: tuple[int, int]

    def run(self, forward, tau: float) -> Tensor:
        """out (batch, seqlen_q, heads, v_head_dim)."""
        config = SimpleNamespace(mala={"tau": tau, "tile": list(self.tile)}, num_hidden_layers=1)
        module = SimpleNamespace(config=config, layer_idx=0, is_causal=True)
        return forward(module, *self.tensors, self.mask, **self.options)[0]


def _band(rows: int, keys: int, causal: bool, window: int | None) -> Tensor:
    """Pairs by causality and window; the last row is aligned with the last key."""
    distance = torch.arange(keys) - (torch.arange(rows)[:, None] + keys - rows)
    legal = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        legal &= distance <= 0
    if window is not None:
        legal &= (distance > -window) & (distance < window)
    return legal


@st.composite
def layers(draw) -> Layer:
    """A call of the adapter with one of the kinds of masks that Transformers makes."""
    generator, kind = seeds(draw), draw(st.sampled_from(KINDS))
    packed = kind.startswith("packed")
    more = st.just(0) if packed else st.sampled_from([0, 0, 1, 7, 30])
    shape = draw(shapes(st.integers(2 if packed else 1, 40), more, st.just(1) if packed else st.integers(1, 3)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    # heads before sequence, in any strides
    drawn = operands(draw, shape, dtype, generator, but=("near_threshold", "constant_keys"))
    tensors = tuple(x.transpose(1, 2) for x in drawn)
    rows, keys, batch = shape.seqlen_q, shape.seqlen_k, shape.batch
    window = draw(st.sampled_from([None, None, 1, 5, 100]))
    causal = draw(st.booleans()) or kind not in ("none", "packed lengths")
    options: dict = {"sliding_window": window, "dropout": 0.0, "use_cache": True}
    if not causal:
        options["is_causal"] = False
    if draw(st.booleans()):
        options["scaling"] = draw(st.sampled_from([0.1, 1.0]))
    if draw(st.booleans()):
        options["softcap"] = 15.0
    if draw(st.booleans()):
        options["s_aux"] = 3 * torch.randn(shape.num_heads, generator=generator)
    legal, mask = _band(rows, keys, causal, window)[None, None], None
    if kind.endswith("padding"):
        width = keys
        first, last = torch.zeros(batch, dtype=torch.int64), torch.full((batch,), width)
        cut = (torch.rand(batch, generator=generator) * (keys + 1)).long()
        if kind == "left padding":
            first = cut
        else:
            last = cut
        position = torch.arange(width)
        real = (position >= first[:, None]) & (position < last[:, None])  # (batch, keys)
        mask = real if draw(st.booleans()) else real.long()
        legal = legal & real[:, None, None] & real[:, None, keys - rows :, None]
    elif kind in ("bool", "float"):
        size = [draw(st.sampled_from([1, n])) for n in (batch, shape.num_heads)]
        allowed = torch.rand(*size, rows, keys, generator=generator) < draw(st.sampled_from([0.2, 0.7]))
        legal = mask = allowed
        if kind == "float":
            hidden = draw(st.sampled_from([-math.inf, torch.finfo(dtype).min]))
            mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, hidden)
    elif packed:
        cuts = sorted({0, rows, *(draw(st.integers(1, rows)) for _ in range(draw(st.integers(0, 3))))})
        sequence = torch.bucketize(torch.arange(rows), torch.tensor(cuts[1:]), right=True)
        legal = legal & (sequence[:, None] == sequence)
        lengths = [end - start for start, end in pairwise(cuts)]
        if kind == "packed positions":
            start = draw(st.integers(0, 3))
            options["position_ids"] = torch.cat([torch.arange(length) + start for length in lengths])[None]
        else:
            boundaries = torch.tensor(cuts, dtype=torch.int32)
            options |= {f"cu_seq_lens_{side}": boundaries for side in "qk"}
            options |= {f"max_length_{side}": max(lengths) for side in "qk"}
    tile = draw(st.sampled_from([(1, 2), (4, 4), (8, 16), (16, 16)]))
    return Layer(tensors, mask, options, legal, draw(st.sampled_from([0.3, 1.0, 1.0, 5.0])), tile)


def full_attention(layer: Layer) -> Tensor:
    """Softmax over the legal pairs, in float64; rows without any give zeros."""
    q, k, v = (x.double() for x in layer.tensors)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * layer.options.get("scaling", q.shape[-1] ** -0.5)
    cap = layer.options.get("softcap")
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores.masked_fill(~layer.legal, -math.inf)
    lse = scores.logsumexp(-1)
    if (sinks := layer.options.get("s_aux")) is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    p = torch.exp(scores - lse.where(lse > -math.inf, 0)[..., None])
    return (p @ v).transpose(1, 2)


def check_layer(layer: Layer) -> None:
    """tau = 0 is full attention over the legal pairs; any tau gives what the definition gives."""
    exact = layer.run(mala_attention_forward, 0.0)
    rows_without_keys = ~layer.legal.any(-1).expand(exact.shape[0], exact.shape[2], -1).transpose(1, 2)
    assert not exact[rows_without_keys].any(), "a row that sees no key is not zero"
    size = 1 + float(layer.tensors[2].double().nan_to_num().abs().amax()) if layer.tensors[2].numel() else 1.0
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4}[exact.dtype] * size
    torch.testing.assert_close(exact.double(), full_attention(layer), rtol=0, atol=tolerance)
    found, expected = (layer.run(run, layer.tau) for run in (mala_attention_forward, mala_reference_attention_forward))
    if exact.dtype == torch.float64:  # no tie is decided by rounding
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert found.isfinite().all()

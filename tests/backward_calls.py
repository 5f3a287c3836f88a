# SPDX-License-Identifier: Apache-2.0
"""The kernels of forward and backward launched on a call, outside autograd, and what they return."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from calls import NAN, Call, heads
from helpers import of_head
from torch import Tensor

from mala_hf.ops.blockwise import Settings
from mala_hf.ops.checks import normalized_mask
from mala_hf.ops.tile_config import tile_config
from mala_hf.ops.visibility import fixed_sequences, packed_sequences

LENGTHS = ("seqused_q", "seqused_k", "leftpad_k")


@dataclass(frozen=True)
class Forward:
    """What a forward leaves: out like the call's q, lse (.., heads, rows), tiles or None, support words or None."""

    out: Tensor
    lse: Tensor
    tiles: Tensor | None
    support: Tensor | None


@dataclass(frozen=True)
class Gradients:
    """dq, dk, dv like the call's q, k, v, dsinks (heads,); None where not asked for. ``support``: the words that backward found."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None
    support: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        return {name: x for name in ("dq", "dk", "dv", "dsinks") if (x := getattr(self, name)) is not None}


def with_tile(call: Call) -> Call:
    """The call with its tile written out; a case's None stands for the shipped one."""
    if call.options["tile"] is not None:
        return call
    rows = call.q.shape[1]
    if call.is_packed:
        rows = int(call.options["cu_seqlens_q"].diff().max())
    return call.with_(tile=tile_config(call.q.shape[-1], call.v.shape[-1], call.q.dtype, rows).tile)


def launch_arguments(call: Call) -> tuple:
    """q, k, v (batch, seqlen, heads, dim), settings, sequences, sinks, mask: what the public function hands to a kernel."""
    options = with_tile(call).options
    q, k, v = (x[None] if call.is_packed else x for x in (call.q, call.k, call.v))
    left, right = options["window"]
    window = (left, 0 if options["causal"] else right)
    scale = options.get("softmax_scale") or q.shape[-1] ** -0.5
    settings = Settings(options["tau"], scale, window, options["softcap"], options["tile"])
    if call.is_packed:
        cu_q, cu_k = options["cu_seqlens_q"], options["cu_seqlens_k"]
        longest = (max(cu.diff().tolist(), default=0) for cu in (cu_q, cu_k))
        sequences = packed_sequences(cu_q, cu_k, *longest, window[1])
    else:
        lengths = {name: options.get(name) for name in LENGTHS}
        sequences = fixed_sequences(q.shape[0], q.shape[1], k.shape[1], window[1], **lengths)
    mask = normalized_mask(options.get("mask"), q, k, has_lengths=False)
    return q, k, v, settings, sequences, options.get("sinks"), mask


def run_forward(call: Call, return_work: bool = False, save_support: bool = True) -> Forward:
    """The Triton forward."""
    from mala_hf.ops.forward import launch_forward

    out, lse, tiles, _, support = launch_forward(*launch_arguments(call), return_work, save_support=save_support)
    return Forward(out[0], lse[0], tiles, support) if call.is_packed else Forward(out, lse, tiles, support)


def run_backward(
    call: Call, forward: Forward, do: Tensor, support: Tensor | None = None, needs=(True, True, True)
) -> Gradients:
    """The Triton backward: state-only, or over the tiles of ``support``."""
    from mala_hf.ops.backward import launch_backward

    q, k, v, settings, sequences, sinks, mask = launch_arguments(call)
    out, lse, do = (x[None] if call.is_packed else x for x in (forward.out, forward.lse, do))
    *gradients, found = launch_backward(q, k, v, out, lse, do, settings, sequences, sinks, mask, support, needs=needs)
    if call.is_packed:
        gradients[:3] = [None if x is None else x[0] for x in gradients[:3]]
    return Gradients(*gradients, found)


def unpacked(support: Tensor, k_tiles: int) -> Tensor:
    """Bool (.., k_tiles) of support words int32 (.., words); no bit may be set beyond the last tile."""
    assert support.dtype == torch.int32
    assert support.shape[-1] == -(-k_tiles // 32)
    bits = (support[..., None] >> torch.arange(32, device=support.device)) & 1
    bits = bits.flatten(-2).bool()
    assert not bits[..., k_tiles:].any(), "bits beyond the last key tile"
    return bits[..., :k_tiles]


def gradient_of(call: Call, seed: int = 7) -> Tensor:
    """do like the output, NaN on rows that belong to no sequence or see no key by alignment: it must not reach a result."""
    shape = (*call.q.shape[:-1], call.v.shape[-1])
    do = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(call.q)
    outside = torch.ones(do.shape[:-1], dtype=torch.bool, device=do.device)
    for head in heads(call):
        of_head(outside, call, head).fill_(False)
    return do.masked_fill(outside[..., None], NAN)

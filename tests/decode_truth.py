# SPDX-License-Identifier: Apache-2.0
"""What a decode must give: the definition of its form in float64, and the same in float32 as the baseline of its error.

From an INT8 plane, the kernels and the blockwise form lower a row's limit, since a guarantee stands on sums in float32: by up to
PLANE_SLACK_ROUNDINGS roundings of 1 + |normalizer| (0.004 nats where a normalizer is 30). A tile so close below its limit is retained
and the definition skips it. Therefore each head must have the definition's tiles for this tau or for the tau that stands that much
lower, and the values of those: no tile that the definition retains may be skipped, none further below its limit may be retained.
"""

from __future__ import annotations

import math

import torch
from calls import Call
from helpers import EPS_32, SKIPPED, assert_near
from inputs import Case
from torch import Tensor

from mala_hf.ops import reference_decode
from mala_hf.ops.call_options import settings_of
from mala_hf.ops.decode_choice import decode_settings
from mala_hf.ops.visibility import fixed_sequences

SPLITS = 3
PLANE_SLACK_ROUNDINGS = 1024
DECODE = Case(seqlen_q=1, seqlen_k=210, num_heads=4, num_kv_heads=2, tile=(64, 16))


def reference(call: Call, form: str, dtype: torch.dtype = torch.float64):
    """out, lse, tiles and certificate by the definition, in ``dtype`` throughout."""
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    options = call.options
    lengths = {name: options.get(name) for name in ("seqused_q", "seqused_k", "leftpad_k")}
    settings = settings_of(
        q, v, options["tau"], options["causal"], options.get("softmax_scale"), options["window"], options["softcap"],
        options["tile"], q.shape[1], k.shape[1],
    )  # fmt: skip
    sequences = fixed_sequences(q.shape[0], q.shape[1], k.shape[1], settings.window[1], **lengths)
    settings = decode_settings(settings, q, v, k.shape[2], True)
    return reference_decode.decode_sequences(
        q, k, v, settings, sequences, options.get("sinks"), form, SPLITS, options.get("key_plane")
    )


def at_lowered_limits(call: Call, lse: Tensor) -> Call:
    """The call at the tau whose limits are lower by as much as a decode from a plane may lower them."""
    size = 1 + float(lse[lse.isfinite()].abs().max()) if lse.isfinite().any() else 1.0
    return call.with_(tau=call.options["tau"] * math.exp(-PLANE_SLACK_ROUNDINGS * EPS_32 * size))


def definition_of(call: Call, form: str, tiles: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """As ``reference``; of heads from a plane that have the tiles of the lowered limits, by those."""
    found = reference(call, form, dtype)
    if form != "int8_two_pass" or torch.equal(found[2].cpu(), tiles.cpu()):
        return found
    lowered = reference(at_lowered_limits(call, found[1]), form, dtype)
    has_lowered = (lowered[2].cpu() == tiles.cpu()).flatten(2).all(2).to(call.q.device)  # (batch, heads)
    chosen = has_lowered[:, None, :, None], has_lowered[..., None], has_lowered[..., None, None], has_lowered[..., None]
    return tuple(one.where(~heads, other) for one, other, heads in zip(found, lowered, chosen, strict=True))


def assert_decode(call: Call, form: str, out: Tensor, lse: Tensor, work) -> int:
    """Equal tiles, and values within the same-precision baseline of float64. Returns the number of skipped tiles."""
    truth_out, truth_lse, tiles, certificate = definition_of(call, form, work.tiles)
    assert (work.form, work.tile[1]) == (form, call.options["tile"][1])
    assert torch.equal(work.tiles.cpu(), tiles.cpu()), call.case.id
    same_out, same_lse, _, same_certificate = definition_of(call, form, work.tiles, torch.float32)
    if call.q.dtype in (torch.float16, torch.bfloat16):
        # the result is rounded, and before it each probability, by half a unit at most
        of_p = torch.finfo(call.q.dtype).eps / 2 * definition_of(call.with_(v=call.v.abs()), form, work.tiles)[0]
        same_out = truth_out + (same_out.to(call.q.dtype) - truth_out).abs() + of_p
    size = 1 + math.sqrt(call.q.shape[-1])
    assert_near("out", out.cpu(), truth_out.cpu(), same_out.cpu(), size)
    assert_near("lse", lse.cpu(), truth_lse.cpu(), same_lse.cpu(), size)
    # a bound's exponent is rounded as scores are; exact ones are rounded alike in the baseline
    exponent = 1 + truth_lse.abs().max() if form == "int8_two_pass" else 1
    assert_near("certificate", work.certificate.cpu(), certificate.cpu(), same_certificate.cpu(), 8 * size * exponent)
    return int((tiles == SKIPPED).sum())

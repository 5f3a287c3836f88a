# SPDX-License-Identifier: Apache-2.0
"""How the fuzz judges a call: against the rule's definition in float64, and against what the same call is in another form."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from backward_calls import Forward, Gradients, gradient_of, launch_arguments
from calls import Call
from gradients import check_backward
from helpers import (
    EPS_32,
    FLOOR_ROUNDINGS,
    NOT_VISIBLE,
    RETAINED,
    TIE_ROUNDINGS,
    assert_near,
    check_forward,
    precision_of,
)
from torch import Tensor

from mala_hf.ops import blockwise, reference_decode
from mala_hf.ops.support_bits import pack_support


def check_values(call: Call, impl: str) -> Forward:
    """Tiles, out, lse and certificate are the rule's; reporting them changes no bit."""
    out, lse, work = call.run(impl, return_lse=True, return_work=True)
    check_forward(call, out, lse, work)
    plain, plain_lse = call.run(impl, return_lse=True)
    assert torch.equal(plain, out), "reporting the work changed out"
    assert torch.equal(plain_lse, lse), "reporting the work changed lse"
    return Forward(out, lse, work.tiles, pack_support(work.tiles == RETAINED))


def check_gradients(call: Call, impl: str, forward: Forward, save_support: bool) -> None:
    """Gradients of the public function are the rule's, over tiles that forward retained."""
    do = gradient_of(call)
    leaves = [x.detach().requires_grad_() for x in call.tensors_and_sinks()]
    names = ["q", "k", "v", "sinks"][: len(leaves)]
    out = call.with_(**dict(zip(names, leaves, strict=True))).run(impl, save_support=save_support)
    found = dict(zip(names, torch.autograd.grad(out, leaves, do), strict=True))
    support = found_support(call, impl, forward, do)
    q_tiles, words = support.shape[2:]  # of the longest sequence that there is, not that there may be
    forward = replace(forward, support=forward.support[:, :, :q_tiles, :words])
    assert not (support & ~forward.support).any(), "backward keeps a tile that forward skipped"
    gradients = Gradients(found["q"], found["k"], found["v"], found.get("sinks"), support)
    check_backward(call, forward, do, gradients)


def found_support(call: Call, impl: str, forward: Forward, do: Tensor) -> Tensor:
    """The tiles that a backward finds on its own."""
    q, k, v, *rest = launch_arguments(call)
    out, lse, do = (x[None] if call.is_packed else x for x in (forward.out, forward.lse, do))
    if impl == "triton":
        from mala_hf.ops.backward import launch_backward

        return launch_backward(q, k, v, out, lse, do, *rest)[4]
    return pack_support(blockwise.backward(q, k, v, out, lse, do, *rest)[4] == RETAINED)


def decode_truth(call: Call, form: str, splits: int, dtype: torch.dtype):
    """out, lse, tiles, certificate by the form's definition in ``dtype``."""
    q, k, v, settings, sequences, sinks, _ = launch_arguments(call)
    group = q.shape[2] // k.shape[2]
    tokens = max(1, min(settings.tile[0], q.shape[1], 64 // group))
    settings = replace(settings, tile=(tokens, settings.tile[1]))
    tensors = (x.to(dtype) for x in (q, k, v))
    return reference_decode.decode_sequences(
        *tensors, settings, sequences, sinks, form, splits, call.options.get("key_plane")
    )


def check_decode(call: Call, form: str, splits: int, impl: str) -> None:
    """Tiles, out, lse and certificate are those of the form's definition."""
    out, lse, work = call.run(impl, decode=form, num_splits=splits, return_lse=True, return_work=True)
    assert work.form == form
    truth = decode_truth(call, form, splits, torch.float64)
    same = decode_truth(call, form, splits, call.q.dtype if call.q.dtype == torch.float64 else torch.float32)
    if not torch.equal(work.tiles, truth[2]):
        assert torch.equal(work.tiles == NOT_VISIBLE, truth[2] == NOT_VISIBLE), "visible tiles differ"
        largest = float(truth[1].nan_to_num(0, 0, 0).abs().max())
        taus = nudged_taus(call, form, largest)
        nudged = [same, *(decode_truth(call.with_(tau=tau), form, splits, torch.float64) for tau in taus)]
        # of each head and query tile on its own
        explained = torch.stack([(work.tiles == other[2]).all(-1) for other in (truth, *nudged)]).any(0)
        assert explained.all(), "tiles differ, and no rounding explains it"
        return
    size = 1 + math.sqrt(call.q.shape[-1]) + score_size(call)
    in_dtype = same[0].to(call.q.dtype)
    reach = float(call.v.double().nan_to_num().abs().max()) if call.v.numel() else 0.0
    rounding = torch.finfo(call.q.dtype).eps / EPS_32  # kernels multiply values with probabilities of the inputs' type
    of_products = rounding / FLOOR_ROUNDINGS if impl == "triton" and rounding > 1 else 0.0
    assert_near("out", out, truth[0], in_dtype, size + of_products, reach)
    finite = truth[1][truth[1].isfinite()]
    assert_near("lse", lse, truth[1], same[1], size, 1.0 + (float(finite.abs().max()) if finite.numel() else 0.0))
    # a bound's exponent is rounded as scores are; exact ones are rounded alike in the baseline
    exponent = (
        1 + float(truth[1].nan_to_num(0, 0, 0).abs().max()) if form == "int8_two_pass" and truth[1].numel() else 1.0
    )
    assert_near("certificate", work.certificate, truth[3], same[3], 8 * size * exponent)
    plain, plain_lse = call.run(impl, decode=form, num_splits=splits, return_lse=True)
    assert torch.equal(plain, out)
    assert torch.equal(plain_lse, lse)


def nudged_taus(call: Call, form: str, largest_lse: float) -> list[float]:
    """Taus within what rounding of the scores, and the implementations' slack, may do to a decision."""
    tie = TIE_ROUNDINGS * precision_of(call.q.dtype) * score_size(call)
    slack = 64 * (2.0**-46 if call.q.dtype == torch.float64 else 2.0**-18)
    if form == "int8_two_pass":
        slack = 2.0**-13 * (1 + largest_lse)  # twice BOUND_SLACK
    capped = min(call.options["tau"], float(max(call.k.shape[1], 1)))  # beyond, all keys of a row are below the limit
    return [capped * (1 + sign * by) for by in (tie, slack, slack / 2, slack / 16) for sign in (1, -1)]


def score_size(call: Call) -> float:
    """The largest |q| |k| softmax_scale."""
    scale = call.options.get("softmax_scale") or call.q.shape[-1] ** -0.5
    q, k = (x.double().nan_to_num().norm(dim=-1) for x in (call.q, call.k))
    return 1.0 + (float(q.max() * k.max()) * scale if q.numel() and k.numel() else 0.0)

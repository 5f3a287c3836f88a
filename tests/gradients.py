# SPDX-License-Identifier: Apache-2.0
"""How gradients and supports of the backward's kernels are judged.

Gradients are compared with float64 truth over the tiles that the backward says it retained; these tiles are compared with the rule,
where only ties (a margin within the rounding of scores) may differ. The truth starts from the forward's own out and lse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from backward_calls import Forward, Gradients, gradient_of, run_backward, run_forward, unpacked, with_tile
from calls import Call, Head, heads
from helpers import (
    EPS_32,
    RETAINED,
    TIE_ROUNDINGS,
    by_key,
    numbers_of,
    of_head,
    operands,
    score_size,
    scores_of,
    sink_of,
)
from torch import Tensor

from mala_hf.ops.reference import log_threshold


def backward_margins(call: Call, head: Head, lse: Tensor) -> Tensor:
    """(q_tiles, k_tiles), nats: the largest tile_max - limit over a tile's constraining rows; -inf where nothing is legal."""
    numbers = numbers_of(call)
    q, k, _ = operands(call, head, torch.float64)
    scores = scores_of(q, k, head.legal, numbers["softmax_scale"], numbers["softcap"])
    limit = lse.double() + log_threshold(head.legal.sum(1), numbers["tau"]).double()
    block_m, block_n = numbers["tile"]
    padding = (0, -scores.shape[1] % block_n, 0, -scores.shape[0] % block_m)
    scores = torch.nn.functional.pad(scores, padding, value=-math.inf)
    tile_max = scores.unflatten(1, (-1, block_n)).amax(-1)  # (rows, k_tiles)
    limit = torch.nn.functional.pad(limit, (0, padding[3]))
    margin = torch.where(tile_max > -math.inf, tile_max - limit[:, None], -math.inf)
    return margin.unflatten(0, (-1, block_m)).amax(1)


@dataclass(frozen=True)
class HeadGradients:
    """dq (M, D), dk (N, D), dv (N, E), dsink () or None of one head."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


def gradients_over(
    call: Call, head: Head, retained: Tensor, forward: Forward, do: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[HeadGradients, HeadGradients]:
    """Gradients over the pairs of ``retained`` tiles, and their reach: what their terms sum up to without signs.

    Float64, or float32 with p and ds rounded to ``dtype`` before their products, as 16-bit matrix units want them.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = numbers_of(call)
    scale, softcap = numbers["softmax_scale"], numbers["softcap"]
    q, k, v = operands(call, head, wide)
    row_out, row_do = (of_head(x, call, head).to(wide) for x in (forward.out, do))
    lse = of_head(forward.lse, call, head, rows_dim_last=True).to(wide)
    lse = torch.where(lse > -math.inf, lse, 0)
    scores = scores_of(q, k, head.legal, scale, softcap)  # (M, N)
    kept = by_key(retained, numbers["tile"], head.legal) & head.legal
    p = torch.exp(scores.masked_fill(~kept, -math.inf) - lse[:, None])
    sink = sink_of(call, head)
    sink_mass = None if sink is None else torch.exp(sink.to(wide) - lse)

    def products(p, q, k, v, row_out, row_do, sign: int) -> HeadGradients:
        delta = (row_out * row_do).sum(1)
        ds = p * (row_do @ v.T - sign * delta[:, None])
        if softcap:
            ds = ds * (1 - (scores.masked_fill(~kept, 0) / softcap) ** 2)
        p, ds = (x.to(dtype).to(wide) for x in (p, ds))
        dsink = None if sink_mass is None else -(sink_mass * delta).sum()
        return HeadGradients(scale * (ds @ k), scale * (ds.T @ q), p.T @ row_do, dsink)

    operands_of_sum = (p, q, k, v, row_out, row_do)
    return products(*operands_of_sum, 1), products(*(x.abs() for x in operands_of_sum), -1)


def assert_gradient(name: str, got: Tensor, truth: Tensor, baseline: Tensor, reach: Tensor, size: float) -> None:
    """At most twice the error of PyTorch in the same precision, beyond what roundings of the scores move.

    Probabilities are exp(score - lse) with a given lse: a score's rounding, relative to ``size``, is a term's relative error.
    """
    assert got.isfinite().all(), f"{name}: not finite"
    error, allowed = (got.double() - truth).abs(), (baseline.double() - truth).abs()
    smallest = torch.finfo(got.dtype).tiny * torch.finfo(got.dtype).eps
    floor = TIE_ROUNDINGS * EPS_32 * size * reach.abs() + smallest
    if not error.numel():
        return
    assert (error - floor).max() <= 2 * allowed.max(), (
        f"{name}: worst error {error.max():.3g}, baseline's {allowed.max():.3g}, reach {reach.abs().max():.3g}"
    )
    assert error.norm() <= 2 * allowed.norm() + floor.norm(), (
        f"{name}: error {error.norm():.3g}, baseline's {allowed.norm():.3g}, reach {reach.norm():.3g}"
    )


def check_support(call: Call, head: Head, words: Tensor, forward: Forward) -> Tensor:
    """The support that a backward found for one head, bool (q_tiles, k_tiles), against the rule: only ties may differ."""
    margin = backward_margins(call, head, of_head(forward.lse, call, head, rows_dim_last=True))
    q_tiles, k_tiles = margin.shape
    whole = unpacked(words[head.sequence, head.head], _k_tiles(call))
    found = whole[:q_tiles, :k_tiles]
    context = f"{call.case.id}, sequence {head.sequence}, head {head.head}"
    assert whole.sum() == found.sum(), f"{context}: tiles beyond the sequence"
    wrong = found != (margin >= 0)
    lse = of_head(forward.lse, call, head, rows_dim_last=True)
    size = score_size(call, head) + float(lse[lse.isfinite()].abs().max()) if lse.isfinite().any() else 1.0
    tie_nats = TIE_ROUNDINGS * EPS_32 * size
    for q_tile, k_tile in wrong.nonzero().tolist():
        away = float(margin[q_tile, k_tile])
        assert abs(away) <= tie_nats, (
            f"{context}: query tile {q_tile}, key tile {k_tile} is {'kept' if found[q_tile, k_tile] else 'skipped'}, "
            f"the rule's margin is {away:.3g} nats (a tie is {tie_nats:.3g})"
        )
    return found


def _k_tiles(call: Call) -> int:
    longest = call.k.shape[0 if call.is_packed else 1]
    if call.is_packed:
        longest = max(call.options["cu_seqlens_k"].diff().tolist(), default=0)
    return -(-longest // call.options["tile"][1])


def check_backward(call: Call, forward: Forward, do: Tensor, gradients: Gradients) -> None:
    """Gradients and found support of one backward, against the rule."""
    dtype, num_heads = call.q.dtype, call.q.shape[-2]
    assert (gradients.dq.dtype, gradients.dk.dtype, gradients.dv.dtype) == (dtype,) * 3
    outside = {name: torch.ones_like(x, dtype=torch.bool) for name, x in gradients.named().items() if name != "dsinks"}
    per_key: dict[tuple[int, int], list] = {}
    sinks = torch.zeros(3, num_heads, dtype=torch.float64)  # truth, baseline, reach
    largest = 1.0
    for head in heads(call):
        context = f"{call.case.id}, sequence {head.sequence}, head {head.head}"
        found = check_support(call, head, gradients.support, forward)
        truth, reach = gradients_over(call, head, found, forward, do)
        same, _ = gradients_over(call, head, found, forward, do, dtype)
        size = score_size(call, head)
        largest = max(largest, size)
        dq = of_head(gradients.dq, call, head)
        assert_gradient(f"{context}: dq", dq, truth.dq, same.dq.to(dtype), reach.dq, size)
        of_head(outside["dq"], call, head).fill_(False)
        per_key.setdefault((head.sequence, head.kv_head), []).append((head, size, truth, same, reach))
        if truth.dsink is not None:
            sinks[:, head.head] += torch.stack([x.dsink.double().cpu() for x in (truth, same, reach)])
    for group in per_key.values():
        head, size = group[0][0], max(of_one[1] for of_one in group)
        for name in ("dk", "dv"):
            truth, same, reach = (sum(getattr(of_one[i], name) for of_one in group) for i in (2, 3, 4))
            context = f"{call.case.id}, sequence {head.sequence}, KV head {head.kv_head}: {name}"
            assert_gradient(context, _of_keys(getattr(gradients, name), call, head), truth, same.to(dtype), reach, size)
            _of_keys(outside[name], call, head).fill_(False)
    for name, where in outside.items():
        assert not getattr(gradients, name)[where].any(), f"{name} is not zero outside the sequences"
    if gradients.dsinks is not None:
        assert gradients.dsinks.dtype == call.options["sinks"].dtype
        assert_gradient(f"{call.case.id}: dsinks", gradients.dsinks.cpu(), *sinks, largest)


def _of_keys(x: Tensor, call: Call, head: Head) -> Tensor:
    return (x if call.is_packed else x[head.batch])[head.keys, head.kv_head]


def assert_same_gradients(got: Gradients, expected: Gradients) -> None:
    """No bit differs, NaN included, in what both hold."""
    for name, x in got.named().items():
        torch.testing.assert_close(
            x, getattr(expected, name), rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert torch.equal(got.support, expected.support), "the tiles that were found differ"


def both_forms(call: Call, forward: Forward, do: Tensor, **more) -> tuple[Gradients, Gradients]:
    """State-only and saved support."""
    return run_backward(call, forward, do, **more), run_backward(call, forward, do, forward.support, **more)


def check_both_forms(call: Call) -> tuple[Forward, Gradients]:
    """Forward's bits are its tiles; both backwards are the same, are the rule's, and keep only tiles that forward kept."""
    call = with_tile(call)
    forward = run_forward(call, return_work=True)
    saved = unpacked(forward.support, forward.tiles.shape[-1])
    assert torch.equal(saved, forward.tiles == RETAINED)
    do = gradient_of(call)
    state_only, from_support = both_forms(call, forward, do)
    assert not (state_only.support & ~forward.support).any(), "backward keeps a tile that forward skipped"
    assert_same_gradients(from_support, state_only)
    check_backward(call, forward, do, state_only)
    return forward, state_only

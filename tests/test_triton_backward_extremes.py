# SPDX-License-Identifier: Apache-2.0
"""The backward on what is not ordinary: NaN, strides, rows without keys, huge logits, sinks that take everything, absent tiles."""

from __future__ import annotations

import pytest
import torch
from backward_calls import gradient_of, run_backward, run_forward, unpacked
from calls import NAN, Call, build
from gradients import assert_same_gradients, check_both_forms
from inputs import Case, ids
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned_memory")


DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("form", ["state-only", "saved support"])
@pytest.mark.parametrize("which", ["v", "do"])
def test_nan_reaches_only_the_tiles_that_were_retained(which, form, device):
    """NaN in a key tile's values, or a query tile's do, spoils what retained that tile and not one bit elsewhere."""
    call = build(Case(seqlen_q=120, num_heads=2), torch.float32, device)
    forward, do = run_forward(call), gradient_of(call)
    support = forward.support if form == "saved support" else None
    clean = run_backward(call, forward, do, support)
    kept = unpacked(clean.support, 8)[0]  # (heads, q_tiles, k_tiles)
    tile = 2
    rows = slice(16 * tile, 16 * tile + 16)
    if which == "v":
        v = call.v.clone()
        v[:, rows] = NAN
        spoiled = run_backward(call.with_(v=v), forward, do, support)
        q_tiles, k_tiles = kept[:, :, tile], torch.arange(8, device=device) == tile
    else:
        do = do.clone()
        do[:, rows] = NAN
        spoiled = run_backward(call, forward, do, support)
        q_tiles = (torch.arange(8, device=device) == tile).expand(2, -1)
        k_tiles = kept[:, tile].any(0)
    assert not q_tiles.all(), "the input leaves nothing to protect"
    assert not k_tiles.all(), "the input leaves nothing to protect"
    dq_rows = q_tiles.repeat_interleave(16, 1)[:, :120].T  # (rows, heads)
    keys = k_tiles.repeat_interleave(16)[:120]
    assert torch.equal(spoiled.dq[0][~dq_rows], clean.dq[0][~dq_rows])
    assert spoiled.dq[0][dq_rows].isnan().all()
    assert torch.equal(spoiled.dk[0, ~keys], clean.dk[0, ~keys])
    assert spoiled.dk[0, keys].isnan().all()
    assert torch.equal(spoiled.dv[0, ~keys], clean.dv[0, ~keys])
    assert torch.equal(spoiled.support, clean.support)


def _views(do: Tensor) -> dict[str, Tensor]:
    """The same values in other strides, with NaN in the gaps."""
    wide = do.new_full((*do.shape[:-1], 2 * do.shape[-1]), NAN)
    wide[..., ::2] = do
    rows = do.new_full((do.shape[0], 3 * do.shape[1], *do.shape[2:]), NAN)
    rows[:, ::3] = do
    return {
        "heads first": do.transpose(1, 2).contiguous().transpose(1, 2),
        "last dimension first": do.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        "every other number": wide[..., ::2],
        "every third row": rows[:, ::3],
    }


def test_strides_of_do_are_no_part_of_the_result(device):
    call = build(Case(seqlen_q=50, batch=2), torch.float32, device)
    forward, do = run_forward(call), gradient_of(call)
    expected = run_backward(call, forward, do)
    for how, view in _views(do).items():
        assert not view.is_contiguous(), how
        assert_same_gradients(run_backward(call, forward, view), expected)


def test_one_number_expanded_is_a_gradient(device):
    """What ``out.sum().backward()`` hands over: all strides are zero."""
    call = build(Case(seqlen_q=50, batch=2, sinks="learned"), torch.float32, device)
    forward = run_forward(call)
    do = torch.ones((), device=device).expand_as(forward.out)
    assert_same_gradients(run_backward(call, forward, do), run_backward(call, forward, do.contiguous()))


def _huge_logits(dtype: torch.dtype, device: str) -> Call:
    """Scores of +-1e4."""
    call = build(Case(seqlen_q=50, softmax_scale=1.0, num_heads=2), torch.float32, device)
    q, k = torch.zeros_like(call.q), torch.zeros_like(call.k)
    q[..., 0] = 100.0
    k[..., 0] = torch.where(torch.arange(50, device=device) % 7 < 3, 100.0, -100.0)[None, :, None]
    q[..., 1], k[..., 1] = call.q[..., 1], call.k[..., 1]
    return call.with_(q=q.to(dtype), k=k.to(dtype), v=call.v.to(dtype))


EXTREMES = [
    Case(mask="full", sinks="none"),
    Case(seqlen_q=1, seqlen_k=1, sinks="none"),
    Case(layout="packed", batch=5, sinks="none", seqlen_q=40),
    Case(layout="padded", batch=2, sinks="none", seqlen_q=40),
    Case(seqlen_q=90, seqlen_k=41, sinks="learned"),
]


@pytest.mark.parametrize("case", EXTREMES, ids=ids(EXTREMES))
def test_rows_without_keys_empty_sequences_and_absent_sinks_give_finite_gradients(case, device):
    _, gradients = check_both_forms(build(case, torch.float32, device))
    assert all(gradient.isfinite().all() for gradient in gradients.named().values())
    if case.sinks == "none":
        assert not gradients.dsinks.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_logits_give_finite_gradients(dtype, device):
    _, gradients = check_both_forms(_huge_logits(dtype, device))
    assert all(gradient.isfinite().all() for gradient in gradients.named().values())


def test_a_sink_that_takes_everything_leaves_no_tile_to_the_backward(device):
    call = build(Case(family="flat", seqlen_q=40), torch.float32, device)
    call = call.with_(sinks=torch.full((2,), 60.0, device=device))
    _, gradients = check_both_forms(call)
    assert not gradients.support.any()
    assert not any(x.any() for x in (gradients.dq, gradients.dk, gradients.dv))
    assert gradients.dsinks.all()


@pytest.mark.parametrize("save_support", [False, True])
def test_query_tiles_that_do_not_exist_retain_nothing(save_support, device):
    """Nine query tiles, taken several at once: a NaN key makes the rows beyond them vote."""
    call = build(Case(batch=2, seqlen_q=144, num_heads=1, head_dim=16, tau=40.0), torch.float32, device)
    forward, do = run_forward(call), gradient_of(call)
    support = forward.support if save_support else None
    clean = run_backward(call, forward, do, support)
    k = call.k.clone()
    k[0] = NAN
    spoilt = call.with_(k=k)
    forward = run_forward(spoilt)
    found = run_backward(spoilt, forward, do, forward.support if save_support else None)
    assert torch.equal(found.dq[1], clean.dq[1])
    assert torch.equal(found.dk[1], clean.dk[1])
    assert torch.equal(found.support[1], clean.support[1])
    assert found.support[0].any()

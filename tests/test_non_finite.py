# SPDX-License-Identifier: Apache-2.0
"""NaN and infinities: what full attention makes NaN is NaN here, whether or not its tile would be skipped; nothing else is."""

from __future__ import annotations

import math

import pytest
import torch
from calls import NAN, Call, build
from helpers import RETAINED, SKIPPED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import Case
from torch import Tensor

from mala_hf.ops import mala_attn_func, mala_attn_varlen_func

INF = math.inf
IMPLS = ["reference", "blockwise", "triton"]
LONG = Case(seqlen_q=96, num_heads=4, num_kv_heads=2)
STEP = Case(seqlen_q=2, seqlen_k=300, num_heads=4, num_kv_heads=2)
WAYS = {
    "whole sequences": (LONG, {}),
    "a mask": (LONG.with_(mask="keys", batch=2), {}),
    "a window": (LONG.with_(window=(70, -1)), {}),
    "packed": (LONG.with_(layout="packed", batch=5), {}),
    "two passes": (STEP, {"decode": "two_pass", "num_splits": 3}),
    "split": (STEP, {"decode": "split", "num_splits": 3}),
}


def full_attention(q: Tensor, k: Tensor, v: Tensor, legal: Tensor) -> Tensor:
    """(batch, seqlen_q, heads, dim) in float32; rows whose scores are all -inf see nothing and give zeros."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q * q.shape[-1] ** -0.5 @ k.mT).masked_fill(~legal, -INF)
    sees_nothing = (scores == -INF).all(-1, keepdim=True)
    p = torch.softmax(scores, -1).masked_fill(sees_nothing, 0)
    return (p @ v).transpose(1, 2)


def skipped_key(call: Call, work) -> tuple[int, int, int]:
    """A sequence, KV head and key (counted in the sequence) whose tile some query tile skips in every query head of the KV head."""
    groups = call.q.shape[-2] // call.k.shape[-2]
    skipped = (work.tiles.unflatten(1, (-1, groups)) == SKIPPED).all(2).any(2)  # (sequences, kv_heads, k_tiles)
    assert skipped.any(), "nothing is skipped"
    sequence, kv_head, tile = skipped.nonzero()[-1].tolist()
    return sequence, kv_head, tile * work.tile[1] + 3


@pytest.mark.parametrize("bad", [NAN, INF], ids=["NaN", "inf"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_bad_number_in_one_key_of_a_skipped_tile_shows_in_each_row_that_sees_it(impl, way, bad, device):
    """inf makes scores of +inf or -inf; where it is +inf, full attention is NaN too, else the key just vanishes."""
    case, how = WAYS[way]
    call = build(case, device=device).with_(**how)
    out, work = call.run(impl, return_work=True)
    q, k = call.q, call.k.clone()
    if call.is_packed:
        sequence, kv_head, key = skipped_key(call, work)
        key += int(call.options["cu_seqlens_k"][sequence])
        k[key, kv_head, 1] = bad
        sees = torch.arange(len(q), device=device) >= key
        sees &= torch.arange(len(q), device=device) < call.options["cu_seqlens_q"][sequence + 1]
    else:
        sequence, kv_head, key = skipped_key(call, work)
        k[sequence, key, kv_head, 1] = bad
        position = torch.arange(q.shape[1], device=device) + k.shape[1] - q.shape[1]
        sees = (position >= key) & ((position - key <= case.window[0]) | (case.window[0] < 0))
        if call.options.get("mask") is not None:
            sees &= call.options["mask"][sequence, 0, 0, key]
    assert sees.any()
    found = call.with_(k=k).run(impl)
    if not call.is_packed:
        found, out, q = found[sequence], out[sequence], q[sequence]
    groups = q.shape[1] // k.shape[-2]
    for head in range(q.shape[1]):
        expected = sees.clone()
        if head // groups != kv_head:
            expected[:] = False
        elif bad == INF:
            expected &= q[:, head, 1] > 0  # elsewhere the score is -inf
        assert torch.equal(found[:, head].isnan().all(-1), expected), f"head {head}"
        assert torch.equal(found[:, head].isnan().any(-1), expected), f"head {head}"
    untouched = [head for head in range(q.shape[1]) if head // groups != kv_head]
    assert torch.equal(found[:, untouched], out[:, untouched])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("way", ["whole sequences", "two passes", "split"])
def test_tiles_with_nan_are_reported_as_retained(way, impl, device):
    case, how = WAYS[way]
    call = build(case, device=device).with_(**how)
    q = call.q.clone()
    q[:] = NAN
    work = call.with_(q=q).run(impl, return_work=True)[1]
    assert (work.tiles == RETAINED).any()
    assert not (work.tiles == SKIPPED).any()
    assert torch.equal(work.tiles == 0, call.run(impl, return_work=True)[1].tiles == 0)


@pytest.mark.parametrize("save_support", [False, True])
@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_gradients_of_rows_with_nan_are_nan_and_others_are_not(impl, save_support, device):
    call = build(LONG.with_(batch=2), device=device)
    _, work = call.run(impl, return_work=True)
    sequence, kv_head, key = skipped_key(call, work)
    k = call.k.clone()
    k[sequence, key, kv_head, 1] = NAN
    leaves = [x.detach().requires_grad_() for x in (call.q, k, call.v)]
    out = call.with_(**dict(zip("qkv", leaves, strict=True))).run(impl, save_support=save_support)
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    heads = slice(2 * kv_head, 2 * kv_head + 2)
    assert dq[sequence, key:, heads].isnan().all()
    assert dk[sequence, key, kv_head].isnan().all()
    assert dv[sequence, key, kv_head].isnan().all()
    for x in (dq, dk, dv):
        assert x[1 - sequence].isfinite().all()


def test_discovery_in_int8_gives_the_bits_of_the_fused_search_with_nan_too(device):
    call = build(Case(seqlen_q=300, num_heads=2, num_kv_heads=1, tile=(32, 32)), torch.float16, device)
    _, work = call.run("triton", return_work=True)
    _, _, key = skipped_key(call, work)
    for bad in (NAN, INF, -INF):
        k = call.k.clone()
        k[:, key, :, 1] = bad
        fused, int8 = (call.with_(k=k).run("triton", discovery=discovery) for discovery in ("fused", "int8"))
        assert fused.isnan().any()
        torch.testing.assert_close(int8, fused, rtol=0, atol=0, equal_nan=True)


@st.composite
def spoilt_calls(draw) -> tuple[Tensor, Tensor, Tensor, bool, float]:
    """Small q, k, v with some numbers that are none."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    rows, more = draw(st.integers(1, 40)), draw(st.integers(0, 30))
    q, k, v = (
        draw(st.sampled_from([1.0, 5.0])) * torch.randn(1, n, h, 16, generator=generator)
        for n, h in ((rows, 2), (rows + more, 1), (rows + more, 1))
    )
    for x in (q, k):
        for _ in range(draw(st.integers(0, 2))):
            bad = draw(st.sampled_from([NAN, INF, -INF, 1e30, -1e30]))
            x[0, draw(st.integers(0, x.shape[1] - 1)), :, draw(st.integers(0, 15))] = bad
    return q, k, v, draw(st.booleans()), draw(st.sampled_from([0.0, 1.0, 30.0]))


def check_spoilt(call, impl: str, form: str) -> None:
    q, k, v, causal, tau = call
    distance = torch.arange(k.shape[1]) - (torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1])
    legal = (distance <= 0) | (not causal)
    expected = full_attention(q, k, v, legal)
    out = mala_attn_func(q, k, v, causal=causal, tau=tau, tile=(16, 16), impl=impl, decode=form)
    assert torch.equal(out.isnan(), expected.isnan())
    assert out[~expected.isnan()].isfinite().all()
    # where several keys have scores of 1e30, what tells them apart is rounding
    if tau == 0 and (k.abs() == 1e30).any(-1).sum() < 2:
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("form", ["single", "two_pass", "split"])
@pytest.mark.parametrize(("impl", "cases"), [("reference", 150), ("blockwise", 200), ("triton", 8)])
def test_rows_are_nan_exactly_where_full_attentions_are(impl, cases, form):
    options = settings(
        max_examples=cases, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    if torch.cuda.is_available() and impl == "triton":
        pytest.skip("tensors on the CPU: the interpreter's test")
    options(given(spoilt_calls())(lambda call: check_spoilt(call, impl, form)))()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_nan_value_shows_where_its_tile_is_retained_and_spares_tiles_that_do_not_hold_it(impl, device):
    """The blockwise form multiplies values of skipped tiles by zero, which keeps the NaN, as full attention does."""
    call = build(LONG, device=device)
    clean, work = call.run(impl, return_work=True)
    v = call.v.clone()
    v[0, 40, 0] = NAN
    found = call.with_(v=v).run(impl)
    retained = (work.tiles[0, :2, :, 40 // 16] == RETAINED).repeat_interleave(16, 1)  # (heads, rows)
    sees = torch.arange(96, device=device) >= 40
    assert found[0, :, :2].isnan().all(-1)[(retained & sees).T].all()
    assert torch.equal(found[0, :32], clean[0, :32])  # query tiles before the key
    assert torch.equal(found[0, :, 2:], clean[0, :, 2:])
    if impl == "triton":
        skipped = ~retained.T
        assert torch.equal(found[0, :, :2][skipped], clean[0, :, :2][skipped])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_gradient_that_is_nan_on_rows_of_a_sequence_without_keys_reaches_no_sink(impl, device):
    q, k, v = (torch.randn(n, 2, 16, device=device, requires_grad=True) for n in (40, 20, 20))
    sinks = torch.tensor([0.5, -1.0], device=device, requires_grad=True)
    boundaries = {"cu_seqlens_q": [0, 20, 40], "cu_seqlens_k": [0, 0, 20]}
    options = {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in boundaries.items()}
    out = mala_attn_varlen_func(q, k, v, sinks=sinks, tile=(16, 16), impl=impl, **options)
    do = torch.ones_like(out)
    do[:20] = NAN
    for x in torch.autograd.grad(out, (q, k, v, sinks), do):
        assert x.isfinite().all()

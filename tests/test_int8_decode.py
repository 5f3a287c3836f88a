# SPDX-License-Identifier: Apache-2.0
"""Decode in two passes from an INT8 plane of the keys: the definition's tiles and values, its guarantee, and what it does not read."""

from __future__ import annotations

import dataclasses
import math

import hypothesis
import pytest
import torch
from calls import NAN, Call, build
from decode_truth import DECODE, SPLITS, assert_decode, at_lowered_limits, reference
from helpers import RETAINED, SKIPPED
from hypothesis import strategies as st
from inputs import FAMILIES, Case, ids

from mala_hf.ops import KeyPlane, mala_attn_func, quantize_keys
from mala_hf.ops.reference import legal_pairs

FORM = "int8_two_pass"
IMPLS = ["blockwise", "triton"]
CASES = [
    *(DECODE.with_(num_heads=group, num_kv_heads=1) for group in (1, 2, 4, 5, 7, 8)),
    DECODE.with_(num_heads=6, num_kv_heads=2, batch=2, seqlen_q=5),
    DECODE.with_(seqlen_q=40, num_heads=5, num_kv_heads=1),  # tiles of 12 tokens
    DECODE.with_(seqlen_q=5, window=(40, 9), causal=False),
    DECODE.with_(softcap=20.0, seqlen_q=2),
    DECODE.with_(sinks="learned", softcap=30.0, window=(150, -1), seqlen_q=6),
    DECODE.with_(sinks="none", seqlen_q=3),
    DECODE.with_(layout="cache", batch=3, seqlen_q=4, sinks="learned", window=(60, -1)),
    DECODE.with_(layout="padded", batch=3, seqlen_q=12),
    DECODE.with_(head_dim=40, v_head_dim=72),
    DECODE.with_(head_dim=128, seqlen_k=200, strided=True, batch=2),
    DECODE.with_(tau=30.0, seqlen_q=3),
    *(DECODE.with_(family=family, seqlen_q=2) for family in FAMILIES if family != "peaked"),
]


def with_plane(call: Call, **more) -> Call:
    """The call with a plane of its keys; NaN lies where no sequence has a key."""
    return call.with_(key_plane=quantize_keys(call.k, impl="blockwise"), **more)


def run(call: Call, impl: str, **more):
    return call.run(impl, **{"decode": FORM, "num_splits": SPLITS, "return_lse": True, "return_work": True} | more)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_every_case_gives_the_definitions_tiles_and_values(case, impl, device):
    call = with_plane(build(case, device=device))
    answer = run(call, impl)
    skipped = assert_decode(call, FORM, *answer)
    plain, lse = run(call, impl, return_work=False)
    assert torch.equal(plain, answer[0]), "reporting the work changed the result"
    assert torch.equal(lse, answer[1])
    if case.family == "peaked" and case.tau == 1 and case.window[0] < 0 and case.seqlen_q < 6:
        assert skipped, f"{case.id} skips nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_every_case_gives_the_definitions_tiles_and_values_in_16_bit(case, dtype, device):
    call = with_plane(build(case, dtype, device=device))
    assert_decode(call, FORM, *run(call, "triton"))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_tile_within_the_slack_of_its_limit_is_retained_and_one_beyond_it_is_not(impl, device):
    """In float16 two tiles lie 0.00011 and 0.00007 nats below their limits; with twice the slack more, both are skipped."""
    call = with_plane(build(DECODE.with_(family="near_threshold", seqlen_q=2), torch.float16, device))
    _, lse, tiles, _ = reference(call, FORM)
    skipped = tiles == SKIPPED
    assert skipped[:, ::2].sum() == 2  # of each KV head one
    found = run(call, impl)
    assert (found[2].tiles[skipped] == RETAINED).all()
    assert assert_decode(call, FORM, *found) == 0
    slack = call.options["tau"] / at_lowered_limits(call, lse).options["tau"]
    beyond = call.with_(tau=call.options["tau"] * slack**2)
    found = run(beyond, impl)
    assert (found[2].tiles[skipped] == SKIPPED).all()
    assert assert_decode(beyond, FORM, *found) == 4
    wrong = dataclasses.replace(found[2], tiles=torch.where(skipped, RETAINED, found[2].tiles))
    with pytest.raises(AssertionError, match=call.case.id):
        assert_decode(beyond, FORM, *found[:2], wrong)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
def test_exact_keys_and_values_of_skipped_tiles_are_never_read(group, impl, device):
    call = with_plane(build(DECODE.with_(num_heads=group, num_kv_heads=1, seqlen_k=300), device=device))
    out, _, work = run(call, impl)
    retained = (work.tiles[0] == RETAINED).any(0).any(0).repeat_interleave(16)[:300]
    assert retained.any()
    assert not retained.all()
    poisoned = {
        name: torch.where(retained.to(call.k.device)[:, None, None], getattr(call, name), NAN) for name in ("k", "v")
    }
    assert torch.equal(run(call.with_(**poisoned), impl)[0], out)


def assert_guarantee(call: Call, impl: str) -> int:
    """Every skipped key has less than tau / L_q of what is retained, exactly, in float64; returns how many there are.

    And the certificate is no less than what was left out.
    """
    _, lse, work = run(call, impl)
    group = call.q.shape[2] // call.k.shape[2]
    scale, tau, softcap = call.q.shape[-1] ** -0.5, call.options["tau"], call.options["softcap"]
    legal = legal_pairs(call.q.shape[1], call.k.shape[1], (-1, 0))
    share = (tau / legal.sum(1)).clamp(max=1).log()[:, None]
    count = 0
    for b in range(call.q.shape[0]):
        for head in range(call.q.shape[2]):
            scores = call.q[b, :, head].double() @ call.k[b, :, head // group].double().T * scale
            scores = softcap * (scores / softcap).tanh() if softcap else scores
            scores = scores.cpu().masked_fill(~legal, -math.inf)
            tokens = work.tile[0]
            kept = (work.tiles[b, head].cpu() == RETAINED).repeat_interleave(tokens, 0)[: len(scores)]
            kept = kept.repeat_interleave(work.tile[1], 1)[:, : scores.shape[1]]
            mass = scores.masked_fill(~kept, -math.inf).logsumexp(1, keepdim=True)
            assert mass.isfinite().all(), "a row has lost its largest key"
            left = (~kept & legal).nonzero()
            bound = (mass + share).expand_as(scores)[tuple(left.T)]
            assert (scores[tuple(left.T)] < bound).all()
            count += len(left)
            # of lse in float32, of which the certificate is a fraction
            precision = 1e-5 * (1 + mass.abs().max())
            assert ((lse[b, head].double().cpu() - mass[:, 0]).abs() <= precision).all()
            omitted = (scores.masked_fill(kept, -math.inf) - mass).exp().sum(1)
            assert (work.certificate[b, head].double().cpu() >= omitted * (1 - precision) - 1e-30).all()
    return count


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_is_skipped_is_below_its_share_of_what_is_retained(family, dtype, impl, device):
    call = with_plane(build(DECODE.with_(family=family, seqlen_q=2, batch=2), dtype, device=device))
    assert assert_guarantee(call, impl) or family not in ("peaked", "huge_norms")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_skipped_is_below_its_share_of_what_is_retained_in_16_bit(family, dtype, device):
    case = DECODE.with_(family=family, seqlen_k=1500, head_dim=64, batch=2, tile=(64, 64))
    call = with_plane(build(case, dtype, device=device))
    assert assert_guarantee(call, "triton") or family not in ("peaked", "huge_norms")


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 2**20),
    spread=st.sampled_from([0.0, 0.3, 1.0, 4.0, 30.0]),
    outlier=st.sampled_from([0.0, 10.0, 300.0]),
    at_threshold=st.booleans(),
    tau=st.sampled_from([0.25, 1.0, 5.0]),
    softcap=st.sampled_from([0.0, 3.0]),
)
def test_the_guarantee_holds_on_adversarial_keys(seed, spread, outlier, at_threshold, tau, softcap):
    """Outlier channels, keys equal or huge, and scores that lie at the threshold."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, heads, 16, generator=generator) for n, heads in ((1, 2), (96, 1), (96, 1)))
    k = spread * k
    k[..., 3] += outlier
    if at_threshold:  # one large key, and the rest within rounding of tau / L_q of it
        q[..., 1:], k[..., 0] = 0, 0.0
        q[..., 0] = 4.0
        k[0, 40, 0, 0] = 9.0
        near = 9.0 + math.log(tau / 96)
        k[0, :32, 0, 0] = near + 0.05 * torch.randn(32, generator=generator)
    options = {"tau": tau, "causal": True, "window": (-1, -1), "softcap": softcap, "tile": (1, 8)}
    call = Call(Case(), q, k, v, options)
    assert_guarantee(with_plane(call), "blockwise")


@pytest.mark.parametrize("impl", IMPLS)
def test_scores_at_the_threshold_and_far_above_what_is_known_are_attended(impl, device):
    """Residuals of thousands: nothing is known of the normalizer, and the exact scores are hundreds of nats above its bound."""
    call = build(DECODE.with_(family="huge_norms"), device=device)
    k = call.k.clone()
    k[..., 0] = 3e4
    call = with_plane(call.with_(k=k))
    out, lse, work = run(call, impl)
    exact, exact_lse = call.with_(key_plane=None).run("blockwise", decode="two_pass", tau=0.0, return_lse=True)
    assert work.retained.all() or work.tiles.eq(SKIPPED).any()
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-2)
    assert out.isfinite().all()
    assert (out - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("impl", IMPLS)
def test_where_both_retain_all_a_plane_changes_nothing(impl, device):
    call = with_plane(build(DECODE.with_(family="equal_scores", seqlen_q=3), device=device))
    out, lse, work = run(call, impl)
    assert work.retained.all()
    exact, exact_lse = call.with_(key_plane=None).run(impl, decode="two_pass", num_splits=SPLITS, return_lse=True)
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
def test_the_splits_do_not_matter(impl, device):
    call = with_plane(build(DECODE.with_(num_heads=2, num_kv_heads=1, layout="cache", batch=2), device=device))
    results = [run(call, impl, num_splits=splits) for splits in (1, 3, 20)]
    for out, lse, work in results[1:]:
        assert torch.equal(work.tiles, results[0][2].tiles)
        torch.testing.assert_close(out, results[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, results[0][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
@pytest.mark.parametrize("value", [NAN, math.inf])
def test_a_key_that_the_plane_does_not_cover_is_always_read(value, impl, device):
    """As exact attention does: its row has no number then. Other KV heads have theirs."""
    call = build(DECODE, device=device)
    k = call.k.clone()
    k[0, 3, 0, 0] = value
    call = with_plane(call.with_(k=k))
    out, _, work = run(call, impl)
    assert work.retained[0, :2, 0, 0].all()
    assert out[0, 0, :2].isnan().any(-1).any() or value == math.inf
    assert out[0, 0, 2:].isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_nan_of_a_query_is_not_lost(impl, device):
    call = build(DECODE.with_(seqlen_q=2), device=device)
    q = call.q.clone()
    q[0, 0, 1, 5] = NAN
    out = run(with_plane(call.with_(q=q)), impl)[0]
    assert out[0, 0, 1].isnan().all()
    assert out[0, 1].isfinite().all()


def test_auto_reads_a_plane_where_two_passes_cover_the_call_and_something_may_be_skipped():
    q, k = torch.randn(1, 1, 4, 32), torch.randn(1, 70, 2, 32)

    def form(q=q, **options) -> str:
        return mala_attn_func(q, k, k, causal=True, key_plane=quantize_keys(k), return_work=True, **options)[1].form

    assert form() == FORM
    assert form(tau=0.0) == "two_pass"
    assert form(mask=torch.ones(1, 70, dtype=torch.bool)) == "single"
    assert form(torch.randn(1, 1, 4, 32, requires_grad=True)) == "single"
    assert form(torch.randn(1, 70, 4, 32)) == "single"


def test_a_plane_may_be_a_part_of_a_larger_one(device):
    call = build(DECODE, device=device)
    large = KeyPlane.empty(1, 2, 300, 64, device)
    quantize_keys(call.k, large, impl="blockwise")
    expected = run(with_plane(call), "triton")[0]
    assert torch.equal(run(call.with_(key_plane=large.first(210)), "triton")[0], expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_context_without_keys_gives_zeros(impl, device):
    call = with_plane(build(DECODE.with_(seqlen_q=2, seqlen_k=0, causal=False, sinks="learned"), device=device))
    out, lse, _ = run(call, impl)
    assert not out.any()
    assert torch.equal(lse, call.options["sinks"][None, :, None].expand_as(lse))


@pytest.mark.gpu
def test_a_growing_cache_compiles_nothing_new(device):
    from mala_hf.ops import decode, key_plane_kernel

    kernels = (decode.score_plane_kernel, decode.attend_retained_kernel, key_plane_kernel.write_plane_kernel)

    def compiled() -> int:
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    def step(keys: int) -> None:
        q, k = (torch.randn(1, n, 4, 64, dtype=torch.bfloat16, device=device) for n in (1, keys))
        plane = quantize_keys(k)
        quantize_keys(k[:, :1], plane, keys - 1)
        mala_attn_func(q, k, k, causal=True, key_plane=plane, decode=FORM)

    step(1000)
    before = compiled()
    for keys in (20, 128, 1001, 4096, 70001):
        step(keys)
    assert compiled() == before

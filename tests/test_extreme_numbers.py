# SPDX-License-Identifier: Apache-2.0
"""Numbers at the ends of their types: overflow in bfloat16, denormals, equal scores, very long even rows, channels that stand out."""

from __future__ import annotations

import math

import pytest
import torch
from calls import build
from helpers import RETAINED, check_forward
from inputs import Case
from torch import Tensor

from mala_hf.ops import mala_attn_func

IMPLS = ["reference", "blockwise", "triton"]
FORMS = ["single", "two_pass", "split"]
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def randn(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal full attention in float32 at least, one KV head to a query head; the last row sees all keys."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (
        q.to(torch.promote_types(q.dtype, torch.float32))
        * q.shape[-1] ** -0.5
        @ k.to(torch.promote_types(k.dtype, torch.float32)).mT
    )
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[2] - q.shape[2])
    return (torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v.to(scores.dtype)).transpose(1, 2)


@pytest.mark.parametrize(
    "impl", ["reference", "blockwise", pytest.param("triton", marks=pytest.mark.gpu)]
)  # the interpreter multiplies no bfloat16
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e4, 1e12, 1e18, 3e19, 1e30])
def test_bfloat16_products_that_overflow_float32_give_what_full_attention_gives(size, form, impl, device):
    """Up to 1e18 scores are finite and attention is one-hot; beyond, some are infinite and their rows NaN."""
    q, k, v = (x.to(device) for x in (randn(1, 20, 2, 32), randn(1, 60, 2, 32, seed=1), randn(1, 60, 2, 32, seed=2)))
    q, k, v = (size * q).bfloat16(), (size * k).bfloat16(), v.bfloat16()
    out = mala_attn_func(q, k, v, causal=True, impl=impl, decode=form, tile=(16, 16))
    expected = softmax_attention(q, k, v)
    assert torch.equal(out.isnan(), expected.isnan())
    assert expected.isnan().any() == (size > 1e19)
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("impl", IMPLS)
def test_denormal_inputs_attend_evenly_and_are_no_error(impl, form, device):
    q, k, v = (x.to(device) for x in (randn(1, 3, 2, 16), randn(1, 70, 2, 16, seed=1), randn(1, 70, 2, 16, seed=2)))
    small = 1e-40
    out, lse = mala_attn_func(
        small * q, small * k, v, causal=True, impl=impl, decode=form, tile=(16, 16), return_lse=True
    )
    visible = torch.arange(68, 71, device=device)
    torch.testing.assert_close(lse, visible.log()[None, None].expand_as(lse))
    torch.testing.assert_close(out, softmax_attention(0 * q, k, v), rtol=1e-5, atol=1e-6)
    tiny = mala_attn_func(q, k, small * v, causal=True, impl=impl, decode=form, tile=(16, 16))
    assert (tiny - softmax_attention(q, k, v) * small).abs().max() <= SMALLEST_NORMAL  # may be flushed to zero


@pytest.mark.parametrize("tau", [0.5, 1.0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("impl", "score"),
    [*((impl, score) for impl in IMPLS for score in (0.0, -300.0, 300.0)), ("triton", 1e6), ("triton", -1e6)],
)
def test_equal_scores_of_any_size_retain_everything(score, impl, form, tau, device):
    """Their exponentials, taken as they are, would under- or overflow. The kernels divide by a sum; the others subtract a float32
    lse, whose own rounding (3e-5 at 300) shows in the values.
    """
    q, k = torch.ones(1, 2, 1, 16, device=device), torch.full((1, 90, 1, 16), score / 16, device=device)
    v = randn(1, 90, 1, 16).to(device)
    out, lse, work = mala_attn_func(
        q, k, v, causal=True, tau=tau, softmax_scale=1.0, impl=impl, decode=form, tile=(16, 16), return_lse=True,
        return_work=True,
    )  # fmt: skip
    assert (work.tiles[work.tiles != 0] == RETAINED).all()
    torch.testing.assert_close(out, softmax_attention(0 * q, k, v), rtol=1e-5 if impl == "triton" else 1e-4, atol=1e-5)
    expected = score + torch.tensor([89.0, 90.0], device=device).log()
    torch.testing.assert_close(lse[0, 0], expected, rtol=1e-6, atol=1e-5)


LONG_ROWS = [("blockwise", 300_000), pytest.param("triton", 3_000_000, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("impl", "length"), LONG_ROWS)
def test_a_very_long_even_row_is_retained_whole_and_summed_without_drift(impl, length, form, device):
    q, k = torch.zeros(1, 1, 1, 16, device=device), randn(1, length, 1, 16).to(device)
    v = torch.ones(1, length, 1, 16, device=device)
    v[:, ::2] = 3.0
    out, lse, work = mala_attn_func(q, k, v, causal=True, impl=impl, decode=form, return_lse=True, return_work=True)
    assert (work.tiles == RETAINED).all()
    plain = softmax_attention(q, k, v)  # on a CPU its long sums in float32 drift themselves
    assert (out - 2).abs().max() <= 2 * (plain - 2).abs().max() + 2e-5
    assert float(lse) == pytest.approx(math.log(length), abs=2e-5)


@pytest.mark.parametrize("scale", [10.0, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_channels_that_stand_out_a_thousandfold_change_no_decision(scale, dtype, device):
    """A channel of the keys with a large mean moves all scores of a row alike; the rule sees differences alone."""
    call = build(Case(seqlen_q=96, num_heads=2, num_kv_heads=1), dtype, device)
    q, k = call.q.clone(), call.k.clone()
    q[..., -1], k[..., -1] = 0.5, scale
    moved = call.with_(q=q, k=k)
    for impl in ("blockwise", "triton"):
        out, lse, work = moved.run(impl, return_lse=True, return_work=True)
        skipped = check_forward(moved, out, lse, work)
        assert skipped

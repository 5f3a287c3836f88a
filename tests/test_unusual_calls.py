# SPDX-License-Identifier: Apache-2.0
"""Unusual calls: NaN stays where it went in, and windows, masks and autocast change nothing that they should not."""

from __future__ import annotations

import math

import pytest
import torch

from mala_hf.ops import mala_attn_func


def _tensor(*shape: int, **options) -> torch.Tensor:
    return torch.randn(*shape, **options)


GOOD = {"q": (2, 5, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 16)}


@pytest.mark.parametrize("impl", ["blockwise", "reference"])
def test_nan_in_a_query_shows_in_its_row_only(impl):
    q, k, v = (_tensor(1, 40, 1, 16) for _ in range(3))
    clean = mala_attn_func(q, k, v, causal=True, impl=impl, tile=(1, 16))
    q[0, 20] = math.nan
    out = mala_attn_func(q, k, v, causal=True, impl=impl, tile=(1, 16))
    assert out[0, 20].isnan().all()
    others = torch.arange(40) != 20
    assert torch.equal(out[0, others], clean[0, others])


def test_a_window_wider_than_any_sequence_is_no_window():
    q, k, v = (_tensor(*shape) for shape in GOOD.values())
    expected = mala_attn_func(q, k, v)
    for side in (7, 2**31, 2**63 - 1, 2**70):
        assert torch.equal(mala_attn_func(q, k, v, window=(side, side)), expected)


def test_the_work_of_full_attention_is_all_of_it_even_where_hardly_a_row_sees_a_key():
    q, k, v = _tensor(1, 640, 4, 16), _tensor(1, 70, 4, 16), _tensor(1, 70, 4, 16)
    mask = torch.zeros(640, 70, dtype=torch.bool)
    mask[-1, 0] = True
    _, work = mala_attn_func(q, k, v, mask=mask, tau=0.0, tile=(16, 16), return_work=True)
    assert torch.equal(work.work_fraction, torch.ones(1, 4))


def test_autocast_changes_neither_outputs_nor_gradients():
    q, k, v = (_tensor(1, 64, 2, 16, requires_grad=True) for _ in range(3))
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = mala_attn_func(q, k, v, causal=True)
            results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(torch.equal(plain, under) for plain, under in zip(*results, strict=True))


@pytest.mark.parametrize("impl", ["blockwise", "reference"])
def test_a_nan_comes_out_where_it_went_in(impl):
    q, k, v = _tensor(1, 40, 2, 16), _tensor(1, 40, 2, 16), _tensor(1, 40, 2, 16)
    options = {"causal": True, "tile": (16, 16), "impl": impl}
    out = mala_attn_func(q, k, v, sinks=torch.tensor([math.nan, 0.0]), **options)
    assert out[:, :, 0].isnan().all()
    assert not out[:, :, 1].isnan().any()
    spoilt = k.clone()
    spoilt[:, 5, 0] = math.nan
    leaves = [x.detach().requires_grad_() for x in (q, spoilt, v)]
    out = mala_attn_func(*leaves, **options)
    assert out[:, 5:, 0].isnan().all()
    assert not out[:, :5].isnan().any()
    assert not out[:, :, 1].isnan().any()
    dv = torch.autograd.grad(out[:, :, 0].sum(), leaves[2])[0]
    assert dv[:, :16, 0].isnan().all()  # whatever shares a tile with it

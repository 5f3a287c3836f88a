# SPDX-License-Identifier: Apache-2.0
"""Dense calls go to cuDNN only once their shape has earned the plan that it builds."""

from __future__ import annotations

import pytest
import torch

from mala_hf import flash_attn_4
from mala_hf.ops import attend, cudnn_plans, dense, mala_attn_func, program_order
from mala_hf.ops.cudnn_plans import PLAN_SECONDS, SAVED_A_CALL, PlanAccounts
from mala_hf.ops.query_tile import Settings


def tensors(length: int, **options) -> list[torch.Tensor]:
    return [torch.empty(1, length, heads, 8, **options) for heads in (2, 1, 1)]


def calls_until_a_plan(plans: PlanAccounts, x: list[torch.Tensor], limit: int = 100_000) -> int:
    return next(count for count in range(1, limit) if plans.has_plan(*x, True))


def test_a_shape_earns_its_plan_by_its_own_calls():
    plans = PlanAccounts()
    needed = calls_until_a_plan(plans, tensors(4))
    assert needed == pytest.approx(PLAN_SECONDS / SAVED_A_CALL, rel=0.01)
    assert plans.has_plan(*tensors(4), True)
    assert not plans.has_plan(*tensors(5), True)
    assert not plans.has_plan(*tensors(4), False)


def test_lengths_that_never_come_back_never_earn_one():
    plans = PlanAccounts()
    assert not any(plans.has_plan(*tensors(length), True) for length in range(1, 3000))
    assert len(plans._earned) == cudnn_plans.MAX_SHAPES


def test_long_calls_earn_sooner():
    short, long = (calls_until_a_plan(PlanAccounts(), tensors(length)) for length in (4, 400_000))
    assert long < short / 20


def test_a_call_whose_gradient_is_taken_stays_where_its_recomputation_will_be():
    plans = PlanAccounts()
    calls_until_a_plan(plans, tensors(4))
    assert not plans.has_plan(*tensors(4, requires_grad=True), True)
    with torch.no_grad():
        assert plans.has_plan(*tensors(4, requires_grad=True), True)


def test_a_cuda_graph_under_capture_earns_nothing(monkeypatch):
    plans = PlanAccounts()
    monkeypatch.setattr(cudnn_plans, "PLAN_SECONDS", 3 * SAVED_A_CALL)
    monkeypatch.setattr(cudnn_plans, "is_capturing", lambda: True)
    assert not any(plans.has_plan(*tensors(4), True) for _ in range(10))
    monkeypatch.undo()
    monkeypatch.setattr(cudnn_plans, "PLAN_SECONDS", 3 * SAVED_A_CALL)
    assert [plans.has_plan(*tensors(4), True) for _ in range(3)] == [False, False, True]


def test_malas_own_kernel_computes_what_has_no_plan(monkeypatch):
    """With every tile retained, whatever tau asks for, and the report says by whom."""
    monkeypatch.setattr(attend, "choose", lambda *_: [attend.Choice("dense", "flat")])
    monkeypatch.setattr(attend, "affordable_backend", lambda *_: attend.OWN)
    q, k, v = (30 * torch.randn(1, 200, heads, 16) for heads in (2, 1, 1))
    call = {"causal": True, "tau": 1.0, "return_work": True, "tile": (16, 16)}
    monkeypatch.setattr("mala_hf.ops.interface.may_be_dense", lambda *_: True)
    out, work = mala_attn_func(q, k, v, **call)
    monkeypatch.undo()
    assert work.choices == (attend.Choice("dense", "flat; by MALA's own kernel with tau = 0"),)
    assert work.work_fraction.eq(1).all()
    assert mala_attn_func(q, k, v, **call)[1].work_fraction.lt(1).all()
    torch.testing.assert_close(out, mala_attn_func(q, k, v, causal=True, tau=0.0))


@pytest.mark.gpu
def test_on_a_gpu_a_shape_comes_to_cudnn_in_the_end(monkeypatch):
    monkeypatch.setattr(cudnn_plans, "plans", PlanAccounts())
    monkeypatch.setattr("mala_hf.ops.dense.plans", cudnn_plans.plans)
    monkeypatch.setattr(flash_attn_4.kernel, "is_used", False)
    q, k, v = (torch.randn(1, 1000, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (16, 8, 8))
    reasons = []
    for _ in range(int(PLAN_SECONDS / SAVED_A_CALL) + 1):
        out, work = mala_attn_func(q, k, v, causal=True, return_work=True)
        reasons.append(work.choices[0].reason)
        if reasons[-1].endswith("by cuDNN"):
            break
    assert reasons[0] != reasons[-1]
    own = mala_attn_func(q, k, v, causal=True, tau=0.0, discovery="fused")
    assert (out - own).norm() / own.norm() < 0.01


@pytest.mark.parametrize(
    ("head_dim", "length", "causal", "major", "expected"),
    [
        (128, 2048, True, 9, dense.OWN),
        (128, 2047, True, 9, "cudnn"),
        (128, 2048, False, 9, "cudnn"),
        (64, 8192, True, 9, dense.OWN),
        (64, 8191, True, 9, "cudnn"),
        (128, 2048, True, 8, "cudnn"),
    ],
)
def test_where_malas_own_loop_leads_no_plan_is_made(head_dim, length, causal, major, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, 0))
    monkeypatch.setattr(PlanAccounts, "has_plan", lambda *_: True)
    x = [torch.empty(1, length, 1, head_dim, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    settings = Settings(1.0, 1.0, (-1, 0 if causal else -1), 0.0, (64, 128))
    assert dense.affordable_backend("cudnn", *x, settings) == expected
    assert dense.affordable_backend("flash", *x, settings) == "flash"


@pytest.mark.parametrize(("heads", "expected"), [(12, "cudnn"), (13, dense.OWN)])
def test_at_head_dim_64_malas_loop_leads_with_as_many_programs_as_take_three_query_tiles(heads, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(PlanAccounts, "has_plan", lambda *_: True)
    monkeypatch.setattr(program_order, "multiprocessors", lambda device: 132)
    x = [torch.empty(1, 8192, heads, 64, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    assert dense.affordable_backend("cudnn", *x, Settings(1.0, 1.0, (-1, 0), 0.0, (64, 128))) == expected

# SPDX-License-Identifier: Apache-2.0
"""Dense calls run by FlashAttention-4 where it was measured; on a CPU a package of the same interface stands in."""

from __future__ import annotations

import warnings

import pytest
import torch
from fake_flash_attn_4 import NAME, assert_full_attention, attend, inputs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mala_hf import flash_attn_4
from mala_hf.ops import mala_attn_func
from mala_hf.ops.choice_memory import asked_by

pytest_plugins = ["fake_flash_attn_4"]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_dense_call_without_a_gradient_runs_by_it(head_dim, dtype, mode, installed):
    x = inputs(head_dim=head_dim, dtype=dtype)
    with mode():
        out, lse, work = attend(x, softmax_scale=0.2)
    assert installed() == 1
    assert (work.choice, work.impl, work.support_bytes) == ("dense", "flash_attn_4", 0)
    assert work.reason.endswith(f"; {NAME}")
    assert (work.work_fraction == 1).all()
    assert not work.certificate.any()
    assert_full_attention(out, lse, x, softmax_scale=0.2)


def test_autocast_does_not_reach_it(installed):
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(inputs())[2].reason.endswith(NAME)
    assert installed() == 1


def test_a_gradient_keeps_it_away_and_no_grad_brings_it_back(installed):
    x = [leaf.requires_grad_() for leaf in inputs()]
    out, _, work = attend(x)
    assert NAME not in work.reason
    out.sum().backward()
    assert x[0].grad is not None
    with torch.no_grad():
        assert attend(x)[2].reason.endswith(NAME)
    assert installed() == 1


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (inputs(head_dim=32), {}),
        (inputs(dtype=torch.float32), {}),
        (inputs(), {"causal": False}),
        (inputs(), {"discovery": "dense"}),
        (inputs(), {"discovery": "fused"}),
        (inputs(), {"deterministic": True}),
        (inputs(length=1), {}),
        ([x[..., 4:] for x in inputs(head_dim=68)], {}),
        ([inputs()[0], *(x[:1].expand(2, -1, -1, -1) for x in inputs()[1:])], {}),
    ],
    ids=["head_dim", "float32", "not causal", "torch's", "fused", "deterministic", "one query", "address", "stride 0"],
)
def test_other_calls_stay_as_they_are(x, options, installed):
    _, _, work = attend(x, **options)
    assert installed() == 0
    assert NAME not in work.reason


def test_a_step_over_a_short_cache_stays_as_it_is(installed):
    q, k, v = inputs()
    assert NAME not in attend([q[:, -1:], k, v])[2].reason
    assert NAME not in attend([q[:, -5:], k, v])[2].reason
    assert installed() == 0


def test_a_compiler_does_not_meet_it(installed):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: mala_attn_func(*x, causal=True), fullgraph=True, backend="eager", dynamic=False)
    with torch.no_grad():
        compiled(*inputs())
    torch._dynamo.reset()
    assert installed() == 0


def test_other_gpus_stay_as_they_are(installed, monkeypatch):
    monkeypatch.setattr(flash_attn_4, "is_measured", lambda device: False)
    assert NAME not in attend(inputs())[2].reason
    assert installed() == 0


def test_a_cuda_graph_records_it_only_for_a_call_that_has_run(installed, monkeypatch):
    def captured(x: list[Tensor], **options) -> bool:
        with monkeypatch.context() as during:
            during.setattr(flash_attn_4, "is_capturing", lambda: True)
            return NAME in attend(x, **options)[2].reason

    assert not captured(inputs())
    assert installed() == 0  # nor was it imported
    assert NAME in attend(inputs())[2].reason
    assert captured(inputs())
    others = [inputs(length=101), inputs(head_dim=128), inputs(dtype=torch.float16), [x[:1] for x in inputs()]]
    others.append([inputs()[0], *(x[:, :, :1] for x in inputs()[1:])])  # another number of groups
    assert not any(captured(x) for x in others)
    assert not captured(inputs(), softmax_scale=0.5)
    monkeypatch.setattr(flash_attn_4, "MAX_CALLS", 1)
    attend(inputs(length=101))
    assert captured(inputs(length=101))
    assert not captured(inputs())


def test_an_empty_batch_does_not_reach_it(installed):
    assert attend([x[:0] for x in inputs()])[0].shape[0] == 0
    assert installed() == 0


class Layer(torch.nn.Module):
    """Projections and attention, as a model has them; ``reasons``: of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = torch.nn.Linear(64, 8 * 64, bias=False)
        self.reasons: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(x).to(torch.bfloat16).unflatten(-1, (8, 64)).split([4, 2, 2], 2)
        with asked_by(self):
            out, work = mala_attn_func(q, k, v, causal=True, return_work=True)
        self.reasons.append(work.reason)
        return out


def test_a_reentrant_checkpoint_goes_the_same_way_twice(installed):
    layer = Layer()
    x = torch.randn(1, 100, 64, requires_grad=True)
    checkpoint(layer, x, use_reentrant=True).float().sum().backward()
    assert len(layer.reasons) == 2
    assert layer.reasons[0] == layer.reasons[1]
    assert installed() == 0
    with torch.no_grad():
        layer.eval()(x)
    assert NAME in layer.reasons[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [100, 1024, 8192])
def test_on_a_gpu_out_and_lse_are_full_attentions_also_in_a_cuda_graph(length, head_dim):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("measured on Hopper")
    if not flash_attn_4.is_installed():
        pytest.skip("flash-attn-4 is not installed")
    x = [y.cuda() for y in inputs(length, head_dim)]
    call = {"tau": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # no failure
        out, lse, work = attend(x, **call)
    assert work.reason.endswith(NAME)
    assert_full_attention(out, lse, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again, again_lse = mala_attn_func(*x, causal=True, return_lse=True, **call)
    again.zero_()
    graph.replay()
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)

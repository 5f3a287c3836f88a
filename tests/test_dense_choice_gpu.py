# SPDX-License-Identifier: Apache-2.0
"""What calls are handed over to dense kernels on a GPU, what they return there, and what graphs and compilers keep."""

from __future__ import annotations

import pytest
import torch

from mala_hf.ops import (
    discover_choice,
    mala_attn_func,
)
from mala_hf.ops.query_tile import Settings
from mala_hf.ops.visibility import fixed_sequences
from mala_hf.workloads import peaked_inputs

ALL = ("fused", "int8", "dense")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [100, 1024, 2047])
def test_on_a_gpu_short_calls_are_cudnns_or_flashs(length, head_dim):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, length, heads, head_dim, device="cuda", dtype=torch.bfloat16) for heads in (8, 4, 4))
    out, lse, work = mala_attn_func(q, k, v, causal=True, return_lse=True, return_work=True)
    assert work.choice == "dense"
    fused, fused_lse = mala_attn_func(q, k, v, causal=True, discovery="fused", tau=0.0, return_lse=True)
    assert (out - fused).float().norm() < 1e-2 * fused.float().norm()
    assert (lse - fused_lse).abs().max() < 1e-3
    assert mala_attn_func(q, k, v, causal=True, impl="triton", return_work=True)[1].choice == "fused"


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="measured on Hopper"
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_hopper_flat_heads_are_dense_and_peaked_ones_are_not(head_dim):
    shape = {"num_heads": 8, "num_kv_heads": 4, "head_dim": head_dim}
    for flat_share, length, expected in (
        (0.0, 32768, ["int8"]),
        (1.0, 16384, ["dense"]),
        (0.25, 32768, ["int8", "dense"]),
    ):
        inputs = peaked_inputs(length, links=1.0, flat_share=flat_share, **shape)
        call = inputs.q, inputs.k, inputs.v
        settings = Settings(1.0, head_dim**-0.5, (-1, 0), 0.0, (64, 128))
        sequences = fixed_sequences(1, length, length, 0)
        choices = discover_choice.choose(call[0], call[1], settings, sequences, ALL)
        assert [choice.way for choice in choices] == expected
        out, lse = mala_attn_func(*call, causal=True, return_lse=True)
        fused, fused_lse = mala_attn_func(*call, causal=True, discovery="fused", return_lse=True)
        if "dense" not in expected:
            assert torch.equal(out, fused)
        assert (out - fused).float().norm() < 1e-2 * fused.float().norm()
        assert (lse - fused_lse).abs().max() < 2e-2


def replayed(*call: torch.Tensor) -> torch.Tensor:
    """What a CUDA graph of the call gives."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mala_attn_func(*call, causal=True)
    graph.replay()
    return out


@pytest.mark.gpu
def test_a_cuda_graph_chooses_by_length_and_goes_the_way_of_an_earlier_call():
    for length, options in ((1024, {"tau": 0.0}), (32768, {})):
        torch.manual_seed(0)
        call = [torch.randn(1, length, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
        call[0] *= 18  # most tiles are retained, not all: to retain all gives other bits
        expected = mala_attn_func(*call, causal=True, discovery="fused", **options)  # a new shape is not planned for
        assert torch.equal(replayed(*call), expected)
    eager = mala_attn_func(*call, causal=True)  # looked at: dense
    assert not torch.equal(eager, expected)
    assert torch.equal(replayed(*call), eager)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="measured on Hopper"
)
def test_a_cuda_graph_takes_heads_apart_as_an_earlier_call_did():
    inputs = peaked_inputs(32768, num_heads=8, num_kv_heads=4, head_dim=128, links=1.0, flat_share=0.5)
    call = inputs.q, inputs.k, inputs.v
    _, work = mala_attn_func(*call, causal=True, return_work=True)
    assert {choice.kv_heads for choice in work.choices} == {(0, 1), (2, 3)}
    assert torch.equal(replayed(*call), mala_attn_func(*call, causal=True))


@pytest.mark.gpu
def test_a_compiled_model_on_a_gpu_trains_through_short_calls():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: mala_attn_func(q, k, v, causal=True), fullgraph=True, dynamic=False)
    torch.manual_seed(0)
    leaves = [
        torch.randn(1, 512, heads, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2)
    ]
    out, expected = compiled(*leaves), mala_attn_func(*leaves, causal=True)
    do = torch.randn_like(out)
    for mine, theirs in zip(
        [out, *torch.autograd.grad(out, leaves, do)],
        [expected, *torch.autograd.grad(expected, leaves, do)],
        strict=True,
    ):
        assert (mine - theirs).float().norm() < 2e-2 * theirs.float().norm()

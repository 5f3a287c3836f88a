# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows of the Triton backward: long inputs, far offsets, memory, recompilation, the Hopper forward before it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from backward_calls import gradient_of, run_backward, run_forward
from calls import Call, build
from gradients import check_both_forms
from helpers import random_gradient
from inputs import Case, ids
from ties import Walk, assert_nested_at_ties
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mala_hf.ops import backward_gradients, backward_support, mala_attn_func

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

# the paper's mean relative errors of the gradients against full attention
PAPERS_ERRORS = {"dq": 0.0038, "dk": 0.0035, "dv": 0.0017}

BIG = [
    Case(seqlen_q=2000, tile=None, family="captured", num_heads=3),
    Case(seqlen_q=4000, tile=None, num_heads=2, num_kv_heads=1),
    Case(seqlen_q=100, seqlen_k=140_000, tile=None, num_heads=1),
    Case(seqlen_q=70_000, seqlen_k=300, tile=None, num_heads=1, causal=False),
    Case(seqlen_q=1531, seqlen_k=3001, tile=None, num_heads=4, num_kv_heads=2, head_dim=128, batch=2),
    Case(seqlen_q=2000, tile=None, family="needle", num_heads=2, head_dim=256),
    Case(seqlen_q=1500, tile=None, window=(700, -1), softcap=30.0, sinks="learned", head_dim=72),
    Case(seqlen_q=1500, tile=None, layout="packed", batch=5, num_heads=5, head_dim=96),
    Case(seqlen_q=1500, tile=None, layout="padded", batch=3, head_dim=192, v_head_dim=128),
    Case(seqlen_q=1500, tile=None, strided=True, batch=2, num_heads=4, num_kv_heads=2, head_dim=128),
    Case(seqlen_q=1100, tile=None, mask="per head", batch=2, head_dim=128),
]  # fmt: skip


@pytest.mark.parametrize("case", BIG, ids=ids(BIG))
def test_long_inputs_give_the_rules_tiles_and_gradients(case, device):
    check_both_forms(build(case, torch.bfloat16, device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [BIG[0], BIG[4]], ids=ids([BIG[0], BIG[4]]))
def test_long_inputs_give_the_rules_tiles_and_gradients_in_other_types(case, dtype, device):
    check_both_forms(build(case, dtype, device))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_two_runs_give_the_same_bits(dtype, head_dim, device):
    case = Case(seqlen_q=1500, tile=None, num_heads=8, num_kv_heads=2, head_dim=head_dim, batch=2)
    call = build(case, dtype, device)
    forward, do = run_forward(call), gradient_of(call)
    for support in (None, forward.support):
        first, second = (run_backward(call, forward, do, support).named() for _ in range(2))
        for name, gradient in first.items():
            assert torch.equal(gradient, second[name]), name


@pytest.mark.parametrize("cancelling", [0.0, 300.0])
@pytest.mark.parametrize("shift", [0.0, 60.0])
@pytest.mark.parametrize(("dtype", "tile"), [(torch.bfloat16, (64, 128)), (torch.float32, (64, 64))], ids=str)
def test_a_tile_that_forward_skipped_by_a_rounding_is_skipped_again(dtype, tile, shift, cancelling, device):
    """The forward may be another kernel (Hopper's), which adds products in another order."""
    assert_nested_at_ties(Walk(Case(tile=tile, head_dim=64), dtype, device, shift, cancelling, steps=512))


@pytest.mark.parametrize("which", ["batch stride", "sequence stride"])
def test_strides_beyond_2_to_the_31_elements_are_addressed(which, device):
    small = build(Case(batch=2, seqlen_q=100, tile=None), torch.bfloat16, device)
    forward, do = run_forward(small), gradient_of(small)
    expected = run_backward(small, forward, do).named()
    row = small.k.shape[2] * small.k.shape[3]
    strides = (2**31, row, 64, 1) if which == "batch stride" else (row, 2**31 // 96 // 64 * 64, 64, 1)
    views = {}
    for name in "kv":
        x = getattr(small, name)
        storage = torch.empty(2**31 + 2**27, dtype=torch.bfloat16, device=device)
        views[name] = storage.as_strided(x.shape, strides).copy_(x)
    for name, gradient in run_backward(small.with_(**views), forward, do).named().items():
        assert torch.equal(gradient, expected[name]), name


def _far(x: Tensor, rows: int) -> Tensor:
    """``x`` (1, n, heads, dim) behind ``rows`` rows of zeros."""
    return torch.cat([x.new_zeros(1, rows, *x.shape[2:]), x], 1)


FAR = 2**24  # rows of 128 elements: 2**31


def test_keys_and_their_gradients_beyond_2_to_the_31_elements_are_addressed(device):
    case = Case(seqlen_q=64, seqlen_k=256, num_heads=1, head_dim=128, causal=False, tile=None)
    small = build(case, torch.bfloat16, device)
    do = gradient_of(small)
    expected = run_backward(small, run_forward(small), do)
    leftpad = torch.tensor([FAR], dtype=torch.int32, device=device)
    far = small.with_(k=_far(small.k, FAR), v=_far(small.v, FAR), leftpad_k=leftpad)
    gradients = run_backward(far, run_forward(far, save_support=False), do)
    assert torch.equal(gradients.dq, expected.dq)
    assert torch.equal(gradients.dk[:, FAR:], expected.dk)
    assert torch.equal(gradients.dv[:, FAR:], expected.dv)
    assert not gradients.dk[:, :FAR].any()


def test_queries_and_their_gradients_beyond_2_to_the_31_elements_are_addressed(device):
    case = Case(seqlen_q=256, seqlen_k=64, num_heads=1, head_dim=128, causal=False, tile=None)
    small = build(case, torch.bfloat16, device)
    do = gradient_of(small)
    expected = run_backward(small, run_forward(small), do)
    far, far_do = small.with_(q=_far(small.q, FAR)), _far(do, FAR)
    gradients = run_backward(far, run_forward(far), far_do)
    assert torch.equal(gradients.dq[:, FAR:], expected.dq)
    torch.testing.assert_close(gradients.dk, expected.dk)  # rows of zeros add zeros
    torch.testing.assert_close(gradients.dv, expected.dv)


def _leaves(call: Call) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]


def test_other_lengths_strides_and_tau_recompile_nothing(device):
    kernels = [
        backward_support.backward_support_kernel,
        backward_gradients.backward_query_kernel,
        backward_gradients.backward_key_kernel,
    ]

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    call = build(Case(seqlen_q=700, tile=None, num_heads=4, num_kv_heads=2), torch.bfloat16, device)

    def step(length: int, tau: float, contiguous: bool, save_support: bool) -> None:
        leaves = [x[:, :length] for x in (call.q, call.k, call.v)]
        leaves = [(x.contiguous() if contiguous else x).requires_grad_() for x in leaves]
        out = mala_attn_func(*leaves, tau=tau, causal=True, impl="triton", save_support=save_support)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    for save_support in (False, True):
        step(511, 1.0, True, save_support)
    before = compiled()
    assert before >= len(kernels)
    for save_support in (False, True):
        for length in (17, 31, 64, 100, 128, 255, 256, 333, 512, 700):
            step(length, length / 100, length % 2 == 0, save_support)
    assert compiled() == before


def test_a_thousand_steps_leave_nothing_in_memory(device):
    leaves = _leaves(build(Case(seqlen_q=1000, tile=None, num_heads=4, num_kv_heads=2), torch.bfloat16, device))

    def step(i: int) -> None:
        out = mala_attn_func(*leaves, causal=True, impl="triton", save_support=i % 2 == 0, return_lse=True)[0]
        torch.autograd.grad(out.sum(), leaves)

    gc.collect()
    gc.disable()  # what is freed must not wait for the collector of cycles
    held = []
    try:
        for i in range(1000):
            step(i)
            if i in (499, 999):  # by then whatever is made once has been made
                torch.cuda.synchronize()
                held.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert held[1] <= held[0]


def _peak_bytes(run: Callable[[], object]) -> int:
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_a_step_at_16k_needs_no_more_memory_than_the_dense_kernels(device):
    case = Case(seqlen_q=16384, tile=None, num_heads=16, num_kv_heads=8, head_dim=128)
    call = build(case, torch.bfloat16, device)
    support_bytes = run_forward(call).support.nbytes
    leaves, do = _leaves(call), torch.ones_like(call.q)

    def mala(save_support: bool) -> None:
        out = mala_attn_func(*leaves, causal=True, impl="triton", save_support=save_support)
        torch.autograd.grad(out, leaves, do)

    def dense() -> None:
        q, k, v = (x.transpose(1, 2) for x in leaves)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, leaves, do.transpose(1, 2))

    needed = _peak_bytes(dense)
    for save_support in (False, True):
        mine = _peak_bytes(lambda save_support=save_support: mala(save_support))
        print(
            f"peak of a step: {mine / 2**20:.1f} MiB with save_support={save_support}, dense {needed / 2**20:.1f} MiB"
        )
        assert mine <= 1.02 * needed + save_support * support_bytes


def test_gradients_on_captured_activations_are_as_near_to_full_attention_as_the_papers(device):
    call = build(Case(family="captured", seqlen_q=2048, num_heads=3, tile=None), torch.float16, device)
    leaves, do = _leaves(call), random_gradient(call)
    gradients = torch.autograd.grad(call.with_(**dict(zip("qkv", leaves, strict=True))).run("triton"), leaves, do)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = (x.transpose(1, 2) for x in wide)
    full = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    truth = torch.autograd.grad(full, wide, do.double())
    errors = {
        name: float((got.double() - exact).norm() / exact.norm())
        for name, got, exact in zip(PAPERS_ERRORS, gradients, truth, strict=True)
    }
    report = ", ".join(f"{name} {error:.3%}" for name, error in errors.items())
    print(f"relative errors against full attention: {report}")
    assert all(0 < error <= PAPERS_ERRORS[name] for name, error in errors.items()), report

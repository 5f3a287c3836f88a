# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows of the Triton forward: long inputs, descriptors, far offsets, the Hopper kernel, recompilation."""

from __future__ import annotations

import importlib

import pytest
import torch
from calls import build
from helpers import assert_same_bits, check_forward, run_kernel
from inputs import Case, ids

from mala_hf.ops import forward as forward_module
from mala_hf.ops import program_order
from mala_hf.ops.tma import HAS_GLUON_FOR_HOPPER

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


def run_with(monkeypatch: pytest.MonkeyPatch, call, run=None, **overrides):
    launch = forward_module.launch_forward
    with monkeypatch.context() as patch:
        patch.setattr(forward_module, "launch_forward", lambda *args: launch(*args, **overrides))
        return run_kernel(call) if run is None else run()


def is_hopper() -> bool:
    return HAS_GLUON_FOR_HOPPER and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


BIG = [
    Case(seqlen_q=2000, tile=None, family="captured", num_heads=3),
    Case(seqlen_q=2000, tile=None, num_heads=4, num_kv_heads=2, head_dim=128),
    Case(seqlen_q=1531, seqlen_k=3001, tile=None, num_heads=4, num_kv_heads=2, head_dim=128, batch=2),
    Case(seqlen_q=2000, tile=None, family="needle", num_heads=2, head_dim=256),
    Case(seqlen_q=1, seqlen_k=9001, tile=None, num_heads=8, num_kv_heads=2, head_dim=128, batch=3, layout="cache"),
    Case(seqlen_q=1500, tile=None, window=(700, -1), softcap=30.0, sinks="learned", head_dim=72),
    Case(seqlen_q=1500, tile=None, layout="packed", batch=5, num_heads=5, head_dim=96),
    Case(seqlen_q=1100, tile=None, mask="per head", batch=2, head_dim=128),
    Case(seqlen_q=1500, tile=None, layout="padded", batch=3, head_dim=192, v_head_dim=128),
    Case(seqlen_q=1500, tile=None, strided=True, batch=2, num_heads=4, num_kv_heads=2, head_dim=128),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", BIG, ids=ids(BIG))
def test_long_inputs_give_the_rules_tiles_and_values(case, dtype, device):
    call = build(case, dtype, device)
    out, lse, work = run_kernel(call)
    check_forward(call.with_(tile=work.tile), out, lse, work)


@pytest.mark.parametrize(
    "case",
    [Case(seqlen_q=700, tile=None, num_heads=4, head_dim=128, batch=2), Case(seqlen_q=1, seqlen_k=900, tile=None)],
    ids=lambda case: case.id,
)
def test_descriptors_and_pointers_give_the_same_bits(case, device, monkeypatch):
    call = build(case, torch.bfloat16, device)
    with_tma, without = (run_with(monkeypatch, call, use_tma=tma, use_hopper=False) for tma in (True, False))
    assert_same_bits(with_tma, without)


HOPPER = [
    Case(seqlen_q=700, tile=(64, 128), num_heads=4, num_kv_heads=2, head_dim=128, batch=2),
    Case(seqlen_q=900, tile=(64, 128), family="captured", num_heads=3),
    Case(seqlen_q=333, seqlen_k=777, tile=(64, 64), head_dim=256),
    Case(seqlen_q=777, seqlen_k=333, tile=(64, 128)),
    Case(seqlen_q=100, seqlen_k=901, tile=(64, 128), causal=False),
    Case(seqlen_q=640, tile=(64, 128), window=(200, -1), softcap=20.0, sinks="learned", head_dim=96),
    Case(seqlen_q=640, tile=(64, 64), window=(200, 50), causal=False, head_dim=192, v_head_dim=128),
    Case(seqlen_q=500, tile=(64, 64), head_dim=128, v_head_dim=256),
]
HOPPER += [case.with_(tau=0.0) for case in HOPPER]  # without a report of work: no vote at all


@pytest.mark.skipif(not is_hopper(), reason="the Hopper kernel needs compute capability 9.0 and Triton 3.6")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", HOPPER, ids=ids(HOPPER))
def test_the_hopper_kernel_gives_the_rules_values_and_the_portable_kernels_tiles(case, dtype, device, monkeypatch):
    call = build(case, dtype, device)
    out, lse, work = run_with(monkeypatch, call, use_hopper=True)
    check_forward(call, out, lse, work)
    assert torch.equal(work.tiles, run_with(monkeypatch, call, use_hopper=False)[2].tiles)
    assert_same_bits(run_with(monkeypatch, call, use_hopper=True), (out, lse, work))
    # without the work, tiles that are both skipped are settled by one vote; with tau = 0 a program takes three query tiles at length
    for fewest in (program_order.FEWEST_OF_THREE, 0):
        monkeypatch.setattr(program_order, "FEWEST_OF_THREE", fewest)
        plain_out, plain_lse = run_with(
            monkeypatch, call, run=lambda: call.run("triton", return_lse=True), use_hopper=True
        )
        assert torch.equal(plain_out, out)
        assert torch.equal(plain_lse, lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", BIG + HOPPER, ids=ids(BIG + HOPPER))
def test_walking_a_known_support_gives_the_same_bits_as_searching(case, dtype, device, monkeypatch):
    call = build(case, dtype, device)
    arguments: list = []
    launch = forward_module.launch_forward
    with monkeypatch.context() as patch:
        patch.setattr(forward_module, "launch_forward", lambda *args: arguments.extend(args[:7]) or launch(*args))
        call.run("triton")
    out, lse, _, _, support = launch(*arguments, return_work=False, save_support=True)
    walked_out, walked_lse, *_ = launch(*arguments, return_work=False, support=support)
    assert torch.equal(walked_out, out)
    assert torch.equal(walked_lse, lse)


@pytest.mark.parametrize("which", ["batch stride", "sequence stride"])
def test_keys_beyond_2_to_the_31_elements_are_addressed(which, device):
    small = build(Case(batch=2, seqlen_q=100, tile=None), torch.bfloat16, device)
    row = small.k.shape[2] * small.k.shape[3]
    strides = (2**31, row, 64, 1) if which == "batch stride" else (row, 2**31 // 96 // 64 * 64, 64, 1)
    views = {}
    for name in "qkv":
        x = getattr(small, name)
        storage = torch.empty(2**31 + 2**27, dtype=torch.bfloat16, device=device)
        views[name] = x if name == "q" else storage.as_strided(x.shape, strides).copy_(x)
    assert torch.equal(small.with_(**views).run("triton"), small.run("triton"))


def test_queries_and_outputs_beyond_2_to_the_31_elements_are_addressed(device):
    small = build(
        Case(seqlen_q=256, seqlen_k=64, num_heads=1, head_dim=128, causal=False, tile=None), torch.bfloat16, device
    )
    q = torch.zeros(1, 2**24 + 256, 1, 128, dtype=torch.bfloat16, device=device)
    q[:, -256:] = small.q
    assert torch.equal(small.with_(q=q).run("triton")[:, -256:], small.run("triton"))


@pytest.mark.parametrize("seqlen_q", [1, 100])
def test_a_growing_sequence_recompiles_nothing(seqlen_q, device):
    """tau, lengths, offsets and strides are runtime values: a cache that grows token by token reuses one kernel."""
    kernels = [forward_module.mala_forward_kernel]
    if HAS_GLUON_FOR_HOPPER:
        kernels.append(importlib.import_module("mala_hf.ops.forward_hopper").mala_forward_hopper_kernel)

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    cache = build(Case(seqlen_q=seqlen_q, seqlen_k=600, tile=None, num_heads=4), torch.bfloat16, device)
    cache.with_(k=cache.k[:, :511], v=cache.v[:, :511]).run("triton")
    before = compiled()
    for length in (1, 2, 15, 16, 17, 63, 64, 100, 128, 255, 256, 333, 512, 600):
        for k, v in ((cache.k[:, :length],) * 2, (cache.k[:, :length].clone(), cache.v[:, :length].clone())):
            cache.with_(k=k, v=v, tau=length / 100).run("triton")
    assert compiled() == before

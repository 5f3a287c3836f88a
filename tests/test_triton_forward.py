# SPDX-License-Identifier: Apache-2.0
"""The Triton forward against the rule: through the interpreter here, compiled where there is a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from calls import NAN, build, heads
from helpers import RETAINED, SKIPPED, check_forward, reference_head
from inputs import CASES, EMPTY_CASES, FAMILY_CASES, NOT_IN_16_BIT, Case, ids

from mala_hf.ops import forward as forward_module
from mala_hf.ops import forward_hopper


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


pytestmark = pytest.mark.usefixtures("poisoned_memory")
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
# families on which the rule skips nothing, or hardly anything
KEEPS_EVERYTHING = {"flat", "equal_scores", "constant_keys", "sink_heavy"}


def _run(call):
    return call.run("triton", return_lse=True, return_work=True)


def _skip_if_out_of_range(case: Case, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and case.family == "huge_norms":
        pytest.skip("the plain float16 baseline overflows on huge norms")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FAMILY_CASES, ids=ids(FAMILY_CASES))
def test_every_family_of_inputs_gives_the_rules_tiles_and_values(case, dtype, device):
    _skip_if_out_of_range(case, dtype)
    call = build(case, dtype, device)
    skipped = check_forward(call, *_run(call))
    assert skipped > 0 or case.family in KEEPS_EVERYTHING


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_every_case_gives_the_rules_tiles_and_values(case, device):
    call = build(case, torch.float32, device)
    check_forward(call, *_run(call))


SIXTEEN_BIT_CASES = [case for case in CASES if case.head_dim in (64, 72, 192) and case.family not in NOT_IN_16_BIT]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", SIXTEEN_BIT_CASES, ids=ids(SIXTEEN_BIT_CASES))
def test_every_case_gives_the_rules_tiles_and_values_in_16_bit(case, dtype, device):
    call = build(case, dtype, device)
    check_forward(call, *_run(call))


@pytest.mark.parametrize("case", EMPTY_CASES, ids=ids(EMPTY_CASES))
def test_empty_inputs_give_empty_or_zero_outputs(case, device):
    call = build(case, torch.float32, device)
    out, lse, _ = _run(call)
    assert out.shape == (*call.q.shape[:-1], call.v.shape[-1])
    assert not out.any()
    assert (lse == -math.inf).all()


SHIPPED = [
    Case(seqlen_q=300, tile=None),
    Case(seqlen_q=300, tile=None, family="captured", num_heads=3),
    Case(seqlen_q=300, tile=None, num_heads=4, num_kv_heads=2, head_dim=128, window=(150, -1)),
    Case(seqlen_q=1, seqlen_k=700, tile=None, num_heads=4),
    Case(seqlen_q=150, tile=None, head_dim=256, num_heads=1),
    Case(layout="packed", batch=5, seqlen_q=200, tile=None),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SHIPPED, ids=ids(SHIPPED))
def test_shipped_tiles_give_the_rules_tiles_and_values(case, dtype, device):
    call = build(case, dtype, device)
    out, lse, work = _run(call)
    check_forward(call.with_(tile=work.tile), out, lse, work)


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", BIG, ids=ids(BIG))
def test_long_inputs_give_the_rules_tiles_and_values(case, dtype, device):
    call = build(case, dtype, device)
    out, lse, work = _run(call)
    check_forward(call.with_(tile=work.tile), out, lse, work)


@pytest.mark.parametrize("case", [Case(), Case(mask="full"), Case(layout="packed", batch=5)], ids=lambda case: case.id)
def test_asking_for_the_work_changes_no_bit_of_the_output(case, device):
    call = build(case, torch.float32, device)
    out, lse, _ = _run(call)
    plain_out, plain_lse = call.run("triton", return_lse=True)
    assert torch.equal(plain_out, out)
    assert torch.equal(plain_lse, lse)


def test_two_runs_give_the_same_bits(device):
    call = build(Case(num_heads=4, num_kv_heads=2, batch=2), torch.float16, device)
    _assert_same_bits(_run(call), _run(call))


@pytest.mark.parametrize(
    "case",
    [
        Case(num_heads=4, seqlen_q=30, seqlen_k=250),
        Case(seqlen_q=1, seqlen_k=200, num_heads=4),
        Case(causal=False, seqlen_q=30, seqlen_k=200),
    ],
    ids=lambda case: case.id,
)
def test_values_of_tiles_that_every_row_skips_are_never_read(case, device):
    call = build(case, torch.float32, device)
    clean = _run(call)
    block_n = case.tile[1]
    poisoned = call.v.clone()
    skipped_by_all = torch.ones(call.k.shape[2], -(-call.k.shape[1] // block_n), dtype=torch.bool)
    for head in heads(call):
        result = reference_head(call, head)
        clearly = (result.tiles != RETAINED) & ((result.margin < -1e-3) | (result.tiles != SKIPPED))
        skipped_by_all[head.kv_head] &= clearly.all(0).cpu()
    assert skipped_by_all.sum() >= 2, "the input leaves no tile that can be poisoned"
    for kv_head, k_tile in skipped_by_all.nonzero().tolist():
        poisoned[:, k_tile * block_n : (k_tile + 1) * block_n, kv_head] = NAN
    _assert_same_bits(_run(call.with_(v=poisoned)), clean)


@pytest.mark.parametrize("seqlen_q", [1, 3, 17])
def test_rows_that_do_not_exist_never_constrain(seqlen_q, device):
    """A query tile of 16 or 32 rows that is mostly padding skips what its real rows skip."""
    call = build(Case(seqlen_q=seqlen_q, seqlen_k=240, tile=(32, 16)), torch.float32, device)
    out, lse, work = _run(call)
    assert check_forward(call, out, lse, work) > 0
    assert (work.work_fraction < 0.8).all()


def test_a_sequence_does_not_see_its_packed_neighbours(device):
    call = build(Case(layout="packed", batch=5), torch.float32, device)
    out, lse = call.run("triton", return_lse=True)
    q_begin, q_end = call.options["cu_seqlens_q"][2:4].tolist()
    neighbours = [x.clone() for x in (call.q, call.k, call.v)]
    for x in neighbours:
        x[:q_begin], x[q_end:] = NAN, NAN
    alone, alone_lse = call.with_(**dict(zip("qkv", neighbours, strict=True))).run("triton", return_lse=True)
    assert torch.equal(alone[q_begin:q_end], out[q_begin:q_end])
    assert torch.equal(alone_lse[:, q_begin:q_end], lse[:, q_begin:q_end])


@pytest.mark.parametrize("causal", [True, False])
def test_a_padded_sequence_gives_the_bits_it_gives_alone(causal, device):
    call = build(Case(layout="padded", batch=3, causal=causal), torch.float32, device)
    out, lse = call.run("triton", return_lse=True)
    lengths = {name: call.options[name].tolist() for name in ("leftpad_k", "seqused_k", "seqused_q")}
    for b in range(3):
        low, high, rows = lengths["leftpad_k"][b], lengths["seqused_k"][b], lengths["seqused_q"][b]
        tensors = {"q": call.q[b : b + 1, :rows], "k": call.k[b : b + 1, low:high], "v": call.v[b : b + 1, low:high]}
        alone = call.with_(**tensors, leftpad_k=None, seqused_k=None, seqused_q=None)
        alone_out, alone_lse = alone.run("triton", return_lse=True)
        assert torch.equal(alone_out[0], out[b, :rows])
        assert torch.equal(alone_lse[0], lse[b, :, :rows])


@pytest.mark.parametrize("causal", [True, False])
def test_tau_zero_equals_scaled_dot_product_attention(causal, device):
    call = build(Case(tau=0.0, causal=causal, num_heads=4, num_kv_heads=2), torch.float32, device)
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    dense = torch.nn.functional.scaled_dot_product_attention
    expected = dense(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
    truth = dense(q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True).transpose(1, 2)
    error, baseline = (call.run("triton") - truth).abs().max(), (expected - truth).abs().max()
    assert error <= 2 * baseline + 1e-6


def test_float64_is_refused_because_kernels_compute_in_float32():
    call = build(Case(), torch.float64)
    with pytest.raises(ValueError, match="float64"):
        call.run("triton")


def _run_with(monkeypatch: pytest.MonkeyPatch, call, **overrides):
    launch = forward_module.launch_forward
    with monkeypatch.context() as patch:
        patch.setattr(forward_module, "launch_forward", lambda *args: launch(*args, **overrides))
        return _run(call)


def _assert_same_bits(results, others) -> None:
    (out, lse, work), (other, other_lse, other_work) = results, others
    assert torch.equal(out, other)
    assert torch.equal(lse, other_lse)
    assert torch.equal(work.tiles, other_work.tiles)
    assert torch.equal(work.certificate, other_work.certificate)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [Case(seqlen_q=700, tile=None, num_heads=4, head_dim=128, batch=2), Case(seqlen_q=1, seqlen_k=900, tile=None)],
    ids=lambda case: case.id,
)
def test_descriptors_and_pointers_give_the_same_bits(case, device, monkeypatch):
    call = build(case, torch.bfloat16, device)
    with_tma, without = (_run_with(monkeypatch, call, use_tma=tma, use_hopper=False) for tma in (True, False))
    _assert_same_bits(with_tma, without)


HOPPER = [
    Case(seqlen_q=700, tile=(64, 128), num_heads=4, num_kv_heads=2, head_dim=128, batch=2),
    Case(seqlen_q=900, tile=(64, 128), family="captured", num_heads=3),
    Case(seqlen_q=333, seqlen_k=777, tile=(64, 64), head_dim=256),
    Case(seqlen_q=777, seqlen_k=333, tile=(64, 128)),
    Case(seqlen_q=100, seqlen_k=901, tile=(64, 128), causal=False),
    Case(seqlen_q=640, tile=(64, 128), window=(200, -1), softcap=20.0, sinks="learned", head_dim=96),
    Case(seqlen_q=640, tile=(64, 128), window=(200, 50), causal=False, head_dim=192, v_head_dim=128),
]


@pytest.mark.gpu
@pytest.mark.skipif(not is_hopper(), reason="the Hopper kernel needs compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", HOPPER, ids=ids(HOPPER))
def test_the_hopper_kernel_gives_the_rules_values_and_the_portable_kernels_tiles(case, dtype, device, monkeypatch):
    call = build(case, dtype, device)
    out, lse, work = _run_with(monkeypatch, call, use_hopper=True)
    check_forward(call, out, lse, work)
    assert torch.equal(work.tiles, _run_with(monkeypatch, call, use_hopper=False)[2].tiles)
    _assert_same_bits(_run_with(monkeypatch, call, use_hopper=True), (out, lse, work))


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_queries_and_outputs_beyond_2_to_the_31_elements_are_addressed(device):
    small = build(
        Case(seqlen_q=256, seqlen_k=64, num_heads=1, head_dim=128, causal=False, tile=None), torch.bfloat16, device
    )
    q = torch.zeros(1, 2**24 + 256, 1, 128, dtype=torch.bfloat16, device=device)
    q[:, -256:] = small.q
    assert torch.equal(small.with_(q=q).run("triton")[:, -256:], small.run("triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 100])
def test_a_growing_sequence_recompiles_nothing(seqlen_q, device):
    """tau, lengths, offsets and strides are runtime values: a cache that grows token by token reuses one kernel."""
    kernels = (forward_module.mala_forward_kernel, forward_hopper.mala_forward_hopper_kernel)

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    cache = build(Case(seqlen_q=seqlen_q, seqlen_k=600, tile=None, num_heads=4), torch.bfloat16, device)
    cache.with_(k=cache.k[:, :511], v=cache.v[:, :511]).run("triton")
    before = compiled()
    for length in (1, 2, 15, 16, 17, 63, 64, 100, 128, 255, 256, 333, 512, 600):
        for k, v in ((cache.k[:, :length],) * 2, (cache.k[:, :length].clone(), cache.v[:, :length].clone())):
            cache.with_(k=k, v=v, tau=length / 100).run("triton")
    assert compiled() == before

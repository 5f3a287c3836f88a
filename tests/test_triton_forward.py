# SPDX-License-Identifier: Apache-2.0
"""The Triton forward against the rule: through the interpreter here, compiled where there is a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from backward_calls import launch_arguments
from calls import NAN, build, heads
from helpers import RETAINED, SKIPPED, assert_same_bits, check_forward, random_gradient, reference_head, run_kernel
from inputs import CASES, EMPTY_CASES, FAMILY_CASES, NOT_IN_16_BIT, Case, ids

from mala_hf.ops.forward import launch_forward

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
# families on which the rule skips nothing, or hardly anything
KEEPS_EVERYTHING = {"flat", "equal_scores", "constant_keys", "sink_heavy"}


def _skip_if_out_of_range(case: Case, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and case.family == "huge_norms":
        pytest.skip("the plain float16 baseline overflows on huge norms")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FAMILY_CASES, ids=ids(FAMILY_CASES))
def test_every_family_of_inputs_gives_the_rules_tiles_and_values(case, dtype, device):
    _skip_if_out_of_range(case, dtype)
    call = build(case, dtype, device)
    skipped = check_forward(call, *run_kernel(call))
    assert skipped > 0 or case.family in KEEPS_EVERYTHING


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_every_case_gives_the_rules_tiles_and_values(case, device):
    call = build(case, torch.float32, device)
    check_forward(call, *run_kernel(call))


SIXTEEN_BIT_CASES = [case for case in CASES if case.head_dim in (64, 72, 192) and case.family not in NOT_IN_16_BIT]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", SIXTEEN_BIT_CASES, ids=ids(SIXTEEN_BIT_CASES))
def test_every_case_gives_the_rules_tiles_and_values_in_16_bit(case, dtype, device):
    call = build(case, dtype, device)
    check_forward(call, *run_kernel(call))


@pytest.mark.parametrize("case", EMPTY_CASES, ids=ids(EMPTY_CASES))
def test_empty_inputs_give_empty_or_zero_outputs(case, device):
    call = build(case, torch.float32, device)
    out, lse, _ = run_kernel(call)
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
    out, lse, work = run_kernel(call)
    check_forward(call.with_(tile=work.tile), out, lse, work)


@pytest.mark.parametrize("case", [Case(), Case(mask="full"), Case(layout="packed", batch=5)], ids=lambda case: case.id)
def test_asking_for_the_work_changes_no_bit_of_the_output(case, device):
    call = build(case, torch.float32, device)
    out, lse, _ = run_kernel(call)
    plain_out, plain_lse = call.run("triton", return_lse=True)
    assert torch.equal(plain_out, out)
    assert torch.equal(plain_lse, lse)


def test_two_runs_give_the_same_bits(device):
    call = build(Case(num_heads=4, num_kv_heads=2, batch=2), torch.float16, device)
    assert_same_bits(run_kernel(call), run_kernel(call))


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
    clean = run_kernel(call)
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
    assert_same_bits(run_kernel(call.with_(v=poisoned)), clean)


@pytest.mark.parametrize("seqlen_q", [1, 3, 17])
def test_rows_that_do_not_exist_never_constrain(seqlen_q, device):
    """A query tile of 16 or 32 rows that is mostly padding skips what its real rows skip."""
    call = build(Case(seqlen_q=seqlen_q, seqlen_k=240, tile=(32, 16)), torch.float32, device)
    out, lse, work = run_kernel(call)
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


@pytest.mark.parametrize(
    "case",
    [Case(num_heads=4, num_kv_heads=2, sinks="learned", softcap=20.0), Case(layout="padded", batch=3)],
    ids=lambda case: case.id,
)
def test_gradients_through_the_kernel_are_those_of_the_rule(case, device):
    call = build(case, torch.float32, device)
    gradients = {}
    for impl in ("triton", "reference"):
        leaves = [x.detach().requires_grad_() for x in call.tensors_and_sinks()]
        named = dict(zip(["q", "k", "v", "sinks"], leaves, strict=False))
        gradients[impl] = torch.autograd.grad(call.with_(**named).run(impl), leaves, random_gradient(call))
    for got, expected in zip(gradients["triton"], gradients["reference"], strict=True):
        assert expected.any()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * (1 + float(expected.abs().max())))


@pytest.mark.parametrize("tile", [(8, 16), (16, 8)])
def test_tiles_smaller_than_a_matrix_product_are_refused(tile, device):
    call = build(Case(tile=tile), torch.float32, device)
    with pytest.raises(ValueError, match="16"):
        call.run("triton")


@pytest.mark.parametrize("given", ["candidates", "support"])
def test_the_hopper_kernel_refuses_to_walk_tiles_that_were_found_before(given, device):
    arguments = launch_arguments(build(Case(), torch.float16, device))
    found = launch_forward(*arguments, return_work=False, save_support=True)[4]
    with pytest.raises(ValueError, match="the Hopper kernel visits all tiles"):
        launch_forward(*arguments, return_work=False, use_hopper=True, **{given: found})


def test_float64_is_refused_because_kernels_compute_in_float32():
    call = build(Case(), torch.float64)
    with pytest.raises(ValueError, match="float64"):
        call.run("triton")


def test_a_row_of_nan_scores_gives_nan_and_its_neighbours_numbers(device):
    """Every score of the row is NaN, so it votes for every tile; it must not come out as zeros."""
    call = build(Case(seqlen_q=64, num_heads=1, num_kv_heads=1, tile=(16, 16)), torch.float32, device)
    q = call.q.clone()
    q[0, 20] = math.nan
    out = call.with_(q=q).run("triton")
    assert out[0, 20].isnan().all()
    assert out[0, torch.arange(64) != 20].isfinite().all()

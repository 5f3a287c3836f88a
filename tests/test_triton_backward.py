# SPDX-License-Identifier: Apache-2.0
"""The Triton backward against the rule: through the interpreter here, compiled where there is a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from backward_calls import Forward, Gradients, gradient_of, run_backward, run_forward, unpacked
from calls import NAN, build, heads
from gradients import (
    assert_same_gradients,
    backward_margins,
    both_forms,
    check_backward,
    check_both_forms,
    gradients_over,
)
from helpers import RETAINED, numbers_of, of_head, operands, sink_of
from inputs import CASES, EMPTY_CASES, FAMILY_CASES, NOT_IN_16_BIT, Case, ids

from mala_hf.ops import reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
# more key tiles than a word of support has bits: a second word, filled up to its sign
WORDS = [Case(seqlen_q=16, seqlen_k=1024, family="flat", num_heads=1, head_dim=32)]
ALL_CASES = [*CASES, *FAMILY_CASES, *WORDS]
SIXTEEN_BIT_CASES = [
    Case(),
    Case(num_heads=4, num_kv_heads=2, seqlen_q=50),
    Case(head_dim=72, seqlen_q=70),
    Case(head_dim=192, v_head_dim=128, seqlen_q=40),
    Case(sinks="learned", window=(40, -1), softcap=30.0),
    Case(layout="padded", batch=2),
    Case(layout="packed", batch=5, causal=False, sinks="learned"),
    Case(mask="full"),
    *(case.with_(seqlen_q=60) for case in FAMILY_CASES if case.family not in NOT_IN_16_BIT),
]


@pytest.mark.parametrize("case", ALL_CASES, ids=ids(ALL_CASES))
def test_every_case_gives_the_rules_tiles_and_gradients(case, device):
    check_both_forms(build(case, torch.float32, device))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", SIXTEEN_BIT_CASES, ids=ids(SIXTEEN_BIT_CASES))
def test_every_case_gives_the_rules_tiles_and_gradients_in_16_bit(case, dtype, device):
    check_both_forms(build(case, dtype, device))


@pytest.mark.parametrize("case", EMPTY_CASES, ids=ids(EMPTY_CASES))
def test_empty_inputs_give_zero_gradients(case, device):
    call = build(case, torch.float32, device).with_(sinks=torch.ones(case.num_heads, device=device))
    forward = run_forward(call)
    for gradients in both_forms(call, forward, torch.ones_like(forward.out)):
        for name, like in (("dq", call.q), ("dk", call.k), ("dv", call.v), ("dsinks", call.options["sinks"])):
            gradient = getattr(gradients, name)
            assert gradient.shape == like.shape
            assert not gradient.any()


def test_shipped_tiles_give_the_rules_tiles_and_gradients(device):
    check_both_forms(build(Case(seqlen_q=300, tile=None, num_heads=1, head_dim=32), torch.float16, device))


SAVING = [Case(), Case(mask="full"), Case(layout="packed", batch=5), Case(seqlen_q=20, seqlen_k=700, num_heads=1)]


@pytest.mark.parametrize("case", SAVING, ids=ids(SAVING))
def test_saving_the_support_changes_no_bit_of_the_output(case, device):
    call = build(case, torch.float32, device)
    plain = run_forward(call, save_support=False)
    assert plain.support is None
    for return_work in (False, True):
        saving = run_forward(call, return_work)
        assert torch.equal(saving.out, plain.out)
        assert torch.equal(saving.lse, plain.lse)
        tiles = run_forward(call, return_work=True, save_support=False).tiles
        assert torch.equal(unpacked(saving.support, tiles.shape[-1]), tiles == RETAINED)


def test_keys_outside_the_saved_support_are_never_read(device):
    """The saved form scores only the tiles of the support."""
    call = build(Case(seqlen_q=30, seqlen_k=250), torch.float32, device)
    forward, do = run_forward(call), gradient_of(call)
    unused = ~unpacked(forward.support, 16)[0].flatten(0, 1).any(0)
    assert unused.sum() >= 2, "the input leaves no tile that can be poisoned"
    keys = unused.repeat_interleave(16)[:250]
    k, v = call.k.clone(), call.v.clone()
    k[:, keys], v[:, keys] = NAN, NAN
    clean = run_backward(call, forward, do, forward.support)
    poisoned = run_backward(call.with_(k=k, v=v), forward, do, forward.support)
    assert_same_gradients(poisoned, clean)
    assert not clean.dk[:, keys].any()
    assert not clean.dv[:, keys].any()


def test_a_walk_over_more_than_1024_tiles_ends_where_a_short_one_does(device):
    """A window on the last 40 tiles: the rest of the keys may be there or not."""
    call = build(
        Case(seqlen_q=16, seqlen_k=1032 * 16, window=(500, -1), head_dim=32, num_heads=1), torch.float32, device
    )
    last = {name: getattr(call, name)[:, -40 * 16 :] for name in "kv"}
    dq = []
    for one in (call, call.with_(**last)):
        forward, do = run_forward(one), gradient_of(one)
        dq.append(run_backward(one, forward, do, forward.support, needs=(True, False, False)).dq)
    assert dq[0].any()
    assert torch.equal(*dq)


@pytest.mark.parametrize("form", ["state-only", "saved support"])
def test_gradients_that_nobody_needs_change_no_bit_of_the_others(form, device):
    call = build(Case(seqlen_q=50, num_heads=4, num_kv_heads=2, sinks="learned"), torch.float32, device)
    forward, do = run_forward(call), gradient_of(call)
    support = forward.support if form == "saved support" else None
    everything = run_backward(call, forward, do, support).named()
    for needs in product((False, True), repeat=3):
        some = run_backward(call, forward, do, support, needs=needs).named()
        assert set(some) == {
            name for name, needed in zip(("dq", "dk", "dv", "dsinks"), (needs[0], *needs[1:2] * 2, needs[2]), strict=True)
            if needed
        }  # fmt: skip
        for name, gradient in some.items():
            assert torch.equal(gradient, everything[name]), f"{name} differs when {needs} are needed"


def test_two_runs_give_the_same_bits(device):
    call = build(Case(num_heads=4, num_kv_heads=1, batch=2, seqlen_q=50, sinks="learned"), torch.float16, device)
    forward, do = run_forward(call), gradient_of(call)
    assert_same_gradients(run_backward(call, forward, do), run_backward(call, forward, do))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_heads_are_summed_in_float32(dtype, device):
    """Head 0 gives 2048, the last takes it away again, 30 in between give 1: in 16 bit, ones vanish beside 2048."""
    num_heads, length, dim = 32, 16, 32
    weights = torch.ones(num_heads)
    weights[0], weights[-1] = 2048.0, -2048.0
    q, k = torch.zeros(1, length, num_heads, dim), torch.zeros(1, length, 1, dim)
    q[..., 1] = 1.0  # k is zero: every score is, p = 1 / 16
    v, do = torch.zeros(1, length, 1, dim), torch.zeros(1, length, num_heads, dim)
    v[0, ::2, 0, 0], v[0, 1::2, 0, 0] = 1.0, -1.0  # out = 0, so ds = p * do * v
    do[0, 3, :, 0] = 16.0 * weights
    case = Case(num_heads=num_heads, seqlen_q=length, head_dim=dim, causal=False, softmax_scale=1.0)
    q, k, v, do = (x.to(dtype).to(device) for x in (q, k, v, do))
    call = build(case, dtype, device).with_(q=q, k=k, v=v)
    for gradients in both_forms(call, run_forward(call), do):
        assert torch.equal(gradients.dv[0, :, 0, 0].float().cpu(), torch.full((length,), 30.0))
        assert torch.equal(gradients.dk[0, :, 0, 1], 30.0 * v[0, :, 0, 0])


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_the_truth_of_these_tests_is_the_references_backward(case):
    call = build(case, torch.float64)
    out, lse = call.run("blockwise", return_lse=True)
    forward, do = Forward(out, lse, None, None), gradient_of(call)
    for head in heads(call):
        row_out, row_do = of_head(out, call, head), of_head(do, call, head)
        row_lse = of_head(lse, call, head, rows_dim_last=True)
        *expected, retained = reference.backward_head(
            *operands(call, head, torch.float64), head.legal, row_out, row_lse, row_do,
            sink=sink_of(call, head), **numbers_of(call),
        )  # fmt: skip
        margin = backward_margins(call, head, row_lse)
        assert (((margin >= 0) == retained) | (margin.abs() < 1e-12)).all()
        truth, _ = gradients_over(call, head, retained, forward, do)
        for got, value in zip((truth.dq, truth.dk, truth.dv, truth.dsink), expected, strict=True):
            torch.testing.assert_close(value.new_zeros(()) if got is None else got, value, rtol=1e-9, atol=1e-11)


FAULTS = {
    "one tile more": lambda x: replace(x, support=x.support | 1),
    "one tile less": lambda x: replace(x, support=x.support & ~4),
    "the gradient of one key missing": lambda x: replace(x, dk=x.dk * (torch.arange(50) != 45).to(x.dk)[:, None, None]),
    "dk twice": lambda x: replace(x, dk=2 * x.dk),
    "dq off by a thousandth": lambda x: replace(x, dq=1.001 * x.dq),
    "dv of every key off": lambda x: replace(x, dv=x.dv - 1e-3),
    "dsinks with the other sign": lambda x: replace(x, dsinks=-x.dsinks),
}


def test_the_check_notices_faults(device):
    call = build(Case(sinks="learned", seqlen_q=50), torch.float32, device)
    forward, do = run_forward(call), gradient_of(call)
    right = run_backward(call, forward, do)

    def passes(gradients: Gradients) -> bool:
        try:
            check_backward(call, forward, do, gradients)
        except AssertionError:
            return False
        return True

    assert passes(right)
    assert not [fault for fault, change in FAULTS.items() if passes(change(right))]


def test_a_support_of_other_tiles_is_refused(device):
    call = build(Case(seqlen_q=70), torch.float32, device)
    forward = run_forward(call)
    with pytest.raises(ValueError, match="a forward with the same tiles"):
        run_backward(call, forward, gradient_of(call), support=forward.support[:, :, 1:])

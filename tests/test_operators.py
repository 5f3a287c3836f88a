# SPDX-License-Identifier: Apache-2.0
"""The operators behind the public functions: what torch's own checker says, and what autograd may rely on."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from calls import Call, build
from helpers import random_gradient
from inputs import Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.forward_ad import dual_level, make_dual
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from mala_hf.ops import mala_attn_func, operators, query_tile
from mala_hf.ops.support_bits import pack_support, unpack_support

CASES = [
    Case(seqlen_q=70),
    Case(seqlen_q=37, seqlen_k=90, num_heads=4, num_kv_heads=2, sinks="learned", softcap=20.0),
    Case(layout="padded", batch=3, seqlen_q=80, window=(30, -1)),
    Case(layout="packed", batch=5, seqlen_q=50),
    Case(mask="per head", batch=2, seqlen_q=60, causal=False),
    Case(strided=True, batch=2, seqlen_q=50, v_head_dim=40),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def leaves_of(call: Call, without: str = "") -> tuple[dict[str, Tensor], Call]:
    """The call's tensors by name, and the call on copies of them that require a gradient (but those in ``without``)."""
    names = ("q", "k", "v", "sinks")
    leaves = {
        name: x.detach().requires_grad_(name not in without)
        for name, x in zip(names, call.tensors_and_sinks(), strict=False)
    }
    return leaves, call.with_(**leaves)


def gradients(call: Call, impl: str = "blockwise", without: str = "", **options) -> dict[str, Tensor]:
    leaves, call = leaves_of(call, without)
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    out = call.run(impl, **options)
    return dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), random_gradient(call)), strict=True))


class Spy:
    """Stands in for an operator and keeps the arguments of its calls."""

    def __init__(self, operator):
        self.operator, self.calls = operator, []

    def __call__(self, *args):
        self.calls.append(args)
        return self.operator(*args)


@pytest.fixture
def spies(monkeypatch) -> tuple[Spy, Spy]:
    """Arguments of the calls of forward and backward."""
    monkeypatch.setattr(operators, "needs_operator", lambda tensors: True)
    found = Spy(operators.forward), Spy(operators.backward)
    for name, spy in zip(("forward", "backward"), found, strict=True):
        monkeypatch.setattr(operators, name, spy)
    return found


@every_case
@pytest.mark.parametrize("options", [{"save_support": True, "return_work": True}, {"save_support": False}], ids=str)
def test_torch_finds_nothing_wrong_with_the_operators(case, options, spies):
    _, call = leaves_of(build(case))
    result = call.run("blockwise", **options)
    (result[0] if isinstance(result, tuple) else result).backward(random_gradient(call))
    for (operator, arguments), differentiable in zip(
        [(spy.operator, spy.calls[0]) for spy in spies], (4, 0), strict=True
    ):
        torch.library.opcheck(operator, tuple(_fresh(x, i < differentiable) for i, x in enumerate(arguments)))


def _fresh(x, requires_grad: bool):
    """A copy with equal strides and no NaN: the checker compares inputs before and after."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach().nan_to_num())
    return copy.requires_grad_(requires_grad)


@every_case
def test_a_saved_support_changes_no_bit_of_the_gradients(case, spies):
    call = build(case, torch.float32)
    saved, alone = (gradients(call, save_support=save) for save in (True, False))
    for name, gradient in saved.items():
        assert torch.equal(gradient, alone[name]), name
    with_support, without = (arguments[6] for arguments in spies[1].calls)
    assert without is None
    assert with_support.dtype == torch.int32


def test_a_saved_support_is_the_retained_tiles_and_nothing_else_is_scored(monkeypatch, spies):
    monkeypatch.setattr(query_tile, "KEYS_PER_CHUNK", 16)  # one tile at a time
    call = build(Case(seqlen_q=700))
    _, graded = leaves_of(call)
    out, work = graded.run("blockwise", return_work=True, save_support=True)
    scored = []
    scores = query_tile.QueryTile.scores
    monkeypatch.setattr(query_tile.QueryTile, "scores", lambda *args: scored.append(args[1:]) or scores(*args))
    out.sum().backward()
    support = spies[1].calls[0][6]
    assert torch.equal(unpack_support(support, work.tiles.shape[-1]), work.retained)
    assert work.support_bytes == support.nbytes == work.tiles[..., 0].numel() * 2 * 4
    assert len(scored) == int(work.retained.any(1).sum())  # of all heads at once
    assert len(scored) < int(work.visible.any(1).sum())


@pytest.mark.parametrize("k_tiles", [1, 31, 32, 33, 64, 70])
def test_bits_give_back_the_map_that_made_them(k_tiles):
    retained = torch.rand(2, 3, k_tiles, generator=torch.Generator().manual_seed(0)) < 0.5
    retained[0] = True
    support = pack_support(retained)
    assert support.shape == (2, 3, -(-k_tiles // 32))
    assert torch.equal(unpack_support(support, k_tiles), retained)
    for j in range(k_tiles):
        assert torch.equal((support[..., j // 32] >> (j % 32)) & 1 == 1, retained[..., j])


def test_the_support_is_saved_where_it_is_small_and_a_gradient_is_needed():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 64, 2, 16))

    def saved_bytes(v_head_dim: int = 16, **options) -> int:
        return mala_attn_func(q, k, v[..., :v_head_dim], causal=True, return_work=True, **options)[1].support_bytes

    assert saved_bytes(tile=(16, 16)) == 2 * 4 * 4  # heads, query tiles, bytes of a word
    assert saved_bytes(tile=(1, 1)) == 2 * 64 * 2 * 4 == 64 * 2 * 16 * 4 / 8  # just 1/8 of out
    assert saved_bytes(v_head_dim=15, tile=(1, 1)) == 0
    assert saved_bytes(v_head_dim=15, tile=(1, 1), save_support=True) == 2 * 64 * 2 * 4
    assert saved_bytes(tile=(16, 16), save_support=False) == 0
    with torch.no_grad():
        assert saved_bytes(tile=(16, 16)) == saved_bytes(tile=(16, 16), save_support=True) == 0


SUBSETS = [(case, without) for case in CASES for without in ("q", "kv", "k", "qk")] + [(CASES[1], "qkv")]


@pytest.mark.parametrize(("case", "without"), SUBSETS, ids=lambda x: x if isinstance(x, str) else x.id)
def test_a_subset_of_gradients_has_the_bits_of_all(case, without, spies):
    call = build(case)
    every, some = gradients(call), gradients(call, without=without)
    assert set(some) == set(every) - set(without)
    for name, gradient in some.items():
        assert torch.equal(gradient, every[name]), name
    needs_dq, needs_dkv, needs_dsinks = spies[1].calls[-1][-3:]
    assert (needs_dq, needs_dkv, needs_dsinks) == ("q" in some, bool({"k", "v"} & set(some)), "sinks" in some)


@pytest.mark.parametrize("impl", ["blockwise", "reference"])
def test_one_tensor_as_q_k_and_v_gets_the_sum_of_the_three_gradients(impl):
    x = torch.randn(1, 40, 2, 16, dtype=torch.float64, requires_grad=True)
    parts = [x.detach().clone().requires_grad_() for _ in range(3)]
    options = {"causal": True, "tile": (8, 8), "impl": impl}
    (together,) = torch.autograd.grad(mala_attn_func(x, x, x, **options).square().sum(), x)
    apart = torch.autograd.grad(mala_attn_func(*parts, **options).square().sum(), parts)
    assert_close(together, sum(apart))


def test_views_of_one_tensor_get_their_parts_of_its_gradient():
    qkv = torch.randn(1, 40, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    parts = [x.detach().clone().requires_grad_() for x in qkv.unbind(2)]
    options = {"causal": True, "tile": (8, 8)}
    (whole,) = torch.autograd.grad(mala_attn_func(*qkv.unbind(2), **options).square().sum(), qkv)
    apart = torch.autograd.grad(mala_attn_func(*parts, **options).square().sum(), parts)
    assert torch.equal(whole, torch.stack(apart, 2))


def test_only_out_carries_a_gradient():
    _, call = leaves_of(build(CASES[1]))
    out, lse, work = call.run("blockwise", return_lse=True, return_work=True)
    assert out.requires_grad
    assert not any(x.requires_grad for x in (lse, work.tiles, work.certificate))


@every_case
def test_plain_autograd_and_the_operators_give_the_same_bits(case, spies):
    call = build(case)
    through_operators = gradients(call, save_support=True)
    assert [len(spy.calls) for spy in spies] == [1, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "needs_operator", lambda tensors: False)
        for spy in spies:
            spy._init_fn = spy.operator._init_fn
        plain = gradients(call, save_support=True)
    assert [len(spy.calls) for spy in spies] == [1, 1]
    assert all(torch.equal(plain[name], through_operators[name]) for name in plain)


def test_what_has_to_see_an_operator_does():
    class Modes(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    call = build(Case(seqlen_q=20))
    with Modes() as mode:
        call.run("blockwise")
    assert "mala_hf.forward.default" in mode.seen
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(call.run("blockwise")) is FakeTensor


@pytest.mark.parametrize("as_operator", [False, True])
@pytest.mark.parametrize("impl", ["blockwise", "reference"])
def test_a_second_derivative_is_refused(impl, as_operator, monkeypatch):
    monkeypatch.setattr(operators, "needs_operator", lambda tensors: as_operator)
    leaves, call = leaves_of(build(Case(seqlen_q=20)))
    (dq,) = torch.autograd.grad(call.run(impl).square().sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated once more"):
        torch.autograd.grad(dq.sum(), leaves["q"])


def test_the_reference_saves_no_support():
    _, call = leaves_of(build(Case(seqlen_q=20)))
    with pytest.raises(ValueError, match="saves no support"):
        call.run("reference", save_support=True)


@pytest.mark.parametrize("name", ["save_support", "deterministic"])
def test_flags_that_are_no_flags_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be True or False, got 1"):
        build(Case(seqlen_q=20)).run("blockwise", **{name: 1})


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.id)
def test_gradients_repeat_bit_for_bit(case):
    call = build(case)
    one, other = (gradients(call, deterministic=True) for _ in range(2))
    assert all(torch.equal(gradient, other[name]) for name, gradient in one.items())


def test_gradients_at_tau_zero_are_the_numerical_ones():
    generator = torch.Generator().manual_seed(0)
    q, k, v, sinks = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((1, 5, 2, 3), (1, 7, 1, 3), (1, 7, 1, 2), (2,))
    )

    def attend(q, k, v, sinks):
        return mala_attn_func(q, k, v, sinks=sinks, tau=0, causal=True, softcap=3.0, tile=(2, 2), save_support=True)

    assert torch.autograd.gradcheck(attend, (q, k, v, sinks))


def test_autocast_does_not_reach_into_the_attention():
    call = build(Case(num_heads=4, num_kv_heads=2, sinks="learned"))
    plain = gradients(call)
    plain_out = call.run("blockwise")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(call.run("blockwise"), plain_out)
        for name, gradient in gradients(call).items():
            assert torch.equal(gradient, plain[name])


def test_a_thousand_steps_leave_nothing_behind():
    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    call = build(Case(seqlen_q=40, sinks="learned"))
    results = []

    def step(**options) -> None:
        leaves, graded = leaves_of(call)
        out = graded.run("blockwise", **options)
        results.append(weakref.ref(out))
        torch.autograd.grad(out.sum(), list(leaves.values()))

    step()
    before = live_tensors()
    for index in range(1000):
        step(save_support=bool(index % 2))
    assert live_tensors() <= before
    assert not any(result() is not None for result in results)


def test_a_forward_derivative_is_refused():
    q, k, v = torch.randn(3, 1, 20, 2, 16)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: mala_attn_func(x, k, v, causal=True), (q,), (torch.ones_like(q),))
    with dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        mala_attn_func(make_dual(q, torch.ones_like(q)), k, v, causal=True)

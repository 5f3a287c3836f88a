# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing of the public functions: the same bits with both kinds, and one search where supports are reused."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from calls import Call, build
from helpers import random_gradient
from inputs import Case
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from mala_hf.ops import blockwise, mala_attn_func
from mala_hf.ops.support_reuse import reuse_support

CASES = [
    Case(seqlen_q=90),
    Case(num_heads=4, num_kv_heads=2, sinks="learned", softcap=20.0, seqlen_q=50),
    Case(layout="packed", batch=5, seqlen_q=50),
    Case(layout="padded", batch=3, seqlen_q=80),
    Case(mask="full", seqlen_q=60),
]
KINDS = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "reused": {"use_reentrant": False, "context_fn": reuse_support},
}
REUSED = KINDS["reused"]


def leaves_of(call: Call) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in call.tensors_and_sinks()]


def attention(call: Call, impl: str = "blockwise"):
    """A function of the call's tensors: two layers of attention, the second on what the first made of q."""

    def attend(*leaves: Tensor) -> Tensor:
        call_of = call.with_(**dict(zip(("q", "k", "v", "sinks"), leaves, strict=False)))
        first = call_of.run(impl)
        return call_of.with_(q=0.1 * first.square() - call_of.q).run(impl)

    return attend


def step(call: Call, function, **kind) -> list[Tensor]:
    """Output and gradients of the function, checkpointed as ``kind`` says or not at all."""
    leaves = leaves_of(call)
    out = checkpoint(function, *leaves, **kind) if kind else function(*leaves)
    out.backward(random_gradient(call))
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.fixture
def forwards(monkeypatch) -> list[tuple]:
    """The arguments of every forward of the operator's implementation."""
    found, forward = [], blockwise.forward
    monkeypatch.setattr(blockwise, "forward", lambda *args: found.append(args) or forward(*args))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_checkpointing_changes_no_bit(case, kind, forwards):
    call = build(case)
    plain = step(call, attention(call))
    assert len(forwards) == 2
    checkpointed = step(call, attention(call), **KINDS[kind])
    assert len(forwards) == 6
    for got, expected in zip(checkpointed, plain, strict=True):
        assert torch.equal(got, expected)


def test_a_reused_support_changes_no_bit_of_the_kernels(device):
    call = build(Case(seqlen_q=33, num_heads=1, head_dim=32), device=device)
    plain = step(call, attention(call, "triton"))
    for got, expected in zip(step(call, attention(call, "triton"), **REUSED), plain, strict=True):
        assert torch.equal(got, expected)


def test_the_recomputation_takes_the_supports_in_order_and_searches_nothing(forwards, monkeypatch):
    searched, search = [], blockwise.retained_tiles
    monkeypatch.setattr(blockwise, "retained_tiles", lambda *args: searched.append(args[-1]) or search(*args))
    call = build(CASES[0])
    step(call, attention(call), **REUSED)
    save_support, support = zip(*(arguments[-2:] for arguments in forwards), strict=True)
    assert save_support == (True, True, False, False)
    assert support[:2] == (None, None)
    assert not torch.equal(*support[2:])
    half = len(searched) // 2
    assert all(known is None for known in searched[:half])
    assert all(known is not None for known in searched[half:])


def test_a_kept_graph_is_recomputed_with_the_same_supports(forwards):
    call = build(CASES[0])
    leaves = leaves_of(call)
    out = checkpoint(attention(call), *leaves, **REUSED)
    once, twice = (torch.autograd.grad(out, leaves, random_gradient(call), retain_graph=True) for _ in range(2))
    for gradient, expected in zip(twice, once, strict=True):
        assert torch.equal(gradient, expected)
    assert len(forwards) == 6
    assert forwards[2][-1] is forwards[4][-1]
    assert forwards[3][-1] is forwards[5][-1]


def test_checkpoints_inside_checkpoints_and_side_by_side_keep_their_own_supports():
    call = build(CASES[0])
    attend = attention(call)

    def nested(*leaves: Tensor) -> Tensor:
        inner = checkpoint(attend, *leaves, **REUSED)
        return attend(leaves[0] + inner, *leaves[1:])

    plain = step(call, lambda *leaves: attend(leaves[0] + attend(*leaves), *leaves[1:]))
    for got, expected in zip(step(call, nested, **REUSED), plain, strict=True):
        assert torch.equal(got, expected)

    def one_after_the_other(*leaves: Tensor) -> Tensor:
        return checkpoint(attend, leaves[0] + checkpoint(attend, *leaves, **REUSED), *leaves[1:], **REUSED)

    for got, expected in zip(step(call, one_after_the_other), plain, strict=True):
        assert torch.equal(got, expected)


def test_work_can_be_asked_for_in_both_forwards():
    call, works = build(CASES[0]), []

    def attend(*leaves: Tensor) -> Tensor:
        out, work = call.with_(**dict(zip("qkv", leaves, strict=True))).run("blockwise", return_work=True)
        works.append(work)
        return out

    with set_checkpoint_early_stop(False):
        step(call, attend, **REUSED)
    first, second = works
    assert torch.equal(first.tiles, second.tiles)
    assert torch.equal(first.certificate, second.certificate)
    assert first.support_bytes == second.support_bytes > 0


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_another_number_of_calls_is_an_error(first, then):
    call, numbers = build(CASES[0]), iter([first, then])

    def attend(*leaves: Tensor) -> Tensor:
        out = leaves[0]
        for _ in range(next(numbers)):
            out = call.with_(q=out, k=leaves[1], v=leaves[2]).run("blockwise")
        return out

    with set_checkpoint_early_stop(False), pytest.raises(ValueError, match="does the same both times"):
        step(call, attend, **REUSED)


def test_another_shape_is_an_error():
    call, lengths = build(CASES[0]), iter([90, 40])

    def attend(*leaves: Tensor) -> Tensor:
        length = next(lengths)
        return mala_attn_func(*(x[:, :length] for x in leaves), causal=True, tile=(16, 16)).sum().expand_as(leaves[0])

    with pytest.raises(ValueError, match=r"needs a support \(1, 2, 3, 1\) on cpu, the forward's was \(1, 2, 6, 1\)"):
        step(call, attend, **REUSED)


@pytest.mark.parametrize(("impl", "save_support"), [("blockwise", False), ("reference", None)])
def test_what_saves_no_support_cannot_reuse_it(impl, save_support):
    call = build(CASES[0])
    with pytest.raises(ValueError, match="leave save_support at None"):
        checkpoint(lambda: call.run(impl, save_support=save_support), **REUSED)


def test_an_error_inside_leaves_the_next_call_alone():
    call = build(CASES[0])
    with pytest.raises(ZeroDivisionError):
        checkpoint(lambda: 1 / 0, **REUSED)
    for got, expected in zip(step(call, attention(call)), step(call, attention(call), **REUSED), strict=True):
        assert torch.equal(got, expected)


def test_a_recomputation_in_another_thread_finds_its_supports(forwards):
    """On a GPU, backward runs in threads of autograd's."""
    call = build(CASES[0])
    plain = step(call, attention(call))
    leaves = leaves_of(call)
    out = checkpoint(attention(call), *leaves, **REUSED)
    thread = threading.Thread(target=out.backward, args=(random_gradient(call),))
    thread.start()
    thread.join()
    assert forwards[-1][-1] is not None
    for leaf, expected in zip(leaves, plain[1:], strict=True):
        assert torch.equal(leaf.grad, expected)


def test_supports_live_no_longer_than_their_graph():
    call = build(CASES[0])

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    step(call, attention(call), **REUSED)
    before = live_tensors()
    for _ in range(10):
        step(call, attention(call), **REUSED)
        checkpoint(attention(call), *leaves_of(call), **REUSED)  # never differentiated
    assert live_tensors() <= before


def test_a_compiled_checkpoint_has_the_same_bits_and_reuses_nothing():
    torch._dynamo.reset()
    call = build(CASES[0])
    attend = attention(call)

    def compiled(kind: dict):
        return torch.compile(lambda *leaves: checkpoint(attend, *leaves, **kind), backend="aot_eager", fullgraph=True)

    plain = step(call, attend)
    for got, expected in zip(step(call, compiled(KINDS["non-reentrant"])), plain, strict=True):
        assert torch.equal(got, expected)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no meaning in a compiled graph"):
        compiled(REUSED)(*leaves_of(call))

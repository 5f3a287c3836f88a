# SPDX-License-Identifier: Apache-2.0
"""Memory runs out at each allocation of a call in turn: the error comes through, nothing is kept, the next call is right."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from calls import build
from inputs import Case
from models import clone, tiny, tokens
from project import ROOT
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.append(str(ROOT / "scripts"))

from run_every_kernel import CALLS, Inputs

import mala_hf
from mala_hf.ops import mala_attn_func, mala_attn_with_kvcache_func, reuse_support
from mala_hf.ops.hf import recorders
from mala_hf.ops.support_reuse import is_reusing_support

MAKERS = ("empty", "empty_like", "empty_strided", "full", "full_like", "zeros", "zeros_like")
METHODS = ("new_empty", "new_full", "new_zeros")


class Memory:
    """Counts the tensors that the package makes; the ``fails_at``-th has no room."""

    def __init__(self, fails_at: int | None = None):
        self.made, self.fails_at = 0, fails_at

    def limited(self, make):
        def limited_make(*args, **kwargs):
            self.made += 1
            if self.made == self.fails_at:
                raise torch.OutOfMemoryError("injected")
            return make(*args, **kwargs)

        return limited_make


@contextmanager
def memory(fails_at: int | None = None) -> Iterator[Memory]:
    """Makers of tensors fail at the given one."""
    state = Memory(fails_at)
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in ((torch, MAKERS), (torch.Tensor, METHODS)):
            for name in names:
                patch.setattr(owner, name, state.limited(getattr(owner, name)))
        yield state


def held_bytes() -> int:
    """Of all storages that are alive."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in gc.get_objects() if type(x) is Tensor
    }
    return sum(storages.values())


def survives(run, record_property) -> None:
    """``run`` returns tensors; it fails at each allocation in turn, and after each failure gives what it gave before."""
    expected = run()
    with memory() as state:
        run()
    assert state.made, "nothing is allocated"
    before = held_bytes()
    for number in range(1, state.made + 1):
        with memory(fails_at=number), pytest.raises(torch.OutOfMemoryError, match="injected"):
            run()
    assert held_bytes() == before, f"one of {state.made} failures left something behind"
    for one, other in zip(run(), expected, strict=True):
        assert torch.equal(one, other)
    record_property("faults", state.made)


def small_call(**changes):
    return build(Case(seqlen_q=40, head_dim=16, num_heads=4, num_kv_heads=2, **changes), torch.float32)


def trained(run, call) -> list[Tensor]:
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_each_kernel_survives_a_failure_at_each_allocation(name, record_property):
    survives(lambda: CALLS[name](Inputs("cuda", torch.bfloat16)), record_property)


@pytest.mark.parametrize("save_support", [False, True])
@pytest.mark.parametrize("layout", ["fixed", "padded", "packed"])
def test_training_survives_a_failure_at_each_allocation(layout, save_support, record_property):
    call = small_call(layout=layout, batch=1 if layout == "fixed" else 2)
    if layout == "padded":  # what lies outside is NaN, whose sum says nothing
        call = call.with_(**{name: getattr(call, name).nan_to_num() for name in "qkv"})

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call.with_(q=q, k=k, v=v).run("blockwise", save_support=save_support)

    survives(lambda: trained(attend, call), record_property)


@pytest.mark.parametrize("form", ["two_pass", "split", "single"])
@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_a_decode_survives_a_failure_at_each_allocation(impl, form, device, record_property):
    if impl == "triton" and device == "cpu":
        pytest.skip("the interpreter makes tensors of its own")
    make = Inputs(device, torch.float32)
    q, k, v = make.qkv(1, 200)
    options = {"impl": impl, "decode": form, "return_lse": True}
    survives(lambda: list(mala_attn_func(q, k, v, causal=True, **options)), record_property)


@pytest.mark.parametrize("in_pages", [False, True])
def test_a_step_that_failed_can_be_made_again_on_the_same_cache(in_pages, device, record_property):
    """Whether or not the new token was written when memory ran out, the second attempt writes it and attends to it."""
    make = Inputs(device, torch.float32)
    q, k, v = make.qkv(1, 1)
    caches = [make.tensor(*((8, 32, 2, 64) if in_pages else (2, 96, 2, 64))) for _ in range(2)]
    options = {"block_table": make.ints(3, 1, 7, 2, 5, 0).view(2, 3)} if in_pages else {}
    lengths = make.ints(60, 33)
    survives(
        lambda: [mala_attn_with_kvcache_func(q, *caches, k, v, cache_seqlens=lengths, **options), *caches],
        record_property,
    )


def test_a_recomputation_that_failed_leaves_no_context_behind(record_property):
    call = small_call()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(
            lambda *x: call.with_(**dict(zip("qkv", x, strict=True))).run("blockwise"),
            q, k, v, use_reentrant=False, context_fn=reuse_support,
        )  # fmt: skip

    survives(lambda: trained(attend, call), record_property)
    assert not is_reusing_support()


@pytest.mark.transformers
def test_a_model_that_ran_out_of_memory_runs_again_and_listens_to_nobody(record_property):
    model, ids = clone(tiny("llama", peaked=4.0)), tokens(1, 40)
    model.set_attn_implementation("mala")

    def run() -> list[Tensor]:
        with torch.no_grad(), mala_hf.record_work(model):
            return [model(ids).logits]

    survives(run, record_property)
    assert not recorders


@pytest.mark.gpu
def test_a_gpu_that_is_full_is_said_and_gives_everything_back(device):
    """Not injected: the process may hold just less than the call needs."""
    make = Inputs(device, torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in make.qkv(4000, 4000, heads=16))
    expected = mala_attn_func(q, k, v, causal=True).detach()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    failed = 0
    before = held_bytes()
    for extra in range(0, 96, 4):  # MiB
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra * 2**20) / total)
        try:
            torch.autograd.grad(mala_attn_func(q, k, v, causal=True).sum(), (q, k, v))
        except torch.OutOfMemoryError:
            failed += 1
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert held_bytes() == before
        torch.cuda.empty_cache()
    assert 1 < failed < 24
    assert torch.equal(mala_attn_func(q, k, v, causal=True), expected)

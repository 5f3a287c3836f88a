# SPDX-License-Identifier: Apache-2.0
"""The interpreter that these tests run in computes what Triton's own does, and leaves the language as it was."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from backward_calls import gradient_of, run_backward, run_forward
from calls import build
from inputs import Case

interpreter = pytest.importorskip("triton.runtime.interpreter")
tl = interpreter.tl

pytestmark = pytest.mark.skipif(not hasattr(interpreter._patch_lang, "__wrapped__"), reason="kernels are compiled here")


def bits(case: Case) -> list[torch.Tensor]:
    call = build(case, torch.float16)
    forward, do = run_forward(call, return_work=True), gradient_of(call)
    gradients = run_backward(call, forward, do, forward.support)
    return [forward.out, forward.lse, forward.tiles, forward.support, *gradients.named().values()]


def test_every_bit_is_that_of_tritons_own_interpreter(monkeypatch):
    case = Case(seqlen_q=40, sinks="learned", window=(30, -1), softcap=20.0)
    quick = bits(case)
    for name in ("_patch_lang", "_get_np_dtype"):
        monkeypatch.setattr(interpreter, name, getattr(interpreter, name).__wrapped__)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=True))
    for mine, theirs in zip(quick, bits(case), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_the_language_is_looked_through_once_a_launch_whatever_it_calls(monkeypatch):
    looked: list[object] = []
    look = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda pkg, *rest: looked.append(pkg) or look(pkg, *rest))
    counts = []
    for seqlen in (32, 64):  # two programs that visit three tiles, four that visit ten
        run_forward(build(Case(seqlen_q=seqlen, num_heads=1), torch.float16))
        counts.append(len(looked))
        looked.clear()
    assert counts[0] == counts[1] > 0


def test_a_launch_that_fails_leaves_the_language_to_the_next():
    before = {name: getattr(tl, name) for name in ("load", "dot", "range", "static_assert")}
    call = build(Case(seqlen_q=16, num_heads=1), torch.float16)
    expected = run_forward(call).out
    with pytest.raises(interpreter.InterpreterError):
        run_forward(call.with_(tile=(16, 24)))  # not a power of two
    assert torch.equal(run_forward(call).out, expected)
    assert all(getattr(tl, name) is member for name, member in before.items())

# SPDX-License-Identifier: Apache-2.0
"""The vectorised form that models run on without a GPU: the reference's tiles, values, gradients, in little memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from calls import Call, build, heads
from helpers import assert_near, check_forward, random_gradient
from inputs import CASES, EMPTY_CASES, FAMILY_CASES, Case, ids
from torch import Tensor

from mala_hf.ops import blockwise, mala_attn_func, query_tile, reference

ALL_CASES = [*CASES, *FAMILY_CASES]
CLEAR_REFS = Path("/proc/self/clear_refs")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", ALL_CASES, ids=ids(ALL_CASES))
def test_forward_gives_the_rules_tiles_and_values(case, dtype):
    call = build(case, dtype)
    check_forward(call, *call.run("blockwise", return_lse=True, return_work=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case", [Case(), Case(family="captured"), Case(sinks="learned", softcap=20.0)], ids=lambda c: c.id
)
def test_forward_gives_the_rules_tiles_and_values_in_16_bit(case, dtype):
    call = build(case, dtype)
    check_forward(call, *call.run("blockwise", return_lse=True, return_work=True))


@pytest.mark.parametrize("keys_per_chunk", [16, 64])
def test_the_chunk_of_keys_is_no_part_of_the_rule(keys_per_chunk, monkeypatch):
    cases = (
        Case(seqlen_q=160),
        Case(seqlen_q=160, family="captured"),
        Case(window=(50, -1), seqlen_q=130),
        Case(mask="full", sinks="learned"),
    )
    for case in cases:
        call = build(case, torch.float64)
        out, lse, work = call.run("blockwise", return_lse=True, return_work=True)
        with monkeypatch.context() as patch:
            patch.setattr(query_tile, "KEYS_PER_CHUNK", keys_per_chunk)
            chunked_out, chunked_lse, chunked_work = call.run("blockwise", return_lse=True, return_work=True)
        torch.testing.assert_close(chunked_out, out)
        torch.testing.assert_close(chunked_lse, lse)
        torch.testing.assert_close(chunked_work.certificate, work.certificate)
        assert torch.equal(chunked_work.tiles, work.tiles)


def _backward(call: Call, impl: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], Tensor]:
    """Gradients of q, k, v (and sinks), and the tiles that a backward finds on its own."""
    found = []

    def recorded(backward):
        def record(*args):
            result = backward(*args)
            found.append(result[-1])
            return result

        return record

    leaves = [x.detach().requires_grad_() for x in call.tensors_and_sinks()]
    names = ["q", "k", "v", "sinks"][: len(leaves)]
    with monkeypatch.context() as patch:
        patch.setattr(blockwise, "backward", recorded(blockwise.backward))
        patch.setattr(reference, "backward_sequences", recorded(reference.backward_sequences))
        out = call.with_(**dict(zip(names, leaves, strict=True))).run(impl, save_support=False)
        gradients = torch.autograd.grad(out, leaves, random_gradient(call))
    return list(gradients), found[0]


@pytest.mark.parametrize("case", ALL_CASES, ids=ids(ALL_CASES))
def test_gradients_are_the_references(case, monkeypatch):
    call = build(case, torch.float64)
    gradients, tiles = _backward(call, "blockwise", monkeypatch)
    expected, expected_tiles = _backward(call, "reference", monkeypatch)
    assert torch.equal(tiles, expected_tiles)
    for got, truth in zip(gradients, expected, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, truth, rtol=1e-9, atol=1e-11 * (1 + float(truth.abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [Case(), Case(num_heads=4, num_kv_heads=2, sinks="learned", softcap=20.0), Case(family="captured", num_heads=3)],
    ids=lambda case: case.id,
)
def test_gradients_in_low_precision_err_no_more_than_plain_pytorch(case, dtype, monkeypatch):
    call = build(case, dtype)
    exact = call.with_(**dict(zip(["q", "k", "v"], (x.double() for x in (call.q, call.k, call.v)), strict=True)))
    gradients, tiles = _backward(call, "blockwise", monkeypatch)
    baseline, _ = _backward(call, "reference", monkeypatch)
    truth, expected_tiles = _backward(exact, "reference", monkeypatch)
    assert torch.equal(tiles, expected_tiles)
    for name, got, expected, plain in zip(["dq", "dk", "dv", "dsinks"], gradients, truth, baseline, strict=False):
        assert got.dtype == (torch.float32 if name == "dsinks" else dtype)
        assert_near(name, got, expected, plain)


@pytest.mark.parametrize("case", ALL_CASES, ids=ids(ALL_CASES))
def test_backward_support_lies_inside_forward_support(case, monkeypatch):
    call = build(case, torch.float32)
    forward = call.run("blockwise", return_work=True)[1].tiles
    _, backward = _backward(call, "blockwise", monkeypatch)
    assert torch.equal(forward == 0, backward == 0)
    assert not ((backward == 2) & (forward != 2)).any()


@pytest.mark.parametrize("case", EMPTY_CASES, ids=ids(EMPTY_CASES))
@pytest.mark.parametrize("impl", ["blockwise", "reference"])
def test_empty_inputs_give_empty_or_zero_outputs_and_gradients(case, impl, monkeypatch):
    call = build(case, torch.float32)
    out, lse = call.run(impl, return_lse=True)
    assert out.shape == (*call.q.shape[:-1], call.v.shape[-1])
    assert not out.any()
    assert lse.eq(-torch.inf).all()
    gradients, _ = _backward(call, impl, monkeypatch)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("causal", [True, False])
def test_a_padded_sequence_gives_the_bits_it_gives_alone(causal):
    call = build(Case(layout="padded", batch=3, causal=causal), torch.float64)
    out, lse = call.run("blockwise", return_lse=True)
    lengths = {name: call.options[name].tolist() for name in ("leftpad_k", "seqused_k", "seqused_q")}
    for b in range(3):
        low, high, rows = lengths["leftpad_k"][b], lengths["seqused_k"][b], lengths["seqused_q"][b]
        tensors = {"q": call.q[b : b + 1, :rows], "k": call.k[b : b + 1, low:high], "v": call.v[b : b + 1, low:high]}
        alone_out, alone_lse = call.with_(**tensors, leftpad_k=None, seqused_k=None, seqused_q=None).run(
            "blockwise", return_lse=True
        )
        assert torch.equal(alone_out[0], out[b, :rows])
        assert torch.equal(alone_lse[0], lse[b, :, :rows])


def test_padding_that_holds_nan_reaches_no_gradient(monkeypatch):
    call = build(Case(layout="padded", batch=3), torch.float64)
    assert call.k.isnan().any()
    gradients, _ = _backward(call, "blockwise", monkeypatch)
    for gradient in gradients:
        assert gradient.isfinite().all()
    for head in heads(call):
        assert gradients[1][head.batch, head.keys].any()
    assert not gradients[1][call.k.isnan()].any()


@pytest.mark.parametrize("impl", ["blockwise", "reference"])
def test_a_gradient_that_is_nan_on_padding_rows_reaches_nothing(impl):
    call = build(Case(layout="padded", batch=3, sinks="learned"), torch.float64)
    leaves = [x.detach().requires_grad_() for x in call.tensors_and_sinks()]
    out = call.with_(**dict(zip(["q", "k", "v", "sinks"], leaves, strict=True))).run(impl)
    do = random_gradient(call)
    for b, rows in enumerate(call.options["seqused_q"].tolist()):
        do[b, rows:] = float("nan")
    for gradient in torch.autograd.grad(out, leaves, do):
        assert gradient.isfinite().all()


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="peak memory is read from Linux's /proc")
def test_memory_is_that_of_a_row_of_tiles():
    """At 8192 x 8192 one score matrix is 268 MB; forward and backward together stay far below it."""

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    call = build(Case(seqlen_q=8192, num_heads=1, tile=(128, 128), head_dim=32), torch.float32)
    leaves = [x.requires_grad_() for x in (call.q, call.k, call.v)]
    call.with_(q=call.q[:, :512], k=call.k[:, :512], v=call.v[:, :512]).run("blockwise").sum().backward()
    CLEAR_REFS.write_text("5")  # resets the peak
    before = resident("VmRSS:")
    torch.autograd.grad(call.run("blockwise").sum(), leaves)
    assert resident("VmHWM:") - before < 8192 * 8192 * 4 / 4


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What Transformers' eager attention does on (batch, heads, seqlen, head_dim)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    illegal = torch.full(scores.shape[-2:], torch.finfo(scores.dtype).min).triu(1)
    return torch.softmax(scores + illegal, -1, dtype=torch.float32).to(q.dtype) @ v


def test_a_forward_at_2k_takes_about_as_long_as_eager_attention():
    """The claim is 1.5 times eager's time on idle cores; a loaded machine is given some slack."""
    q, k, v = (
        torch.randn(1, 2048, num_heads, 64, generator=torch.Generator().manual_seed(0)) for num_heads in (9, 3, 3)
    )

    def seconds(run) -> float:
        times = []
        for _ in range(4):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    eager = seconds(lambda: _eager(*(x.transpose(1, 2) for x in (q, k, v))))
    mine = seconds(lambda: mala_attn_func(q, k, v, causal=True, impl="blockwise"))
    print(f"\nblockwise {1e3 * mine:.0f} ms, eager {1e3 * eager:.0f} ms, ratio {mine / eager:.2f}")
    assert mine < 3 * eager

# SPDX-License-Identifier: Apache-2.0
"""Handing a call over to torch's dense kernels: it is the rule with every tile retained, it is chosen where it pays, and it says so."""

from __future__ import annotations

import pytest
import torch
from calls import Call, build
from inputs import Case, ids
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mala_hf.ops import (
    call_options,
    decode_choice,
    discover_choice,
    mala_attn_func,
    mala_attn_varlen_func,
)
from mala_hf.ops.cudnn_plans import PlanAccounts
from mala_hf.ops.reference import full_attention_head, legal_pairs
from mala_hf.workloads import peaked_inputs

SHAPES = [
    Case(seqlen_q=150, num_heads=4, num_kv_heads=2, batch=2, head_dim=32),
    Case(seqlen_q=80, seqlen_k=111, causal=False),
    Case(seqlen_q=100, strided=True, num_heads=4, num_kv_heads=2),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" may hand calls over on this device too."""
    monkeypatch.setattr(call_options, "hands_over", lambda q: True)


def on_device(case: Case, device: str) -> Call:
    return build(case, torch.bfloat16 if device == "cuda" else torch.float32, device)


def arguments(call: Call) -> tuple[Tensor, Tensor, Tensor, dict]:
    options = {name: x for name, x in call.options.items() if name not in ("tile", "decode", "impl")}
    return call.q, call.k, call.v, options


def attend(call: Call, **options):
    q, k, v, given = arguments(call)
    return mala_attn_func(q, k, v, **{**given, **options})


def full(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse of full attention in float64, shaped as MALA's."""
    q, k, v = (x.double() for x in (call.q, call.k, call.v))
    causal, groups = call.options["causal"], q.shape[2] // k.shape[2]
    legal = legal_pairs(q.shape[1], k.shape[1], (-1, 0 if causal else -1)).to(q.device)
    scale = call.options.get("softmax_scale") or q.shape[-1] ** -0.5
    pairs = [
        [
            full_attention_head(q[b, :, h], k[b, :, h // groups], v[b, :, h // groups], legal, softmax_scale=scale)[:2]
            for h in range(q.shape[2])
        ]
        for b in range(q.shape[0])
    ]
    out = torch.stack([torch.stack([one[0] for one in of], 1) for of in pairs])
    return out, torch.stack([torch.stack([one[1] for one in of]) for of in pairs])


@pytest.mark.parametrize("case", SHAPES, ids=ids(SHAPES))
def test_out_lse_and_work_are_those_of_full_attention(case, device):
    call = on_device(case, device)
    out, lse, work = attend(call, discovery="dense", return_lse=True, return_work=True)
    expected, expected_lse = full(call)
    tolerance = TOLERANCE[call.q.dtype]
    assert (out - expected).norm() < tolerance * expected.norm()
    assert (lse - expected_lse).abs().max() < max(1e-4, tolerance / 10)
    assert out.is_contiguous()
    assert (lse.dtype, lse.is_contiguous()) == (torch.float32, True)
    assert (work.choice, work.impl, work.support_bytes) == ("dense", "sdpa", 0)
    fused = attend(call, discovery="fused", tau=0.0, return_work=True)[1]
    assert torch.equal(work.tiles, fused.tiles)
    assert torch.equal(work.rows, fused.rows)
    assert work.certificate.shape == fused.certificate.shape
    assert not work.certificate.any()


@pytest.mark.parametrize("case", SHAPES, ids=ids(SHAPES))
def test_gradients_are_those_of_full_attention(case, device):
    gradients = []
    for options in ({"discovery": "dense"}, {"discovery": "fused", "tau": 0.0}):
        call = on_device(case, device)
        leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        out, lse = attend(call.with_(**dict(zip("qkv", leaves, strict=True))), return_lse=True, **options)
        assert not lse.requires_grad
        generator = torch.Generator(device).manual_seed(0)
        out.backward(torch.randn(out.shape, generator=generator, device=device, dtype=out.dtype))
        gradients.append([x.grad for x in leaves])
    for dense, fused in zip(*gradients, strict=True):
        assert (dense - fused).norm() < 2 * TOLERANCE[dense.dtype] * fused.norm()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": (5, 0)}, "a window"),
        ({"softcap": 20.0}, "softcap"),
        ({"seqused_k": torch.tensor([40])}, "padded or packed"),
        ({"mask": torch.ones(50, 50, dtype=torch.bool)}, "a mask"),
        ({"sinks": torch.zeros(2)}, "attention sinks"),
        ({"impl": "blockwise"}, "impl='blockwise'"),
        ({"save_support": True}, "save_support=True"),
        ({"deterministic": True}, "deterministic=True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_torch_lacks_is_refused_when_asked_for_and_not_chosen_by_itself(options, words, handed_over):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 50, 2, 16) for _ in range(3))
    with pytest.raises(ValueError, match=f"discovery='dense' does not cover .*{words}"):
        mala_attn_func(q, k, v, causal=True, discovery="dense", **options)
    _, work = mala_attn_func(q, k, v, causal=True, return_work=True, **options)
    assert work.choice == "fused"
    assert work.reason


def test_fewer_queries_than_keys_and_packed_sequences_are_refused(handed_over):
    q, k = torch.randn(1, 70, 2, 16), torch.randn(1, 90, 2, 16)
    with pytest.raises(ValueError, match="fewer or more queries than keys"):
        mala_attn_func(q, k, k, causal=True, discovery="dense")
    assert mala_attn_func(q, k, k, causal=True, return_work=True)[1].choice == "fused"
    ends = torch.tensor([0, 30, 70], dtype=torch.int32)
    with pytest.raises(ValueError, match="does not cover packed"):
        mala_attn_varlen_func(q[0], q[0], q[0], cu_seqlens_q=ends, cu_seqlens_k=ends, discovery="dense")


def test_short_calls_and_tau_0_are_handed_over_and_say_why(handed_over, monkeypatch):
    monkeypatch.setattr(discover_choice, "SHORT", 120)
    calls = {length: build(Case(seqlen_q=length), torch.float32, "cpu") for length in (119, 120)}
    works = {length: attend(call, return_work=True)[1] for length, call in calls.items()}
    assert [works[119].choice, works[120].choice] == ["dense", "fused"]
    assert "fewer than 120 keys" in works[119].reason
    assert (works[119].work_fraction == 1).all()
    assert attend(calls[120], tau=0.0, return_work=True)[1].reason == "tau = 0 retains every tile; by torch"
    dense, same = attend(calls[119]), attend(calls[119], discovery="dense")
    assert torch.equal(dense, same)
    assert not torch.equal(dense, attend(calls[119], discovery="fused"))


@pytest.mark.parametrize("length", [70, 700])
def test_a_step_over_a_short_cache_is_handed_over(handed_over, monkeypatch, length):
    monkeypatch.setattr(decode_choice, "SHORT", 120)
    monkeypatch.setattr(discover_choice, "SHORT", 120)
    call = build(Case(seqlen_q=1, seqlen_k=length, num_heads=4, num_kv_heads=2, batch=2), torch.float32, "cpu")
    out, lse, work = attend(call, return_lse=True, return_work=True)
    assert (work.choice, work.form) == ("dense", "single" if length < 120 else "split")
    expected, expected_lse = full(call)
    assert (work.work_fraction == 1).all()
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-5)
    for asked in ({"decode": "two_pass"}, {"num_splits": 2}, {"discovery": "fused"}):
        assert attend(call, **asked, return_work=True)[1].form == "two_pass"
    two = build(Case(seqlen_q=2, seqlen_k=length), torch.float32, "cpu")
    assert attend(two, return_work=True)[1].form == "split"  # torch's kernels would not align two


def test_a_tile_that_is_asked_for_is_used(handed_over):
    call = build(Case(seqlen_q=100), torch.float32, "cpu")
    assert attend(call, tile=(16, 16), return_work=True)[1].choice == "fused"


def test_on_a_cpu_nothing_is_handed_over():
    q = torch.randn(1, 50, 2, 16)
    work = mala_attn_func(q, q, q, causal=True, return_work=True)[1]
    assert (work.choice, work.reason, work.impl) == ("fused", "nothing else covers the call", "blockwise")


class Names(TorchDispatchMode):
    """Remembers which operators ran."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_malas_own_operator(handed_over):
    q = torch.randn(1, 50, 2, 16)
    with Names() as mode:
        _, work = mala_attn_func(q, q, q, causal=True, return_work=True)
    assert work.choice == "fused"
    assert any(name.endswith("forward.default") and not name.startswith("aten") for name in mode.names)


def test_a_recomputation_that_reuses_support_stays_with_malas_tiles(handed_over):
    from mala_hf.ops import reuse_support

    call = build(Case(seqlen_q=100), torch.float32, "cpu")
    leaf = call.q.detach().requires_grad_()

    def layer(x):
        return attend(call.with_(q=x))

    out = torch.utils.checkpoint.checkpoint(layer, leaf, use_reentrant=False, context_fn=reuse_support)
    assert torch.equal(out, attend(call, discovery="fused"))
    out.sum().backward()


def test_a_compiled_graph_chooses_by_length(handed_over, monkeypatch):
    monkeypatch.setattr(discover_choice, "SHORT", 60)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager", dynamic=False)
    def compiled(q, k, v):
        return mala_attn_func(q, k, v, causal=True)

    for length, way in ((50, "dense"), (70, "fused")):
        call = build(Case(seqlen_q=length, num_heads=4, num_kv_heads=2), torch.float32, "cpu")
        expected = mala_attn_func(call.q, call.k, call.v, causal=True, discovery=way)
        torch.testing.assert_close(
            compiled(call.q, call.k, call.v), expected, rtol=0, atol=1e-5 if way == "dense" else 0
        )
    torch._dynamo.reset()


# the look at a long call


def test_heads_that_go_different_ways_are_put_together(handed_over, monkeypatch, device):
    """Flat heads are dense, the others what the fused kernel makes of them, out, lse, work and gradients."""
    for name, value in (("SHORT", 0), ("MIN_LOOK", 256), ("MIN_SPLIT", 256)):
        monkeypatch.setattr(discover_choice, name, value)
    monkeypatch.setattr(discover_choice, "is_measured", lambda device: True)
    monkeypatch.setattr(PlanAccounts, "has_plan", lambda *_: True)
    place = {"dtype": torch.float32 if device == "cpu" else torch.bfloat16, "device": device}
    inputs = peaked_inputs(1024, links=0.5, num_heads=6, num_kv_heads=3, head_dim=32, flat_share=0.3, **place)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse, work = mala_attn_func(*leaves, causal=True, return_lse=True, return_work=True)
    assert work.choice == "dense, fused"
    assert "dense in KV heads 0: a sample of the rows retains more than 60%" in work.reason
    assert work.impl == ("triton, sdpa" if device == "cuda" else "sdpa, blockwise")
    flat, peaked = [0, 1], [2, 3, 4, 5]
    assert (work.work_fraction[:, flat] == 1).all()
    assert (work.work_fraction[:, peaked] < 1).all()
    do = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, do)
    for heads, kv_heads, way in ((flat, [0], "dense"), (peaked, [1, 2], "fused")):
        own = [leaves[0][:, :, heads], leaves[1][:, :, kv_heads], leaves[2][:, :, kv_heads]]
        own = [x.detach().requires_grad_() for x in own]
        expected = mala_attn_func(*own, causal=True, discovery=way, return_lse=True, return_work=True)
        assert torch.equal(out[:, :, heads], expected[0])
        assert torch.equal(lse[:, heads], expected[1])
        assert torch.equal(work.tiles[:, heads], expected[2].tiles)
        assert torch.equal(work.certificate[:, heads], expected[2].certificate)
        for mine, theirs, of in zip(
            gradients, torch.autograd.grad(expected[0], own, do[:, :, heads]), (heads, kv_heads, kv_heads), strict=True
        ):
            assert (mine[:, :, of] - theirs).norm() <= 1e-2 * theirs.norm()

# SPDX-License-Identifier: Apache-2.0
"""INT8 discovery: every tile that the exact test retains is a candidate, and the result is that of the fused kernel, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from calls import Call, build
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import FAMILIES, Case, ids
from project import ROOT
from torch import Tensor

from mala_hf.bench.workload import Workload, workload_of
from mala_hf.ops import discover, discover_choice
from mala_hf.ops import forward as forward_module
from mala_hf.ops.support_bits import unpack_support
from mala_hf.ops.tile_config import DiscoveryConfig

DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
IN_16_BIT = [name for name in FAMILIES if name != "near_threshold"]
CASES = [
    *(Case(family=name, seqlen_q=110) for name in IN_16_BIT),
    Case(family="near_threshold", seqlen_q=150, causal=False),
    Case(seqlen_q=37, seqlen_k=150),
    Case(seqlen_q=90, seqlen_k=41),
    Case(seqlen_q=1, seqlen_k=200),
    Case(seqlen_q=63, seqlen_k=111, causal=False),
    Case(window=(30, -1)),
    Case(causal=False, window=(17, 5)),
    Case(num_heads=4, num_kv_heads=2, batch=2, strided=True),
    Case(head_dim=72),
    Case(sinks="learned"),
    Case(tau=10.0),
    Case(tau=0.1),
    Case(seqlen_q=150, tile=(16, 32)),
    Case(seqlen_q=150, tile=(32, 16)),
    Case(seqlen_q=1, seqlen_k=1),
]


def arguments_of(call: Call) -> list:
    """What the public function hands to ``launch_forward``: q, k, v, settings, sequences, sinks, mask."""
    arguments: list = []
    launch = forward_module.launch_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_module, "launch_forward", lambda *args: arguments.extend(args[:7]) or launch(*args))
        call.run("triton")
    return arguments


def retained_and_candidates(arguments: list, rows: int, **choice) -> tuple[Tensor, Tensor]:
    """bool (batch, heads, q_tiles, k_tiles) maps."""
    q, k, _, numbers, sequences = arguments[:5]
    support = forward_module.launch_forward(*arguments, return_work=False, save_support=True)[4]
    candidates = discover.launch_discover(q, k, numbers, sequences, DiscoveryConfig(rows, 4, 2), **choice)
    k_tiles = sequences.tile_grid(numbers.tile)[1]
    return unpack_support(support, k_tiles), unpack_support(candidates, k_tiles)


def assert_same_result(call: Call) -> None:
    fused = call.run("triton", discovery="fused", return_lse=True)
    found = call.run("triton", discovery="int8", return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(found, fused, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_candidates_hold_all_retained_tiles_and_the_result_is_the_fused_one(case, dtype, device):
    if case.family == "huge_norms" and dtype == torch.float16:
        pytest.skip("scores beyond float16")
    call = build(case, dtype, device)
    retained, candidates = retained_and_candidates(arguments_of(call), rows=32)
    assert not (retained & ~candidates).any()
    assert_same_result(call)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_tiles_are_ruled_out_whatever_the_rows_taken_at_once(rows, device):
    call = build(Case(seqlen_q=300), torch.float16, device)
    retained, candidates = retained_and_candidates(arguments_of(call), rows)
    visible = call.run("triton", return_work=True)[1].visible
    assert not (retained & ~candidates).any()
    assert (candidates & visible).sum() < 0.8 * visible.sum()


@pytest.mark.parametrize("family", ["peaked", "needle", "outlier_channels"])
def test_gradients_are_those_of_the_fused_kernel(family, device):
    gradients = []
    for discovery in ("fused", "int8"):
        call = build(Case(family=family, num_heads=4, num_kv_heads=2, seqlen_q=70), torch.float16, device)
        leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        call.with_(**dict(zip("qkv", leaves, strict=True))).run("triton", discovery=discovery).sum().backward()
        gradients.append([x.grad for x in leaves])
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def adversarial(
    seed: int, shape: tuple[int, int, int], spread: float, offset: float, outlier: float
) -> tuple[Tensor, Tensor]:
    """q, k whose INT8 forms are poor: one channel and a common offset far above the rest, rows of very different norms."""
    generator = torch.Generator().manual_seed(seed)
    seqlen, heads, head_dim = shape
    q, k = (torch.randn(1, seqlen, heads, head_dim, generator=generator) for _ in range(2))
    k = k * torch.exp(spread * torch.randn(1, seqlen, heads, 1, generator=generator)) + offset
    k[..., seed % head_dim] += outlier
    q = q * torch.exp(spread * torch.randn(1, seqlen, heads, 1, generator=generator))
    return q, k


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.5, 1.5]),
    offset=st.sampled_from([0.0, 3.0]),
    outlier=st.sampled_from([0.0, 40.0]),
    scale=st.sampled_from([0.05, 0.3, 1.0]),
    tau=st.sampled_from([0.3, 1.0, 30.0]),
    seqlen=st.integers(17, 90),
)
def test_bounds_hold_where_int8_is_poor(seed, spread, offset, outlier, scale, tau, seqlen):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = build(Case(seqlen_q=seqlen, num_heads=1, head_dim=32, tau=tau, softmax_scale=scale), torch.float16, device)
    q, k = adversarial(seed, (seqlen, 1, 32), spread, offset, outlier)
    call = base.with_(q=q.half().to(device), k=k.half().to(device))
    if not math.isfinite(float(call.q.abs().max())) or not math.isfinite(float(call.k.abs().max())):
        return
    retained, candidates = retained_and_candidates(arguments_of(call), rows=32)
    assert not (retained & ~candidates).any()
    assert_same_result(call)


class WithNumbers:
    """The portable kernel that passes over INT8 keys, given other numbers of the rows, of which ``which`` are ``value``."""

    def __init__(self, which: slice, value: float):
        self.kernel, self.which, self.value = discover.discover_kernel, which, value

    def __getitem__(self, grid):
        def run(q, rows, *args, **kwargs):
            rows[:, :, self.which] = self.value
            return self.kernel[grid](q, rows, *args, **kwargs)

        return run


@pytest.mark.parametrize("knows_errors", [True, False])
def test_the_error_terms_are_needed_and_enough(knows_errors, device, monkeypatch):
    """A channel that the queries do not use takes nearly all of the keys' INT8 range."""
    call = build(Case(seqlen_q=200, num_heads=1), torch.float16, device)
    q, k = call.q.clone(), call.k.clone()
    q[..., 0], k[..., 0], k[:, ::2, :, 0] = 0, 1500, -1500
    if not knows_errors:
        monkeypatch.setattr(discover, "discover_kernel", WithNumbers(slice(2, 4), 0))  # nothing is lost in INT8
    retained, candidates = retained_and_candidates(arguments_of(call.with_(q=q, k=k)), rows=32, use_hopper=False)
    assert (retained & ~candidates).any() != knows_errors


def test_a_nan_key_stays_a_candidate_everywhere(device):
    call = build(Case(seqlen_q=100), torch.float16, device)
    k = call.k.clone()
    k[:, 20] = float("nan")
    arguments = arguments_of(call.with_(k=k))
    _, candidates = retained_and_candidates(arguments, rows=32)
    _, num_heads, q_tiles, _ = candidates.shape
    assert candidates[..., 1].sum() == num_heads * (q_tiles - 1)  # every query tile that sees it


@pytest.mark.parametrize(
    ("case", "dtype", "words"),
    [
        (Case(), torch.float32, "float32 inputs"),
        (Case(layout="padded", batch=3), torch.float16, "padded or packed"),
        (Case(layout="packed", batch=5), torch.float16, "padded or packed"),
        (Case(mask="full"), torch.float16, "a mask"),
        (Case(softcap=20.0), torch.float16, "softcap"),
        (Case(tau=0.0), torch.float16, "tau = 0"),
    ],
    ids=lambda value: value.id if isinstance(value, Case) else None,
)
def test_what_it_does_not_cover_is_refused(case, dtype, words, device):
    with pytest.raises(ValueError, match=f"discovery='int8' does not cover .*{words}"):
        build(case, dtype, device).run("triton", discovery="int8")


def test_other_implementations_and_words_are_refused(device):
    call = build(Case(), torch.float16, device)
    with pytest.raises(ValueError, match="does not cover impl='blockwise'"):
        call.run("blockwise", discovery="int8")
    with pytest.raises(ValueError, match="must be 'auto', 'fused', 'int8' or 'dense'"):
        call.run("triton", discovery="fp8")


def _chosen(call: Call, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What "auto" runs, were this a Hopper GPU and these sequences long."""
    for name, value in (("MIN_LOOK", 300), ("MAX_INT8_FRACTION", {64: 0.9})):
        monkeypatch.setattr(discover_choice, name, value)
    monkeypatch.setattr(discover_choice, "is_measured", lambda device: True)
    ran = []
    launch = forward_module.launch_discover
    monkeypatch.setattr(forward_module, "launch_discover", lambda *args: ran.append("int8") or launch(*args))
    out = call.run("triton")
    assert torch.equal(out, call.run("triton", discovery="fused"))
    return ran or ["fused"]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case(seqlen_q=320, num_heads=1, num_kv_heads=1, tile=(16, 16)), ["int8"]),
        (Case(family="flat", seqlen_q=320, num_heads=1, num_kv_heads=1, tile=(16, 16)), ["fused"]),
        (Case(seqlen_q=280, tile=(64, 64)), ["fused"]),
        (Case(seqlen_q=20, seqlen_k=320), ["fused"]),
        (Case(seqlen_q=320, softcap=20.0, tile=(64, 64)), ["fused"]),
        (Case(seqlen_q=320, tau=0.0, tile=(64, 64)), ["fused"]),
    ],
    ids=["peaked", "flat", "short", "few queries", "softcap", "tau 0"],
)
def test_auto_looks_at_a_sample_of_the_rows(case, expected, device, monkeypatch):
    assert _chosen(build(case, torch.float16, device), monkeypatch) == expected


@pytest.mark.gpu
def test_auto_takes_int8_for_long_peaked_inputs_only_and_never_waits_in_a_graph(device):
    from mala_hf.ops import mala_attn_func
    from mala_hf.workloads import peaked_inputs

    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
    inputs = peaked_inputs(32768, links=1.0, **shape)
    arguments = arguments_of(
        Call(Case(), inputs.q, inputs.k, inputs.v, {"causal": True, "tile": None, "decode": "single"})
    )
    q, k, v, numbers, sequences = arguments[:5]
    may_be = ("fused", "int8")
    assert [one.way for one in discover_choice.choose(q, k, numbers, sequences, may_be)] == ["int8"]
    assert [one.way for one in discover_choice.choose(torch.randn_like(q), k, numbers, sequences, may_be)] == ["fused"]
    graph = torch.cuda.CUDAGraph()
    expected = mala_attn_func(q, k, v, causal=True)
    with torch.cuda.graph(graph):
        out = mala_attn_func(q, k, v, causal=True)
    graph.replay()
    assert torch.equal(out, expected)


WORKLOADS = [
    "16,8,128,8192,400", "16,8,128,8192,flat", "16,8,128,8192,400:0.25", "16,8,64,8192,400", "32,8,128,8192,400",
    "16,8,128,2047,400", "16,8,128,131072,1000", "captured",
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("shape", WORKLOADS)
def test_on_every_workload_of_the_benchmark_bits_and_retained_tiles_are_the_fused_kernels(shape, device):
    capture = ROOT / "tests" / "data" / "smollm2_layer19_kv1.safetensors"
    workload = Workload(None, None, captured=capture) if shape == "captured" else workload_of(shape)
    inputs = workload.inputs(torch.device(device))
    call = Call(
        Case(), inputs.q, inputs.k, inputs.v, {"causal": True, "tile": None, "decode": "single", "discovery": "fused"}
    )
    arguments = arguments_of(call)
    fused, found = (
        forward_module.launch_forward(*arguments, return_work=False, save_support=True, discovery=way)
        for way in ("fused", "int8")
    )
    for name, mine, theirs in zip(
        ("out", "lse", "support"), (*found[:2], found[4]), (*fused[:2], fused[4]), strict=True
    ):
        assert torch.equal(mine, theirs), name

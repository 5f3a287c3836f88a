# SPDX-License-Identifier: Apache-2.0
"""A decode that "auto" makes dense: where its keys are few or tau is 0, every tile retained, and it says so."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from mala_hf.ops import (
    call_options,
    decode_choice,
    discover_probe,
    mala_attn_func,
    mala_attn_with_kvcache_func,
    quantize_keys,
)
from mala_hf.ops.choice_memory import REPEATS
from mala_hf.ops.tile_config import DECODE_LAUNCH_16BIT, DENSE_DECODE_LAUNCH_16BIT

KEY_BYTES = 2 * 32 * 4  # of a key of all heads in float32
LIMIT = 200 * KEY_BYTES  # one sequence of 200 keys


@pytest.fixture(autouse=True)
def short_decodes_may_be_dense(monkeypatch):
    """Here too, and below 200 keys; short steps are not torch's."""
    monkeypatch.setattr(call_options, "hands_over", lambda q: True)
    monkeypatch.setattr(decode_choice, "SHORT_BYTES", LIMIT)
    monkeypatch.setattr(decode_choice, "SHORT", 0)


def tensors(seqlen_k: int, batch: int = 1, seqlen_q: int = 1):
    """q, k, v of which the first half of the keys is worth nothing."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, n, h, 32, generator=generator) for n, h in ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2))
    )
    q[..., 0] += 4
    k[:, seqlen_k // 2 :, :, 0] += 20
    return q, k, v


def way(seqlen_k: int, batch: int = 1, seqlen_q: int = 1, **options) -> tuple[str, str]:
    work = mala_attn_func(*tensors(seqlen_k, batch, seqlen_q), causal=True, return_work=True, **options)[1]
    return work.form, work.choice


def test_all_keys_of_a_call_count_and_with_a_window_those_that_are_seen():
    assert way(199) == ("split", "dense")
    assert way(200) == ("two_pass", "fused")
    assert way(99, batch=2, seqlen_q=3) == ("split", "dense")
    assert way(100, batch=2) == ("two_pass", "fused")
    assert way(500, window=(150, -1)) == ("split", "dense")
    assert way(500, window=(300, -1)) == ("two_pass", "fused")


def test_where_something_was_asked_for_every_tile_is_tested():
    asked = (
        {"discovery": "fused"},
        {"impl": "blockwise"},
        {"tile": (16, 16)},
        {"num_splits": 3},
        {"deterministic": True},
    )
    for options in asked:
        assert way(150, **options) == ("two_pass", "fused")
    for form in ("two_pass", "split"):
        assert way(150, decode=form) == (form, "fused")
    assert way(150, decode="single")[0] == "single"


def test_a_plane_is_read_where_there_are_many_keys():
    _, k, _ = tensors(150)
    assert way(150, key_plane=quantize_keys(k)) == ("split", "dense")
    assert way(150, key_plane=quantize_keys(k), decode="int8_two_pass") == ("int8_two_pass", "int8")
    assert way(250, key_plane=quantize_keys(tensors(250)[1])) == ("int8_two_pass", "int8")


@pytest.mark.parametrize("options", [{}, {"sinks": torch.ones(4)}, {"softcap": 9.0}, {"window": (90, -1)}], ids=str)
def test_nothing_is_omitted_and_the_reason_is_given(options):
    q, k, v = tensors(150, batch=1, seqlen_q=2)
    call = {"causal": True, "return_lse": True, "return_work": True, **options}
    out, lse, work = mala_attn_func(q, k, v, **call)
    assert (work.work_fraction == 1).all()
    assert not work.certificate.any()
    assert work.reason.startswith("fewer than")
    assert work.reason.endswith("MALA's own kernel with tau = 0")
    exact, exact_lse, tested = mala_attn_func(q, k, v, **call, tau=0.0, discovery="fused")
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(work.tiles, tested.tiles)
    assert (mala_attn_func(q, k, v, **call, discovery="fused")[2].work_fraction < 1).all() or options.get("window")


def test_at_tau_0_a_decode_of_any_length_is_dense():
    assert way(700, tau=0.0) == ("split", "dense")
    assert way(700, tau=0.0, discovery="fused") == ("two_pass", "fused")


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_counts_with_all_its_room(paged):
    def form(room: int, **options) -> tuple[str, str]:
        q, k, v = tensors(room)
        table = torch.arange(room // 10, dtype=torch.int32)[None] if paged else None
        caches = [x.reshape(-1, 10, 2, 32) if paged else x for x in (k, v)]
        lengths = torch.tensor([40], dtype=torch.int32)
        work = mala_attn_with_kvcache_func(
            q, *caches, cache_seqlens=lengths, block_table=table, return_work=True, **options
        )[1]
        return work.form, work.choice

    assert form(190) == ("split", "dense")
    assert form(210) == ("two_pass", "fused")
    assert form(190, discovery="fused") == ("two_pass", "fused")


def test_a_compiler_asks_for_no_length_that_varies():
    """Two graphs, of one length and of all others: a cache that grows beyond the limit compiles nothing new."""

    def step(q, k, v):
        return mala_attn_func(q, k, v, causal=True)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    with torch.no_grad():
        for length in (150, 160, 190, 210, 300):
            call = tensors(length)
            torch.testing.assert_close(compiled(*call), step(*call), rtol=0.02, atol=0.02)
    forms = [next(form for form in ("split", "two_pass") if repr(form) in graph.code) for graph in counter.graphs]
    assert forms == ["split", "two_pass"]


def test_splits_that_retain_all_have_the_tiles_of_those_that_test():
    for dim, launch in DENSE_DECODE_LAUNCH_16BIT.items():
        assert launch.block_n == DECODE_LAUNCH_16BIT[dim].block_n


def test_flat_scores_make_later_steps_dense_until_the_next_look(monkeypatch, device):
    monkeypatch.setattr(decode_choice, "is_measured", lambda device: True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 32, generator=generator).to(device) for n, h in ((1, 4), (300, 2), (300, 2)))
    looks = []
    look = discover_probe.sampled_counts
    monkeypatch.setattr(discover_probe, "sampled_counts", lambda *call: looks.append(1) or look(*call))

    def work(k: torch.Tensor):
        return mala_attn_func(q, k, v, causal=True, return_work=True)[1]

    flat = work(k)
    assert (flat.form, flat.choice) == ("split", "dense")
    assert flat.reason.startswith("a look at the scores retains more than 70% of the tiles")
    assert flat.work_fraction.eq(1).all()
    peaked = k.clone()
    peaked[:, 7] = 100 * q[:, 0, ::2]
    assert work(peaked).choice == "dense"  # remembered
    assert len(looks) == 1
    monkeypatch.setattr(decode_choice, "is_capturing", lambda: True)
    assert [work(peaked).choice for _ in range(REPEATS)] == ["dense"] * REPEATS  # a graph does not count
    monkeypatch.setattr(decode_choice, "is_capturing", lambda: False)
    ways = [work(peaked).form for _ in range(REPEATS)]
    assert ways == ["split"] * (REPEATS - 2) + ["two_pass"] * 2


def test_a_graph_that_remembers_nothing_and_sequences_of_different_lengths_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(decode_choice, "is_measured", lambda device: True)
    q, k, v = (torch.randn(2, n, h, 32) for n, h in ((1, 4), (300, 2), (300, 2)))
    call = {"causal": True, "return_work": True}
    assert mala_attn_func(q, k, v, **call, seqused_k=torch.tensor([300, 250], dtype=torch.int32))[1].form == "two_pass"
    monkeypatch.setattr(decode_choice, "is_capturing", lambda: True)
    assert mala_attn_func(q, k, v, **call)[1].form == "two_pass"

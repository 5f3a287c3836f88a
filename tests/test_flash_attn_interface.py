# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's functions with MALA inside: every argument is done or refused, tau comes from where it was set."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from mala_hf import ops
from mala_hf.ops import (
    flash_attn_func,
    flash_attn_interface,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    mala_attn_func,
    mala_attn_varlen_func,
    mala_attn_with_kvcache_func,
)

PAGE = 8


def qkv(seqlen: int = 60, batch: int = 2) -> list[torch.Tensor]:
    """q (batch, seqlen, 4, 16), k, v with 2 heads; peaked, so that tau matters."""
    generator = torch.Generator().manual_seed(0)
    topics = 1.5 * torch.randn(batch, seqlen // 10, 1, 16, generator=generator).repeat_interleave(10, 1)
    q, k, v = (torch.randn(batch, seqlen, heads, 16, generator=generator) for heads in (4, 2, 2))
    return [q + topics, k + topics, v]


@pytest.fixture(autouse=True)
def default_is_one(monkeypatch):
    monkeypatch.setattr(flash_attn_interface, "_default_tau", 1.0)


OPTIONS = {
    "plain": ({"causal": True}, {"causal": True}),
    "not causal": ({}, {}),
    "window": ({"causal": True, "window_size": (9, 9)}, {"causal": True, "window": (9, 0)}),
    "softcap and scale": ({"softcap": 5.0, "softmax_scale": 0.4}, {"softcap": 5.0, "softmax_scale": 0.4}),
    "sinks": ({"s_aux": torch.arange(4.0)}, {"sinks": torch.arange(4.0)}),
    "nothing asked for": ({"softcap": None, "dropout_p": 0.0, "deterministic": True, "tau": 0.5}, {"tau": 0.5}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_every_option_has_its_meaning(case):
    theirs, ours = OPTIONS[case]
    q, k, v = qkv()
    assert torch.equal(flash_attn_func(q, k, v, **theirs), mala_attn_func(q, k, v, **ours))
    bounds = torch.tensor([0, 25, 60], dtype=torch.int32)
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 35, "max_seqlen_k": 35}
    packed = flash_attn_varlen_func(q[0], k[0], v[0], **lengths, **theirs)
    assert torch.equal(packed, mala_attn_varlen_func(q[0], k[0], v[0], **lengths, **ours))
    filled = torch.tensor([60, 41])
    cached = flash_attn_with_kvcache(q[:, -3:], k, v, cache_seqlens=filled, **theirs)
    ours = {"causal": False, **ours}
    assert torch.equal(cached, mala_attn_with_kvcache_func(q[:, -3:], k, v, cache_seqlens=filled, **ours))
    if case not in ("plain", "nothing asked for"):
        assert not torch.allclose(flash_attn_func(q, k, v, **theirs), flash_attn_func(q, k, v, causal=True))


def test_the_longest_sequence_may_be_a_tensor_or_missing():
    q, k, v = (x[0] for x in qkv())
    bounds = torch.tensor([0, 25, 60], dtype=torch.int32)
    outs = [
        flash_attn_varlen_func(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=n, max_seqlen_k=n)
        for n in (35, torch.tensor(35), None)
    ]
    # paged attention of older Transformers gives the lengths by position
    assert torch.equal(flash_attn_varlen_func(q, k, v, bounds, bounds, 35, 35), outs[0])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def paged(x: torch.Tensor, filled: list[int], table: torch.Tensor) -> torch.Tensor:
    """The filled part of x (batch, seqlen, heads, head_dim) in pages where the table says; NaN elsewhere."""
    pages = torch.full((int(table.max()) + 2, PAGE, *x.shape[2:]), float("nan"))
    for sequence, length in enumerate(filled):
        for position in range(length):
            pages[table[sequence, position // PAGE], position % PAGE] = x[sequence, position]
    return pages


def test_pages_are_read_and_written_where_the_table_says():
    q, k, v = qkv()
    filled, new = [57, 30], 3
    table = torch.tensor([[5, 2, 9, 0, 1, 12, 7, 3], [4, 8, 6, 10, 11, -1, -1, -1]], dtype=torch.int32)
    caches = [paged(x, filled, table) for x in (k, v)]
    twins = [x.clone() for x in (k, v)]
    for twin in twins:
        twin[1, 30:] = 0
    lengths = torch.tensor(filled, dtype=torch.int32)
    news = [torch.stack([x[0, 57:60], x[1, 30:33]]) for x in (k, v)]
    out = flash_attn_with_kvcache(q[:, -new:], *caches, *news, cache_seqlens=lengths, block_table=table, causal=True)
    assert_close(
        out, mala_attn_with_kvcache_func(q[:, -new:], *twins, *news, cache_seqlens=lengths), rtol=1e-6, atol=1e-6
    )
    for cache, x in zip(caches, (k, v), strict=True):
        expected = paged(x, [60, 33], table)
        assert torch.equal(cache.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_table": torch.zeros(3, 8, dtype=torch.int32)}, "block_table"),
        ({"block_table": [[0]]}, "block_table"),
        ({"cache_seqlens": torch.tensor([62, 0])}, "between 0 and 61"),
        ({"cache_seqlens": 5}, "cache_seqlens"),
        ({"k": None}, "both or neither"),
        ({"k": torch.zeros(2, 3, 1, 16)}, r"\(2, 3, 2, 16\)"),
        ({"v": torch.zeros(2, 3, 2, 16, dtype=torch.float64)}, "float32"),
        ({"k_cache": torch.zeros(9, PAGE, 32)}, "num_pages"),
        ({"k": torch.zeros(2, 3, 2, 16, requires_grad=True)}, "gradient"),
    ],
)
def test_pages_that_do_not_fit_are_refused(change, said):
    table = torch.arange(16, dtype=torch.int32).view(2, 8)
    arguments = {
        "q": torch.zeros(2, 3, 4, 16), "k_cache": torch.zeros(17, PAGE, 2, 16), "v_cache": torch.zeros(17, PAGE, 2, 16),
        "k": torch.zeros(2, 3, 2, 16), "v": torch.zeros(2, 3, 2, 16), "cache_seqlens": torch.tensor([5, 0]), "block_table": table,
    }  # fmt: skip
    with pytest.raises(ValueError, match=said):
        flash_attn_with_kvcache(**arguments | change)


@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache])
def test_dropout_is_refused(function):
    bounds = torch.tensor([0, 60], dtype=torch.int32)
    lengths = {
        flash_attn_func: {},
        flash_attn_varlen_func: {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds},
        flash_attn_with_kvcache: {"cache_seqlens": torch.tensor([60])},
    }
    with pytest.raises(ValueError, match="dropout"):
        function(*qkv(batch=1), **lengths[function], dropout_p=0.1)


@pytest.mark.parametrize("name", ["block_table", "cache_seqlens"])
def test_packed_sequences_have_no_cache(name):
    bounds = torch.tensor([0, 60], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{name}: use flash_attn_with_kvcache"):
        flash_attn_varlen_func(
            *(x[0] for x in qkv()), cu_seqlens_q=bounds, cu_seqlens_k=bounds, **{name: torch.zeros(1)}
        )


def test_the_default_tau_is_that_of_calls_that_name_none():
    q, k, v = qkv(300)
    assert torch.equal(flash_attn_func(q, k, v), mala_attn_func(q, k, v))
    ops.set_default_tau(0)
    assert ops.default_tau() == 0.0
    full = mala_attn_func(q, k, v, tau=0.0)
    assert torch.equal(flash_attn_func(q, k, v), full)
    assert torch.equal(flash_attn_func(q, k, v, tau=30.0), mala_attn_func(q, k, v, tau=30.0))
    assert not torch.allclose(flash_attn_func(q, k, v, tau=30.0), full)
    for wrong in (-1.0, float("nan"), "1", None, True):
        with pytest.raises(ValueError, match="tau must be"):
            ops.set_default_tau(wrong)
    assert ops.default_tau() == 0.0


def test_the_environment_sets_the_default_tau_when_the_kernels_are_imported():
    code = "from mala_hf import ops; print(ops.default_tau())"
    done = subprocess.run([sys.executable, "-c", code], env={"MALA_TAU": "0.25"}, capture_output=True, text=True)
    assert done.stdout == "0.25\n", done.stderr


@pytest.mark.parametrize("value", ["", "-1", "nan", "one"])
def test_another_value_in_the_environment_is_refused(value, monkeypatch):
    monkeypatch.setenv("MALA_TAU", value)
    with pytest.raises(ValueError, match="MALA_TAU must be"):
        flash_attn_interface._tau_of_environment()


# what the wrapper asks of a function only in ways of its own: lengths and causality, and a flag of old FlashAttention
OF_THE_WRAPPER = {
    "query_length", "key_length", "is_causal", "use_top_left_mask", "supports_mapping", "kwargs", "softmax_scale",
}  # fmt: skip


@pytest.mark.transformers
def test_transformers_can_drop_no_argument():
    """Its wrapper passes what a signature names. A release that learns another argument fails here."""
    from transformers import modeling_flash_attention_utils as wrapper

    known = set(inspect.signature(wrapper._process_flash_attention_kwargs).parameters) - OF_THE_WRAPPER
    names = {wrapper._hf_api_to_flash_mapping.get(name, name) for name in known}
    assert {"dropout_p", "window_size", "softcap", "s_aux", "deterministic", "max_seqlen_q"} <= names
    for function in (flash_attn_varlen_func, flash_attn_with_kvcache):
        named = set(inspect.signature(function).parameters)
        assert names | {"causal", "softmax_scale"} <= named
    # the fixed-length function gets what the packed one names, but for lengths and caches
    lengths = {"max_seqlen_q", "max_seqlen_k", "block_table", "cache_seqlens"}
    assert names - lengths <= set(inspect.signature(flash_attn_func).parameters)

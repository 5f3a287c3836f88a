# SPDX-License-Identifier: Apache-2.0
"""Decode in two passes and in splits: every implementation gives the tiles and values of the forms' definition."""

from __future__ import annotations

import pytest
import torch
from calls import NAN, build
from decode_truth import DECODE, SPLITS, assert_decode
from helpers import RETAINED, SKIPPED
from inputs import FAMILIES, ids

from mala_hf.ops import mala_attn_func, mala_attn_with_kvcache_func
from mala_hf.ops.decode_choice import MAX_TOKENS
from mala_hf.ops.reference import full_attention_head, legal_pairs
from mala_hf.ops.visibility import fixed_sequences

FORMS = ("two_pass", "split")
CASES = [
    *(DECODE.with_(num_heads=group, num_kv_heads=1) for group in (1, 2, 4, 5, 7, 8)),
    DECODE.with_(num_heads=6, num_kv_heads=2, batch=2),
    *(DECODE.with_(seqlen_q=tokens) for tokens in (2, 5, 16, 64)),
    DECODE.with_(seqlen_q=40, num_heads=5, num_kv_heads=1),  # tiles of 12 tokens
    DECODE.with_(seqlen_q=9, seqlen_k=9),
    DECODE.with_(seqlen_q=3, tile=(2, 32)),
    DECODE.with_(window=(100, -1)),
    DECODE.with_(seqlen_q=7, window=(31, -1)),
    DECODE.with_(seqlen_q=5, window=(40, 9), causal=False),
    DECODE.with_(causal=False, seqlen_q=4),
    DECODE.with_(softcap=20.0),
    DECODE.with_(sinks="learned"),
    DECODE.with_(sinks="none", seqlen_q=3),
    DECODE.with_(sinks="learned", softcap=30.0, window=(150, -1), seqlen_q=6),
    DECODE.with_(layout="cache", batch=3),
    DECODE.with_(layout="cache", batch=3, seqlen_q=9),
    DECODE.with_(layout="cache", batch=3, seqlen_q=4, sinks="learned", window=(60, -1)),
    DECODE.with_(layout="padded", batch=3, seqlen_q=12),
    DECODE.with_(head_dim=40, v_head_dim=72),
    DECODE.with_(head_dim=128, seqlen_k=200),
    DECODE.with_(strided=True, batch=2),
    DECODE.with_(tau=0.0),
    DECODE.with_(tau=0.0, layout="padded", batch=3, seqlen_q=12),
    DECODE.with_(tau=0.0, sinks="learned", window=(60, -1)),
    DECODE.with_(tau=30.0, seqlen_q=3),
    *(DECODE.with_(family=family, seqlen_q=2) for family in FAMILIES if family != "peaked"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_every_case_gives_the_forms_tiles_and_values(case, impl, form, device):
    call = build(case, device=device)
    answer = call.run(impl, decode=form, num_splits=SPLITS, return_lse=True, return_work=True)
    skipped = assert_decode(call, form, *answer)
    plain, lse = call.run(impl, decode=form, num_splits=SPLITS, return_lse=True)
    assert torch.equal(plain, answer[0]), "reporting the work changed the result"
    assert torch.equal(lse, answer[1])
    if form == "two_pass" and case.family == "peaked" and case.seqlen_k == DECODE.seqlen_k and case.tau == 1:
        assert skipped or case.window[0] >= 0 or case.seqlen_q > 16, f"{case.id} skips nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES[:24], ids=ids(CASES[:24]))
def test_every_case_gives_the_forms_tiles_and_values_in_16_bit(case, form, dtype, device):
    call = build(case, dtype, device=device)
    assert_decode(call, form, *call.run("triton", decode=form, num_splits=SPLITS, return_lse=True, return_work=True))


@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
@pytest.mark.parametrize("form", FORMS)
def test_values_of_skipped_tiles_are_never_read(form, group, device):
    call = build(DECODE.with_(num_heads=group, num_kv_heads=1, seqlen_k=300), device=device)
    out, work = call.run("triton", decode=form, num_splits=2, return_work=True)
    retained = (work.tiles[0] == RETAINED).any(0).any(0).repeat_interleave(16)[:300]
    assert retained.any()
    assert not retained.all()
    poisoned = call.with_(v=torch.where(retained.to(call.v.device)[:, None, None], call.v, NAN))
    assert torch.equal(poisoned.run("triton", decode=form, num_splits=2), out)


@pytest.mark.parametrize("impl", ["blockwise", "triton", "reference"])
def test_the_two_pass_form_does_not_depend_on_the_splits(impl, device):
    call = build(DECODE.with_(num_heads=2, num_kv_heads=1, layout="cache", batch=2), device=device)
    results = [
        call.run(impl, decode="two_pass", num_splits=splits, return_lse=True, return_work=True) for splits in (1, 3, 20)
    ]
    for out, lse, work in results[1:]:
        assert torch.equal(work.tiles, results[0][2].tiles)
        torch.testing.assert_close(out, results[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, results[0][1], rtol=1e-5, atol=1e-5)


def test_every_skipped_key_has_less_than_its_share_of_the_retained_mass():
    """And so of full attention; and the certificate is the omitted mass itself."""
    call = build(DECODE.with_(seqlen_q=3, num_heads=3, num_kv_heads=1), torch.float64)
    _, work = call.run("blockwise", decode="two_pass", return_work=True)
    legal = legal_pairs(3, 210, (-1, 0))
    for head in range(3):
        _, _, p = full_attention_head(
            call.q[0, :, head], call.k[0, :, 0], call.v[0, :, 0], legal, softmax_scale=call.q.shape[-1] ** -0.5
        )
        skipped = (work.tiles[0, head, 0] == SKIPPED).repeat_interleave(16)[:210]
        assert skipped.any()
        retained_mass = (p * ~skipped).sum(1, keepdim=True)
        assert ((p * skipped) < retained_mass / legal.sum(1)[:, None]).all()
        torch.testing.assert_close(work.omitted_mass_bound[0, head], (p * skipped).sum(1))


@pytest.mark.parametrize("impl", ["blockwise", "triton", "reference"])
@pytest.mark.parametrize("where", [0, 777, 1023])
@pytest.mark.parametrize("splits", [1, 3])
def test_an_even_rest_beside_one_large_key_is_not_dropped(impl, where, splits, device):
    """Each of its keys has less than 1 / L_q of full attention, all of them together half of it."""
    q, k = torch.zeros(1, 1, 2, 32, device=device), torch.zeros(1, 1024, 1, 32, device=device)
    v = torch.randn(1, 1024, 1, 32, generator=torch.Generator().manual_seed(0)).to(device) + 1
    q[..., 0], k[0, where, 0, 0] = 32**0.5, 6.9
    out, work = mala_attn_func(
        q, k, v, causal=True, impl=impl, decode="two_pass", num_splits=splits, tile=(1, 32), return_work=True
    )
    assert work.retained.all()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [*FORMS, "single"])
def test_sinks_and_tables_are_read_by_index_whatever_their_strides(form, device):
    call = build(DECODE.with_(seqlen_q=2), device=device)
    how = {"decode": form, "num_splits": 0 if form == "single" else 2}
    sinks = (3 * torch.randn(8, generator=torch.Generator().manual_seed(2))).to(device)
    expected = call.run("triton", **how, sinks=sinks[::2].contiguous())
    assert torch.equal(call.run("triton", **how, sinks=sinks[::2]), expected)
    pages = torch.randn(16, 16, 2, 64, generator=torch.Generator().manual_seed(3)).to(device)
    table = torch.tensor([[3, 1, 7, 9], [2, 5, 8, -1]], dtype=torch.int32, device=device)
    options = {"cache_seqlens": torch.tensor([60, 40], device=device), "impl": "triton", **how}
    q = call.q[:1].expand(2, -1, -1, -1)
    outs = [
        mala_attn_with_kvcache_func(q, pages, pages, block_table=x, **options)
        for x in (table, table.t().contiguous().t())
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (torch.tensor([[0.0, 1.0]]), "int32 or int64"),
        (torch.tensor([[0, -1]]), r"names pages \[-1\]"),
        (torch.tensor([[0, 8]]), r"pages 0 to 7"),
    ],
    ids=["floats", "hole", "beyond"],
)
def test_tables_of_pages_are_checked_before_anything_is_written(table, said):
    cache, new = torch.zeros(8, 4, 1, 32), torch.ones(1, 1, 1, 32)
    with pytest.raises(ValueError, match=said):
        mala_attn_with_kvcache_func(
            torch.randn(1, 1, 1, 32), cache, cache.clone(), new, new, cache_seqlens=torch.tensor([5]), block_table=table
        )
    assert not cache.any()


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("form", FORMS)
def test_a_context_without_keys_gives_zeros(form, impl, device):
    call = build(DECODE.with_(seqlen_q=2, seqlen_k=0, causal=False, sinks="learned"), device=device)
    out, lse, work = call.run(impl, decode=form, return_lse=True, return_work=True)
    assert not out.any()
    assert torch.equal(lse, call.options["sinks"][None, :, None].expand_as(lse))
    assert work.tiles.shape[-1] == 0


def test_probabilities_kept_between_the_passes_or_formed_again_give_the_same(device):
    from mala_hf.ops.decode import launch_decode
    from mala_hf.ops.query_tile import Settings

    call = build(DECODE.with_(seqlen_q=4), device=device)
    settings = Settings(1.0, call.q.shape[-1] ** -0.5, (-1, 0), 0.0, (4, 16))
    sequences = fixed_sequences(1, 4, 210, 0)
    kept, again = (
        launch_decode(call.q, call.k, call.v, settings, sequences, None, "two_pass", 3, True, keep_p=keep)
        for keep in (True, False)
    )
    assert torch.equal(kept[2], again[2])
    torch.testing.assert_close(kept[0], again[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [*FORMS, "single"])
@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_a_cache_in_pages_is_a_cache_in_one_piece(impl, form, device):
    call = build(DECODE.with_(batch=2, seqlen_q=2, seqlen_k=48 * 8, tile=(16, 16)), device=device)
    page, filled = 48, torch.tensor([301, 77], dtype=torch.int32, device=device)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:16].view(2, 8)
    options = {"impl": impl, "decode": form, "tile": (16, 16), "return_lse": True, "return_work": True}
    pages = []
    for cache in (call.k, call.v):
        stored = torch.full((20, page, *cache.shape[2:]), NAN, device=device)
        stored[order.flatten()] = cache.reshape(16, page, *cache.shape[2:])
        pages.append(stored)
    # what lies behind the filled keys must not matter
    table = order.to(torch.int32).clone()
    table[1, 2:] = -1
    new_k, new_v = torch.randn(2, 2, 2, 64, device=device), torch.randn(2, 2, 2, 64, device=device)
    if impl == "blockwise" or form == "single":
        pages = [x.nan_to_num() for x in pages]
    out, lse, work = mala_attn_with_kvcache_func(
        call.q, *pages, new_k, new_v, cache_seqlens=filled, block_table=table.to(device), **options
    )
    expected, expected_lse, expected_work = mala_attn_with_kvcache_func(
        call.q, call.k.clone(), call.v.clone(), new_k, new_v, cache_seqlens=filled, **options
    )
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(work.tiles[..., : expected_work.tiles.shape[-1]], expected_work.tiles)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_auto_takes_two_passes_where_new_tokens_meet_a_context_and_only_there(impl, device):
    def form(seqlen_q: int, seqlen_k: int, **options) -> str:
        q, k, v = (torch.randn(1, n, 2, 32, device=device) for n in (seqlen_q, seqlen_k, seqlen_k))
        q.requires_grad_(options.pop("grad", False))
        if options.pop("masked", False):
            options["mask"] = torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
        return mala_attn_func(q, k, v, causal=True, impl=impl, return_work=True, **options)[1].form

    assert form(1, 40) == "two_pass"
    assert form(MAX_TOKENS, 70) == "two_pass"
    assert form(MAX_TOKENS + 1, 70) == "single"
    assert form(40, 40) == "single"
    assert form(1, 40, grad=True) == "single"
    assert form(1, 40, masked=True) == "single"


REFUSED = {
    "no such form": ({"decode": "both"}, "'int8_two_pass' or 'split', got 'both'"),
    "splits": ({"num_splits": -1}, "num_splits must be a whole number"),
    "half a split": ({"num_splits": 1.5}, "num_splits must be a whole number"),
    "splits of a single pass": ({"decode": "single", "num_splits": 2}, "'single' has no splits"),
    "many queries": ({"decode": "split", "seqlen_q": 65}, "65 queries"),
    "a mask": ({"decode": "two_pass", "mask": torch.ones(1, 1, 1, 90, dtype=torch.bool)}, "a mask"),
    "a gradient": ({"decode": "two_pass", "grad": True}, "gradients"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_a_decode_does_not_cover_is_refused(change):
    options, said = REFUSED[change]
    options = dict(options)
    q = torch.randn(1, options.pop("seqlen_q", 1), 2, 32, requires_grad=options.pop("grad", False))
    k = torch.randn(1, 90, 2, 32)
    with pytest.raises(ValueError, match=said):
        mala_attn_func(q, k, k, **options)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("form", FORMS)
def test_a_nan_is_not_lost(form, where, device):
    """In q and k of any visible pair; in v of a tile that is retained."""
    call = build(DECODE.with_(seqlen_q=2), device=device)
    tensors = {"q": call.q.clone(), "k": call.k.clone(), "v": call.v.clone()}
    tensors[where][0, -1, 0, 0] = NAN  # the last key: nothing is closer to a query
    out = call.with_(**tensors).run("triton", decode=form, num_splits=2)
    assert out[0, -1, 0].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_a_growing_cache_compiles_nothing_new(dtype, device, monkeypatch):
    """Lengths are runtime values: one specialisation of each kernel for all of them."""
    from mala_hf.ops import decode

    kernels = (decode.score_tiles_kernel, decode.attend_retained_kernel, decode.combine_kernel)
    if not hasattr(kernels[0], "device_caches"):
        pytest.skip("the interpreter compiles nothing")

    def compiled() -> int:
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    def step(seqlen_k: int) -> None:
        q, k, v = (torch.randn(1, n, 4, 64, dtype=dtype, device=device) for n in (1, seqlen_k, seqlen_k))
        mala_attn_func(q, k, v, causal=True, decode="two_pass")

    step(1000)
    before = compiled()
    for seqlen_k in (2, 17, 128, 1001, 4096, 5000, 70001):
        step(seqlen_k)
    assert compiled() == before

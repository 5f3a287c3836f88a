# SPDX-License-Identifier: Apache-2.0
"""The INT8 plane of keys: what it says of a score is true whatever the key, and new keys go where they belong."""

from __future__ import annotations

import math

import hypothesis
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from inputs import FAMILIES, Shape

from mala_hf.ops import KeyPlane, mala_attn_func, mala_attn_with_kvcache_func, quantize_keys
from mala_hf.ops.decode_plane_rows import digit_lines
from mala_hf.ops.key_plane import DIGIT_BASE, LARGEST_UNITS, row_units, score_bounds

INF, NAN = math.inf, math.nan
IMPLS = ["blockwise", "triton"]


def keys(*size: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_certified(k: torch.Tensor, plane: KeyPlane) -> None:
    """|k - k_hat| <= residual in float64, and no looser than INT8 and float32 make it. k (batch, keys, heads, head_dim)."""
    exact = k.double().transpose(1, 2)
    lost = (exact - plane.scales.double()[..., None] * plane.quantized).norm(dim=-1)
    assert (lost <= plane.residuals).all()
    size, dim = exact.abs().amax(-1), k.shape[-1]
    assert (plane.residuals <= 1.01 * size / 127 * dim**0.5 + 1e-18 * dim**0.5).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_residual_is_what_int8_loses_and_hardly_more(family, head_dim, dtype, impl, device):
    if family == "captured" and head_dim > 64:
        pytest.skip("captured keys have 64 numbers")
    _, k, _ = FAMILIES[family](Shape(2, 1, 70, 2, 2, head_dim, head_dim), torch.Generator().manual_seed(0))
    k = k.to(dtype).to(device)
    assert_certified(k, quantize_keys(k, impl=impl))


@pytest.mark.gpu
def test_a_residual_of_bfloat16_keys_holds_on_a_gpu():
    k = keys(2, 5000, 3, 128).bfloat16().cuda()
    assert_certified(k, quantize_keys(k))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e-5, 1e20, 3e38])
def test_keys_of_every_size_are_certified_or_not_covered(size, impl, device):
    k = (size * keys(1, 20, 1, 64, dtype=torch.float32)).to(device)
    plane = quantize_keys(k, impl=impl)
    lost = (k.double().transpose(1, 2) - plane.scales.double()[..., None] * plane.quantized).norm(dim=-1)
    assert (lost <= plane.residuals).all()
    if size < 1e18:
        assert (plane.residuals < 0.03 * size * 8 + 1e-17).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_key_with_a_nan_or_an_infinity_is_not_covered_and_the_others_are(value, impl, device):
    k = keys(1, 40, 2, 64)
    k[0, 7, 1, 30] = value
    plane = quantize_keys(k.to(device), impl=impl)
    assert plane.residuals.isinf().nonzero().tolist() == [[0, 1, 7]]
    assert plane.scales.isfinite().all()
    assert not plane.residuals.isnan().any()
    assert plane.scales[0, 1, 7] == 0


@pytest.mark.parametrize("strided", ["heads first", "gaps"])
def test_the_kernel_writes_the_numbers_of_pytorch_whatever_the_strides(strided, device):
    """The residual is a sum of squares: its last bits depend on the order."""
    k = keys(2, 100, 3, 72).to(device)
    k = (
        k.transpose(1, 2).contiguous().transpose(1, 2)
        if strided == "heads first"
        else k.repeat(1, 2, 1, 2)[:, ::2, :, :72]
    )
    ours, theirs = (quantize_keys(k, impl=impl) for impl in ("triton", "blockwise"))
    if k.is_cuda:  # division is another there
        assert (ours.quantized - theirs.quantized).abs().max() <= 1
    else:
        assert torch.equal(ours.quantized, theirs.quantized)
    assert torch.equal(ours.scales, theirs.scales)
    torch.testing.assert_close(ours.residuals, theirs.residuals, rtol=1e-5, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("start", [0, 30, "each"])
@pytest.mark.parametrize("new", [1, 17])
def test_new_keys_are_written_in_place_and_no_others(new, start, impl, device):
    k = keys(3, new, 2, 32).to(device)
    plane = KeyPlane(*(x.fill_(1) for x in KeyPlane.empty(3, 2, 50, 32, device).tensors))
    starts = torch.tensor([0, 33, 12], device=device) if start == "each" else torch.full((3,), start)
    assert quantize_keys(k, plane, starts if start == "each" else start, impl=impl) is plane
    alone = quantize_keys(k, impl=impl)
    for b, first in enumerate(starts.tolist()):
        for x, part in zip(plane.tensors, alone.tensors, strict=True):
            assert torch.equal(x[b, :, first : first + new], part[b])
            assert (x[b, :, :first] == 1).all()
            assert (x[b, :, first + new :] == 1).all()


def test_a_plane_takes_a_quarter_of_16_bit_keys_and_values_and_8_bytes_a_key():
    plane = KeyPlane.empty(2, 4, 1000, 128)
    assert plane.nbytes == 2 * 4 * 1000 * (128 + 8)
    assert plane.first(10).nbytes == 2 * 4 * 10 * (128 + 8)


numbers = st.floats(-1e4, 1e4, width=16)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.lists(st.lists(numbers, min_size=8, max_size=8), min_size=1, max_size=4))
def test_no_key_is_farther_from_its_plane_than_it_says(values):
    k = torch.tensor(values, dtype=torch.float16)[None, :, None]
    assert_certified(k, quantize_keys(k, impl="blockwise"))


REFUSED = {
    "a shape": ({"k": torch.zeros(2, 3, 4)}, r"\(batch, new, num_kv_heads, head_dim\)"),
    "integers": ({"k": torch.zeros(1, 2, 2, 32, dtype=torch.int8)}, "floating-point"),
    "strides": ({"k": torch.zeros(1, 32, 2, 2).transpose(1, 3)}, "contiguous"),
    "other heads": ({"plane": KeyPlane.empty(1, 3, 9, 32)}, r"key_plane.quantized must be torch.int8 \(1, 2, 9, 32\)"),
    "no room": ({"plane": KeyPlane.empty(1, 2, 9, 32), "start": 8}, "start must be between 0 and 7"),
    "no room for one": ({"plane": KeyPlane.empty(1, 2, 9, 32), "start": torch.tensor([8])}, "between 0 and 7"),
    "no such form": ({"impl": "reference"}, "'triton' or 'blockwise'"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_keys_that_do_not_fit_are_refused(change):
    arguments, said = REFUSED[change]
    with pytest.raises(ValueError, match=said):
        quantize_keys(**{"k": torch.zeros(1, 2, 2, 32)} | arguments)


def test_a_plane_that_is_not_that_of_the_keys_or_is_not_read_is_refused():
    q, k = torch.randn(1, 1, 4, 32), torch.randn(1, 40, 2, 32)
    for plane, more, said in (
        (quantize_keys(k[:, :39]), {}, r"\(1, 2, 40, 32\)"),
        ((1, 2, 3), {}, "must be a KeyPlane"),
        (quantize_keys(k), {"decode": "split"}, "reads no key_plane"),
        (quantize_keys(k), {"decode": "two_pass"}, "reads no key_plane"),
        (None, {"decode": "int8_two_pass"}, "give key_plane"),
        (
            quantize_keys(k.repeat(1, 2, 1, 1)),
            {"decode": "int8_two_pass", "mask": torch.ones(1, 80, dtype=torch.bool)},
            "a mask",
        ),
    ):
        of_keys = k.repeat(1, 2, 1, 1) if "mask" in more else k
        with pytest.raises(ValueError, match=said):
            mala_attn_func(q, of_keys, of_keys, key_plane=plane, **more)
    pages = torch.zeros(4, 16, 2, 32)
    table = {"block_table": torch.zeros(1, 2, dtype=torch.int32), "cache_seqlens": torch.tensor([9])}
    with pytest.raises(ValueError, match="a cache in pages"):
        mala_attn_with_kvcache_func(q, pages, pages, key_plane=quantize_keys(k), **table)


@pytest.mark.parametrize("impl", IMPLS)
def test_new_tokens_go_into_the_cache_and_its_plane(impl, device):
    lengths = torch.tensor([60, 25], dtype=torch.int32, device=device)
    q, new_k, new_v = (
        keys(2, 1, 4, 32).to(device),
        keys(2, 1, 2, 32, seed=1).to(device),
        keys(2, 1, 2, 32, seed=2).to(device),
    )
    k, v = keys(2, 70, 2, 32, seed=3).to(device), keys(2, 70, 2, 32, seed=4).to(device)
    plane = quantize_keys(k, impl=impl)
    options = {"cache_seqlens": lengths, "tile": (1, 16), "impl": impl}
    out, work = mala_attn_with_kvcache_func(q, k, v, new_k, new_v, key_plane=plane, return_work=True, **options)
    assert work.form == "int8_two_pass"
    for x, again in zip(plane.tensors, quantize_keys(k, impl=impl).tensors, strict=True):
        torch.testing.assert_close(x, again)
    exact, work = mala_attn_with_kvcache_func(
        q, k, v, return_work=True, **options | {"cache_seqlens": lengths + 1, "tau": 0.0}
    )
    assert work.form == "two_pass"
    assert (out - exact).abs().max() < 0.3


def test_a_compiler_sees_the_plane_written():
    def step(k, plane):
        return quantize_keys(k * 2, plane, 3).scales.sum()

    k = keys(1, 2, 2, 32, dtype=torch.float32)
    planes = [KeyPlane(*(x.zero_() for x in KeyPlane.empty(1, 2, 9, 32).tensors)) for _ in range(2)]
    expected = step(k, planes[0])
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(k, planes[1])
    assert torch.equal(got, expected)
    for x, y in zip(*(plane.tensors for plane in planes), strict=True):
        assert torch.equal(x, y)


rows = st.floats(-1e4, 1e4, width=32)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    q=st.lists(rows, min_size=8, max_size=8),
    k=st.lists(numbers, min_size=8, max_size=8),
    size=st.sampled_from([1.0, 1e-44, 1e-38, 1e-30, 1e-6, 1e10]),
)
def test_no_score_is_farther_from_what_the_plane_gives_than_its_bounds_say(q, k, size):
    """By brute force in float64, rows from denormal to huge; and of rows of a usual size hardly farther than |q| residual."""
    q, k = size * torch.tensor([q], dtype=torch.float32), torch.tensor([k], dtype=torch.float32)
    plane = tuple(x[0, 0] for x in quantize_keys(k[None, :, None], impl="blockwise").tensors)
    lower, upper = score_bounds(q, plane, 0.7, 0.0)
    score = 0.7 * q.double() @ k.double().T
    assert (lower <= score).all()
    assert (score <= upper).all()
    if q.abs().max() > 1e-20:
        smallest = (
            0.7 * q.double().norm() * (plane[2].double() + 8**0.5 * plane[0].abs().amax() * plane[1].double() / 127)
        )
        assert (upper - lower <= 2.02 * smallest).all()


@pytest.mark.parametrize("size", [NAN, INF, 1e16])
def test_a_row_beyond_what_is_covered_bounds_nothing_and_the_others_do(size):
    q, k = torch.randn(3, 16), torch.randn(5, 16)
    q[1, 4] = size
    plane = tuple(x[0, 0] for x in quantize_keys(k[None, :, None], impl="blockwise").tensors)
    lower, upper = score_bounds(q, plane, 0.25, 5.0)
    assert (lower[1] == -INF).all()
    assert (upper[1] == INF).all()
    assert (upper[::2] - lower[::2]).isfinite().all()


def test_the_digits_of_every_whole_number_are_those_of_int8():
    whole = torch.arange(-LARGEST_UNITS, LARGEST_UNITS + 1)
    high = (whole / DIGIT_BASE + 0.5).floor()
    assert high.abs().max() <= 127
    assert (whole - DIGIT_BASE * high).abs().max() <= 127


@triton.jit
def _store_lines(q_ptr, digits_ptr, numbers_ptr, to_log2, seqlen_q, stride_qs, stride_qh, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                 TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr, SIDE: tl.constexpr):  # fmt: skip
    digits, scale, norm = digit_lines(q_ptr, 0, 0, 0, 0, seqlen_q, 0, stride_qs, stride_qh, to_log2, HEAD_DIM, BLOCK_D, TOKENS, GROUP,
                                      BLOCK_R, SIDE)  # fmt: skip
    line, column = tl.arange(0, 2 * SIDE * BLOCK_R), tl.arange(0, SIDE * BLOCK_D)
    tl.store(digits_ptr + line[:, None] * (SIDE * BLOCK_D) + column[None, :], digits)
    row = tl.arange(0, SIDE * BLOCK_R)
    tl.store(numbers_ptr + row, scale)
    tl.store(numbers_ptr + SIDE * BLOCK_R + row, norm)


@pytest.mark.parametrize(
    ("tokens", "group", "block_r", "side"), [(1, 2, 2, 4), (2, 3, 8, 1), (1, 1, 4, 2), (5, 3, 16, 1), (3, 1, 4, 4)]
)
def test_the_lines_of_a_product_are_the_digits_of_each_row_beside_each_of_its_keys(
    tokens, group, block_r, side, device
):
    q = torch.randn(tokens, group, 40, generator=torch.Generator().manual_seed(0))
    q[0, 0] = 0.0
    q[-1, -1, 3] = 60.0
    digits = torch.empty(2 * side * block_r, side * 64, dtype=torch.int8, device=device)
    numbers = torch.empty(2, side, block_r, device=device)
    _store_lines[(1,)](q.to(device), digits, numbers, 0.3, tokens, 40 * group, 40, 40, 64, tokens, group, block_r, side)
    exact = torch.nn.functional.pad(
        q.reshape(-1, 40), (0, 24, 0, block_r - tokens * group)
    )  # (block_r, 64), token by token
    units, to_score, norm = row_units(exact, 0.3)
    pairs = digits.cpu().int().unflatten(0, (-1, 2, 8)).transpose(0, 1).reshape(2, side, block_r, side, 64)
    found = DIGIT_BASE * pairs[0] + pairs[1]  # (side, block_r, side, 64)
    for key in range(side):
        assert (found[key, :, key] - units).abs().max() <= numbers.is_cuda  # a division is another there
        assert not found[key, :, [other for other in range(side) if other != key]].any()
    torch.testing.assert_close(
        numbers.cpu(), torch.stack([to_score, norm])[:, None].expand(-1, side, -1), rtol=1e-6, atol=0
    )
    unit = exact.double().abs().amax(1) / LARGEST_UNITS
    assert ((exact - unit[:, None] * found[0, :, 0]).abs() <= 0.52 * unit[:, None]).all()

# SPDX-License-Identifier: Apache-2.0
"""A decode in more splits than a program looks at together, most of which hold nothing that is retained."""

from __future__ import annotations

import math

import pytest
import torch

from mala_hf.ops import mala_attn_func, quantize_keys
from mala_hf.ops.decode_combine import SPLITS_AT_ONCE

SPLITS = SPLITS_AT_ONCE.value + 22
TILE = 16
GROUP = 7  # query heads of a KV head: no power of two
KEYS = 2 * TILE * SPLITS + 4 * TILE + 3  # three tiles a split, then one of two, and splits without any at the end
NEEDLES = (0, TILE * 3 * 70 + 1, TILE * 3 * 99, KEYS - 1)
FULL = 2 * TILE * SPLITS  # two tiles a split, those of the second look too
LATE_NEEDLES = (TILE * 2 * 70 + 1, TILE * 2 * (SPLITS - 20) + 1, TILE * 2 * (SPLITS - 9), FULL - 1)
FORMS = ("two_pass", "int8_two_pass")
SCANNED = {"all at one look": 4096, "a few at a time": 128}


@pytest.fixture(params=SCANNED.values(), ids=SCANNED, autouse=True)
def scanned(request, monkeypatch) -> None:
    """Row maxima that a program looks at together: all of these tests', or few."""
    pytest.importorskip("triton")
    from mala_hf.ops import decode

    monkeypatch.setattr(decode, "SCANNED", request.param)


def cache(device, keys=KEYS, needles=NEEDLES, kv_heads=1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (1, 1, kv_heads * GROUP, 32), k and v (1, keys, kv_heads, 32): every query head finds all needles and little else."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, keys, kv_heads, 32, generator=generator) for _ in "kv")
    q = torch.randn(1, 1, kv_heads * GROUP, 32, generator=generator)
    q[..., 0] = 40.0
    k[..., 0] = 0.0
    k[:, needles, :, 0] = 4.0
    return q.to(device), k.to(device), v.to(device)


def run(form, q, k, v, splits=SPLITS, impl="triton"):
    plane = {"key_plane": quantize_keys(k)} if form == "int8_two_pass" else {}
    return mala_attn_func(
        q, k, v, causal=True, impl=impl, decode=form, num_splits=splits, tile=(1, TILE), return_lse=True, return_work=True, **plane
    )  # fmt: skip


@pytest.mark.parametrize(
    ("programs", "groups", "expected"),
    [(528, 8, 66), (264, 2, 128), (396, 2, 128), (264, 1, 256), (100, 1, 100), (10, 20, 1)],
)
def test_splits_fill_the_gpu_and_not_a_few_more_than_are_read_at_once(programs, groups, expected):
    from mala_hf.ops.decode import splits_that_fill

    assert splits_that_fill(programs, groups) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("keys", "needles"), [(KEYS, NEEDLES), (FULL, LATE_NEEDLES)], ids=["some empty", "none empty"])
def test_retained_tiles_are_found_in_whatever_splits_they_lie(keys, needles, form, device):
    # beyond the first KV head's tiles lie the second's, needles among them
    q, k, v = cache(device, keys, needles, kv_heads=2)
    out, lse, work = run(form, q, k, v)
    expected, expected_lse, expected_work = run(form, q, k, v, impl="blockwise")
    assert torch.equal(work.tiles, expected_work.tiles)
    retained = (work.tiles[0, 0, 0] == 2).nonzero()[:, 0].tolist()
    assert retained == sorted({key // TILE for key in needles})
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_without_a_number_in_one_split_is_not_passed_over(form, device):
    """On a GPU a maximum passes over NaN: a split of nothing else has no largest score. The interpreter's does not."""
    q, k, v = cache(device)
    q, k = q[:, :, :1], k.clone()
    k[0, TILE * 3 * 40 : TILE * 3 * 41] = math.nan
    out, lse, work = run(form, q, k, v)
    assert out.isnan().all()
    assert lse.isnan().all()
    assert torch.equal(work.tiles, run(form, q, k, v, impl="blockwise")[2].tiles)


@pytest.mark.parametrize("form", FORMS)
def test_a_window_that_begins_within_a_split(form, device):
    q, k, v = cache(device)
    plane = {"key_plane": quantize_keys(k)} if form == "int8_two_pass" else {}
    how = {"window": (TILE * 500, -1), "tile": (1, TILE), "return_work": True, "decode": form, "num_splits": SPLITS}
    (out, work), (expected, expected_work) = (
        mala_attn_func(q, k, v, causal=True, impl=impl, **how, **plane) for impl in ("triton", "blockwise")
    )
    assert torch.equal(work.tiles, expected_work.tiles)
    # a GPU adds products in another order: of scores near 40, in log2 units, float32 knows 4e-6
    tolerance = 1e-5 if device == "cpu" else 5e-5
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)

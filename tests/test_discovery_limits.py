# SPDX-License-Identifier: Apache-2.0
"""Limits that grow during INT8 discovery: by what a row has seen, and by nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from calls import Call, build
from inputs import Case
from test_discovery import WithNumbers, arguments_of, retained_and_candidates

from mala_hf.ops import discover


def unlike_each_other(seqlen: int, matching: slice, tile: tuple[int, int], device: str, **options) -> Call:
    """One head whose scores deviate from 0 by about 2, and those of ``matching`` keys from 40."""
    case = Case(seqlen_q=seqlen, num_heads=1, head_dim=32, tile=tile, softmax_scale=0.35, **options)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, seqlen, 1, 32, generator=generator) for _ in range(2))
    q[..., 0], k[..., 0] = 4, 0
    k[:, matching, :, 0] = 40 / (4 * 0.35)
    return build(case, torch.float16, device).with_(q=q.half().to(device), k=k.half().to(device))


@pytest.mark.parametrize("tile", [(16, 16), pytest.param((64, 128), marks=pytest.mark.gpu)], ids=["16x16", "Hopper's"])
def test_a_tile_of_high_scores_rules_out_those_that_are_visited_after_it(tile, device, monkeypatch):
    keys = tile[1]
    call = unlike_each_other(20 * keys, slice(18 * keys, 19 * keys), tile, device, causal=False)
    arguments = arguments_of(call)
    retained, candidates = retained_and_candidates(arguments, rows=32)
    assert not (retained & ~candidates).any()
    assert candidates[..., 18:].all()
    assert not candidates[..., :18].any()
    monkeypatch.setattr(discover, "discover_kernel", WithNumbers(slice(4, 5), -math.inf))  # no tile raises a limit
    assert retained_and_candidates(arguments, rows=32, use_hopper=False)[1][..., :18].all()


def test_keys_that_a_row_does_not_see_yet_raise_no_limit_of_it(device):
    """Row 32 sees none of the high scores beside it, and is alone in retaining the first two tiles."""
    call = unlike_each_other(64, slice(33, 48), (16, 16), device)
    retained, candidates = retained_and_candidates(arguments_of(call), rows=32)
    assert retained[0, 0, 2, :2].all()
    assert not (retained & ~candidates).any()

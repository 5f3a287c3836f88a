# SPDX-License-Identifier: Apache-2.0
"""The look before a choice counts what its samples retain, and the counts decide which way KV heads go."""

from __future__ import annotations

import math

import pytest
import torch
from calls import Call, build
from inputs import Case, ids
from torch import Tensor

from mala_hf.ops import discover_probe
from mala_hf.ops.discover_choice import choose_by_counts
from mala_hf.ops.query_tile import Settings
from mala_hf.ops.reference import legal_pairs
from mala_hf.ops.visibility import fixed_sequences


def counts_of(call: Call, tile: tuple[int, int]) -> Tensor:
    """What the look counts: retained and visible key tiles of its samples, by KV head, against the full normalizer."""
    q, k, causal = call.q.double(), call.k.double(), call.options["causal"]
    (batch, seqlen_q, num_heads, head_dim), seqlen_k, num_kv_heads = q.shape, k.shape[1], k.shape[2]
    left, right = call.options.get("window", (-1, -1))
    legal = legal_pairs(seqlen_q, seqlen_k, (left, 0 if causal else right)).to(q.device)
    scale = call.options.get("softmax_scale") or head_dim**-0.5
    counts = torch.zeros(num_kv_heads, 2, dtype=torch.int64)
    for sample in range(discover_probe.SAMPLES):
        end = math.ceil(seqlen_q * (sample + 1) / discover_probe.SAMPLES)
        start = max(end - tile[0], 0) // tile[0] * tile[0]
        rows = slice(start, min(start + tile[0], seqlen_q))
        for b in range(batch):
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                scores = (scale * q[b, rows, head] @ k[b, :, kv_head].T).masked_fill(~legal[rows], -math.inf)
                limit = scores.logsumexp(1) + torch.log((call.options["tau"] / legal[rows].sum(1)).clamp(max=1))
                for begin in range(0, seqlen_k, tile[1]):
                    tile_max = scores[:, begin : begin + tile[1]].amax(1)
                    counts[kv_head] += torch.tensor(
                        [bool((tile_max >= limit.clamp(min=-1e30)).any()), bool((tile_max > -math.inf).any())]
                    )
    return counts


LOOKS = [
    Case(seqlen_q=400, num_heads=4, num_kv_heads=2, batch=2),
    Case(seqlen_q=333, num_heads=2, head_dim=72, strided=True),
    Case(seqlen_q=300, seqlen_k=450),
    Case(seqlen_q=300, causal=False),
    Case(seqlen_q=300, window=(100, -1)),
    Case(family="flat", seqlen_q=260),
]


@pytest.mark.parametrize("case", LOOKS, ids=ids(LOOKS))
def test_the_look_counts_what_its_samples_retain(case, device):
    call, tile = build(case, torch.float16, device), (32, 16)
    left, right = call.options.get("window", (-1, -1))
    window = left, 0 if call.options["causal"] else right
    scale = call.options.get("softmax_scale") or call.q.shape[-1] ** -0.5
    settings = Settings(call.options["tau"], scale, window, 0.0, tile)
    sequences = fixed_sequences(call.q.shape[0], call.q.shape[1], call.k.shape[1], window[1])
    found = discover_probe.sampled_counts(call.q, call.k, settings, sequences).cpu().long()
    expected = counts_of(call, tile)
    assert torch.equal(found[:, 1], expected[:, 1])
    assert (found - expected).abs().max() <= 1 + 0.01 * expected.max()  # float16 products may tip one at its limit


ALL = ("fused", "int8", "dense")


@pytest.mark.parametrize(
    ("fractions", "length", "may_be", "expected"),
    [
        ([0.01, 0.02], 16384, ALL, {"int8": None}),
        ([0.3, 0.2], 131072, ALL, {"fused": None}),
        ([0.9, 1.0], 16384, ALL, {"dense": None}),
        ([0.9, 1.0], 131072, ("fused", "int8"), {"fused": None}),
        ([0.01, 1.0], 131072, ALL, {"int8": (0,), "dense": (1,)}),
        ([0.01, 1.0, 0.3, 0.9], 32768, ALL, {"fused": (0, 2), "dense": (1, 3)}),
        ([0.01, 1.0], 16384, ALL, {"fused": None}),
        ([0.5, 1.0], 16384, ALL, {"dense": None}),
        ([0.01, 0.02], 131072, ("fused", "dense"), {"fused": None}),
        ([0.0, 0.0], 131072, ALL, {"int8": None}),
    ],
)
def test_the_counts_decide_for_all_heads_or_for_each(fractions, length, may_be, expected):
    choices = choose_by_counts([[round(1000 * x), 1000] for x in fractions], length, may_be, 0.05)
    assert {choice.way: choice.kv_heads for choice in choices} == expected
    assert all(choice.reason for choice in choices)

# SPDX-License-Identifier: Apache-2.0
"""The executable definition, against examples worked by hand, full attention and a literal transcription of the rule."""

from __future__ import annotations

import math

import pytest
import torch
from calls import build, heads
from helpers import RETAINED, SKIPPED, independent_tiles, numbers_of, operands, reference_head, sink_of
from inputs import CAPTURED, CASES, FAMILIES, FAMILY_CASES, Case, ids
from safetensors.torch import load_file
from torch import Tensor

from mala_hf.ops import reference, reference_decode

CHEAP_CASES = [case for case in CASES if case.head_dim == 64]


def _one_row(contributions: list[float], num_splits: int = 1, tau: float = 1.0, seqlen_k: int = 64) -> list[int]:
    """Retained tiles, numbered in visiting order, of one row over tiles of 4 keys, each key with the given weight."""
    weights = torch.zeros(seqlen_k, dtype=torch.float64)
    for index, contribution in enumerate(contributions):
        stop = seqlen_k - 4 * index
        weights[stop - 4 : stop] = contribution
    k = torch.log(weights.clamp(min=1e-30))[:, None]  # q = 1: the scores are the logs of the weights
    q, v = torch.ones(1, 1, dtype=torch.float64), torch.zeros(seqlen_k, 1, dtype=torch.float64)
    legal = torch.ones(1, seqlen_k, dtype=torch.bool)
    numbers = {"tau": tau, "softmax_scale": 1.0, "tile": (1, 4)}
    result = (
        reference.forward_head(q, k, v, legal, **numbers)
        if num_splits == 1
        else reference_decode.split_head(q, k, v, legal, num_splits=num_splits, **numbers)
    )
    return [i for i, code in enumerate(result.tiles[0].flip(0).tolist()) if code == RETAINED]


def test_forward_support_is_not_monotone_in_tau():
    contributions = [0.25, 0.95 / 64, 0.999 / 64, 1.005 / 64]
    assert _one_row(contributions, tau=0.9) == [0, 1, 2]
    assert _one_row(contributions, tau=1.0) == [0, 3]


def test_split_support_does_not_contain_unsplit_support():
    contributions = [0.25, 1e-9, 1e-9, 1e-9, 2.5, 10.5 / 64, 10.9 / 64, 11.1 / 64]
    assert _one_row(contributions, seqlen_k=32 + 32) == [0, 4, 7]
    # the bar of the example lies after four of sixteen tiles in visiting order: four splits put a boundary there,
    # and the later boundaries fall among keys that weigh nothing
    assert _first_tiles(_one_row(contributions, num_splits=4)) == [0, 4, 5, 6]


def _first_tiles(retained: list[int]) -> list[int]:
    return [tile for tile in retained if tile < 8]


def test_three_tiles_worked_by_hand():
    """Two rows, tiles of 2 keys; weights exp(score) are whole numbers, so everything can be checked on paper.

    Row 0 sees weights 1 1 | 8 8 | 100 100 and row 1 the same but 20 in the middle; tau = 1, L = 6, threshold 1/6.
    Last tile: retained, sums 200. Middle: 8/200 and 20/200 are below 1/6, skipped. First: 1/200, skipped.
    With 40 in the middle for row 1: 40/200 = 0.2 >= 1/6, so both rows retain the tile, and row 0 sums 216.
    """
    for middle, codes, sums in ((20.0, [1, 1, 2], [200.0, 200.0]), (40.0, [1, 2, 2], [216.0, 280.0])):
        weights = torch.tensor([[1.0, 1, 8, 8, 100, 100], [1.0, 1, middle, middle, 100, 100]], dtype=torch.float64)
        q, k = torch.eye(2, dtype=torch.float64), weights.log().T.contiguous()
        v = torch.arange(6, dtype=torch.float64)[:, None]
        legal = torch.ones(2, 6, dtype=torch.bool)
        result = reference.forward_head(q, k, v, legal, tau=1.0, softmax_scale=1.0, tile=(2, 2))
        assert result.tiles.tolist() == [codes]
        torch.testing.assert_close(result.lse.exp(), torch.tensor(sums, dtype=torch.float64))
        kept = weights * torch.tensor(codes).eq(RETAINED).repeat_interleave(2)
        torch.testing.assert_close(result.out, kept @ v / kept.sum(1, keepdim=True))
        left_out = (weights * torch.tensor(codes).eq(SKIPPED).repeat_interleave(2)).sum(1)
        torch.testing.assert_close(
            result.certificate, left_out / kept.sum(1)
        )  # equal weights in a tile: the bound is exact


def test_the_sink_joins_the_normalizer_and_nothing_else():
    weights = torch.tensor([[1.0, 1, 100, 100]], dtype=torch.float64)
    q, k, v = torch.ones(1, 1).double(), weights.log().T.contiguous(), torch.ones(4, 1).double()
    sink = torch.tensor(800.0).double().log()
    result = reference.forward_head(
        q, k, v, torch.ones(1, 4, dtype=torch.bool), tau=1.0, softmax_scale=1.0, tile=(1, 2), sink=sink
    )
    assert result.tiles.tolist() == [[1, 2]]
    torch.testing.assert_close(result.lse.exp().item(), 1000.0)
    torch.testing.assert_close(result.out.item(), 0.2)
    torch.testing.assert_close(result.certificate.item(), 2 / 1000)


def _literal_rule(
    scores: Tensor, v: Tensor, tau: float, tile: tuple[int, int]
) -> tuple[list[list[int]], Tensor, Tensor]:
    """rule.md read aloud with Python floats: per query tile, from the last key tile to the first."""
    m, n = scores.shape
    maps, out, lse = (
        [],
        torch.zeros(m, v.shape[1], dtype=torch.float64),
        torch.full((m,), -math.inf, dtype=torch.float64),
    )
    values = scores.tolist()
    visible = [sum(s > -math.inf for s in row) for row in values]
    for first_row in range(0, m, tile[0]):
        rows = range(first_row, min(first_row + tile[0], m))
        weight = dict.fromkeys(rows, 0.0)
        total = {i: torch.zeros(v.shape[1], dtype=torch.float64) for i in rows}
        codes = []
        for first_key in reversed(range(0, n, tile[1])):
            keys = range(first_key, min(first_key + tile[1], n))
            legal = {i: [j for j in keys if values[i][j] > -math.inf] for i in rows}
            if not any(legal.values()):
                codes.append(0)
                continue
            votes = [
                weight[i] == 0 or math.exp(max(values[i][j] for j in legal[i])) / weight[i] >= min(tau / visible[i], 1)
                for i in rows
                if legal[i]
            ]
            codes.append(2 if any(votes) else 1)
            if any(votes):
                for i in rows:
                    for j in legal[i]:
                        weight[i] += math.exp(values[i][j])
                        total[i] += math.exp(values[i][j]) * v[j]
        maps.append(codes[::-1])
        for i in rows:
            if weight[i]:
                out[i], lse[i] = total[i] / weight[i], math.log(weight[i])
    return maps, out, lse


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (6, 0), (5, 3)])
def test_the_rule_read_literally_gives_the_same_tiles_and_values(window, tau):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 4, generator=generator).double() for n in (13, 22, 22))
    legal = reference.legal_pairs(13, 22, window)
    result = reference.forward_head(6 * q, k, v, legal, tau=tau, softmax_scale=1.0, tile=(4, 4))
    maps, out, lse = _literal_rule((6 * q @ k.T).masked_fill(~legal, -math.inf), v, tau, (4, 4))
    assert result.tiles.tolist() == maps
    torch.testing.assert_close(result.out, out)
    torch.testing.assert_close(result.lse, lse)
    assert tau < 1 or (result.tiles == SKIPPED).any()


@pytest.mark.parametrize("case", CHEAP_CASES, ids=ids(CHEAP_CASES))
def test_tau_zero_is_full_attention(case):
    call = build(case.with_(tau=0.0), torch.float64)
    for head in heads(call):
        result, numbers = reference_head(call, head), numbers_of(call)
        q, k, v = operands(call, head, torch.float64)
        scores = numbers["softmax_scale"] * (q @ k.T)
        if numbers["softcap"]:
            scores = numbers["softcap"] * torch.tanh(scores / numbers["softcap"])
        scores = scores.masked_fill(~head.legal, -math.inf)
        sink = sink_of(call, head)
        joined = scores if sink is None else torch.cat([scores, sink.expand(len(q), 1)], 1)
        p = torch.softmax(joined, 1).nan_to_num(0.0)[:, : len(k)]
        torch.testing.assert_close(result.out, p @ v)
        torch.testing.assert_close(result.lse, torch.logsumexp(joined, 1))
        assert not (result.tiles == SKIPPED).any()
        assert not result.certificate.any()


# (forward, backward) of the three query heads of the committed slice at tau = 1 (tests/data/README.md)
CAPTURED_TILES = {
    (1024, (64, 64)): [(121, 119), (89, 83), (136, 136)],
    (2048, (64, 64)): [(360, 347), (249, 228), (528, 526)],
    (2048, (128, 64)): [(209, 204), (158, 144), (272, 272)],
    (2048, (128, 128)): [(113, 110), (95, 88), (136, 136)],
}


@pytest.mark.parametrize(("seqlen", "tile"), CAPTURED_TILES, ids=str)
def test_real_activations_retain_the_counted_tiles(seqlen, tile):
    data = load_file(CAPTURED)
    q, k, v = (data[name][:, :seqlen].float() for name in "qkv")
    legal = torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
    counts = []
    for head in range(3):
        numbers = {"tau": 1.0, "softmax_scale": 64**-0.5, "tile": tile}
        result = reference.forward_head(q[head], k[0], v[0], legal, **numbers)
        *_, backward = reference.backward_head(
            q[head], k[0], v[0], legal, result.out, result.lse, torch.zeros_like(result.out), **numbers
        )
        forward = result.tiles == RETAINED
        other_forward, other_backward = independent_tiles(q[head].double(), k[0].double(), legal, 1.0, tile)
        assert torch.equal(forward, other_forward)
        assert torch.equal(backward, other_backward)
        counts.append((int(forward.sum()), int(backward.sum())))
    assert counts == CAPTURED_TILES[seqlen, tile]


@pytest.mark.parametrize("case", CHEAP_CASES, ids=ids(CHEAP_CASES))
def test_the_backward_at_tau_zero_is_the_derivative_of_full_attention(case):
    call = build(case.with_(tau=0.0), torch.float64)
    for head in heads(call):
        q, k, v = (x.requires_grad_() for x in operands(call, head, torch.float64))
        sink = sink_of(call, head)
        sink = None if sink is None else sink.requires_grad_()
        numbers = numbers_of(call)
        full = {name: numbers[name] for name in ("softmax_scale", "softcap")}
        out, lse, _ = reference.full_attention_head(q, k, v, head.legal, sink=sink, **full)
        do = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        expected = torch.autograd.grad(out, [q, k, v] + ([] if sink is None else [sink]), do)
        with torch.no_grad():
            *gradients, _ = reference.backward_head(q, k, v, head.legal, out, lse, do, sink=sink, **numbers)
        for got, truth in zip(gradients, expected, strict=False):
            torch.testing.assert_close(got, truth)


@pytest.mark.parametrize("case", [*CHEAP_CASES, *FAMILY_CASES], ids=ids([*CHEAP_CASES, *FAMILY_CASES]))
def test_backward_support_lies_inside_forward_support(case):
    call = build(case, torch.float64)
    for head in heads(call):
        result = reference_head(call, head)
        *_, retained = reference.backward_head(
            *operands(call, head, torch.float64), head.legal, result.out, result.lse, torch.ones_like(result.out),
            sink=sink_of(call, head), **numbers_of(call),
        )  # fmt: skip
        assert not (retained & (result.tiles != RETAINED)).any()


def test_the_backward_skips_tiles_that_the_forward_kept():
    """With the sink visited last, forward keeps what the final normalizer shows to be small."""
    call = build(Case(family="sink_heavy", seqlen_q=160), torch.float64)
    head = next(iter(heads(call)))
    result = reference_head(call, head)
    *_, retained = reference.backward_head(
        *operands(call, head, torch.float64), head.legal, result.out, result.lse, result.out, **numbers_of(call)
    )
    assert retained.sum() < 0.5 * (result.tiles == RETAINED).sum()


@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_the_backward_is_the_derivative_of_attention_over_a_fixed_support(softcap):
    """Where backward keeps what forward kept, its gradients are those of softmax over the retained pairs."""
    generator = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(n, 3, generator=generator).double().requires_grad_() for n in (12, 24, 24))
    k.data[:8] = 0.0  # two tiles that every row ...
    k.data *= 0.3
    k.data[8:, 0] += 12.0
    q.data *= 0.3
    q.data[:, 0] = 2.0  # ... scores far below the rest
    sink = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    legal = reference.legal_pairs(12, 24, (-1, 0))
    numbers = {"tau": 1.0, "softmax_scale": 0.7, "tile": (4, 4), "softcap": 2.5 * softcap}

    with torch.no_grad():
        result = reference.forward_head(q, k, v, legal, sink=sink, **numbers)
    kept = (result.tiles == RETAINED).repeat_interleave(4, 0).repeat_interleave(4, 1)
    assert (result.tiles == SKIPPED).any()

    def over_support(q, k, v, sink):
        scores = reference.scores_of(q, k, 0.7, 2.5 * softcap).masked_fill(~(legal & kept), -math.inf)
        return torch.softmax(torch.cat([scores, sink.expand(12, 1)], 1), 1)[:, :24] @ v

    do = torch.randn(12, 3, generator=generator).double()
    expected = torch.autograd.grad(over_support(q, k, v, sink), (q, k, v, sink), do)
    with torch.no_grad():
        *gradients, retained = reference.backward_head(q, k, v, legal, result.out, result.lse, do, sink=sink, **numbers)
    assert torch.equal(retained, result.tiles == RETAINED)
    for got, truth in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, truth)
    assert torch.autograd.gradcheck(over_support, (q, k, v, sink))


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 50])
def test_splits_that_skip_nothing_merge_into_full_attention(num_splits):
    call = build(Case(seqlen_q=2, seqlen_k=131, sinks="learned"), torch.float64)
    head = next(iter(heads(call)))
    numbers = {**numbers_of(call), "tau": 0.0}
    tensors, sink = operands(call, head, torch.float64), sink_of(call, head)
    split = reference_decode.split_head(*tensors, head.legal, num_splits=num_splits, sink=sink, **numbers)
    full = {name: numbers[name] for name in ("softmax_scale", "softcap")}
    out, lse, _ = reference.full_attention_head(*tensors, head.legal, sink=sink, **full)
    torch.testing.assert_close(split.out, out)
    torch.testing.assert_close(split.lse, lse)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_split_is_the_unsplit_rule(family):
    call = build(Case(family=family, seqlen_q=1, seqlen_k=150), torch.float64)
    for head in heads(call):
        tensors = operands(call, head, torch.float64)
        one = reference_decode.split_head(*tensors, head.legal, num_splits=1, **numbers_of(call))
        unsplit = reference_head(call, head)
        assert torch.equal(one.tiles, unsplit.tiles)
        torch.testing.assert_close(one.out, unsplit.out)
        torch.testing.assert_close(one.certificate, unsplit.certificate)

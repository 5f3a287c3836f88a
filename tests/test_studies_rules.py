# SPDX-License-Identifier: Apache-2.0
"""The studies' rules on a layer's scores retain what the rule's definition retains, and omit what full attention says they omit."""

from __future__ import annotations

import math

import pytest
import torch

from mala_hf.full_attention import LayerCall, full_attention
from mala_hf.ops import blockwise
from mala_hf.ops.query_tile import Settings
from mala_hf.ops.reference import RETAINED, backward_head, forward_head, full_attention_head
from mala_hf.ops.reference_decode import split_head, two_pass_head
from mala_hf.ops.visibility import fixed_sequences
from mala_hf.studies import scores as scores_module
from mala_hf.studies.rules import Rule, backward_tiles, choose
from mala_hf.studies.scores import outcome, scores_by_tile

LENGTH, TILE = 192, (16, 8)
TAUS = (0.3, 1.0, 8.0)


@pytest.fixture(autouse=True)
def some_query_tiles_at_a_time(monkeypatch):
    monkeypatch.setattr(scores_module, "ELEMENTS", 4 * LENGTH * TILE[0] * 5)


def call_of(length: int = LENGTH) -> LayerCall:
    """Float32 inputs of 4 query and 2 key-value heads, each row like some rows before it and like the first ones."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randn(7, 16, generator=generator)[torch.randint(7, (length // 12 + 1,), generator=generator)]
    codes = codes.repeat_interleave(12, 0)[:length, None]
    codes[: TILE[1]] = codes.mean(0)
    q, k = (1.2 * codes + 0.4 * torch.randn(length, heads, 16, generator=generator) for heads in (4, 2))
    return LayerCall(q[None], k[None], torch.randn(1, length, 2, 24, generator=generator), softmax_scale=0.3)


def chosen(call: LayerCall, rule: Rule, tile=TILE, layer: int = 0) -> torch.Tensor:
    """Bool (H, q_tiles, k_tiles)."""
    parts = [choose(one, rule, layer) for one in scores_by_tile(call, tile)]
    key_tiles = call.q.shape[1] // tile[1]
    padded = [torch.nn.functional.pad(one, (0, key_tiles - one.shape[-1])) for one in parts]
    return torch.cat(padded).transpose(0, 1)


def head_of(call: LayerCall, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return call.q[0, :, head], call.k[0, :, head // 2], call.v[0, :, head // 2]


LEGAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


@pytest.mark.parametrize("tile", [TILE, (16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("tau", TAUS)
def test_the_rule_and_what_it_omits_are_mala(tau, tile):
    call = call_of()
    out, work = call.mala(tau, tile=tile, impl="blockwise", return_work=True)
    full, (omitted,) = full_attention(call, [work])
    assert torch.equal(chosen(call, Rule((tau,)), tile), work.retained[0])
    assert 0.1 < work.work_fraction.mean() < 0.95
    found = [outcome(one, choose(one, Rule((tau,)))) for one in scores_by_tile(call, tile)]
    assert len(found) > 1

    def rows(name):  # (H, L, ..)
        return torch.cat([getattr(one, name).transpose(0, 1).flatten(1, 2) for one in found], 1)

    torch.testing.assert_close(rows("out").transpose(0, 1), out[0])
    torch.testing.assert_close(rows("omitted"), omitted, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(rows("bound"), work.omitted_mass_bound[0], atol=1e-6, rtol=1e-4)
    error = (out[0] - full).norm(dim=-1) / full.norm(dim=-1)
    torch.testing.assert_close(rows("error").T, error, atol=2e-6, rtol=1e-3)
    slots = sum(one.slots for one in found) / LENGTH
    torch.testing.assert_close(slots.float(), work.key_slots_per_query[0])
    visible = sum(one.visible_slots for one in found) / LENGTH
    torch.testing.assert_close(visible.float(), work.visible_slots_per_query[0])


@pytest.mark.parametrize("tau", TAUS)
def test_sink_first_is_the_rule_on_keys_in_another_order(tau):
    call, found = call_of(), chosen(call_of(), Rule((tau,), order="sink"))
    order = torch.arange(LENGTH).roll(-TILE[1])  # the definition visits the last tile first: the first one goes there
    assert not torch.equal(found, chosen(call, Rule((tau,))))
    for head in range(4):
        q, k, v = head_of(call, head)
        numbers = {"tau": tau, "softmax_scale": 0.3, "tile": TILE}
        tiles = forward_head(q, k[order], v[order], LEGAL[:, order], **numbers).tiles.roll(1, 1)
        assert torch.equal(found[head], tiles == RETAINED)


@pytest.mark.parametrize("splits", [2, 5])
def test_splits_are_those_of_the_definition(splits):
    call, found = call_of(), chosen(call_of(), Rule((1.0,), splits=splits))
    assert not torch.equal(found, chosen(call, Rule((1.0,))))
    for head in range(4):
        q, k, v = head_of(call, head)
        for index in range(LENGTH // TILE[0]):
            rows = slice(index * TILE[0], (index + 1) * TILE[0])
            numbers = {"num_splits": splits, "tau": 1.0, "softmax_scale": 0.3, "tile": TILE}
            tiles = split_head(q[rows], k, v, LEGAL[rows], **numbers).tiles
            assert torch.equal(found[head, index], tiles[0] == RETAINED)


@pytest.mark.parametrize("tau", TAUS)
def test_the_full_normalizer_is_the_first_test_of_two_passes(tau):
    call, found = call_of(), chosen(call_of(), Rule((tau,), normalizer="full"))
    for head in range(4):
        q, k, v = head_of(call, head)
        lse = full_attention_head(q, k, v, LEGAL, softmax_scale=0.3)[1]
        scores = (0.3 * q @ k.T).masked_fill(~LEGAL, -math.inf)
        limit = lse + (tau / (torch.arange(LENGTH) + 1)).clamp(max=1).log()
        reach = scores >= torch.minimum(limit, scores.amax(1))[:, None]
        assert torch.equal(found[head], reach.view(LENGTH // 16, 16, LENGTH // 8, 8).any(3).any(1))
        # two passes normalise by what the first test left, and so can only retain more
        more = two_pass_head(q, k, v, LEGAL, tau=tau, softmax_scale=0.3, tile=TILE).tiles == RETAINED
        assert (found[head] & ~more).sum() == 0


@pytest.mark.parametrize("tau", TAUS)
def test_backward_tiles_are_those_of_the_backward(tau):
    call, tile = call_of(), TILE
    out, lse = call.mala(tau, tile=tile, impl="blockwise", return_lse=True)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    settings = Settings(tau, 0.3, (-1, 0), 0.0, tile)
    sequences = fixed_sequences(1, LENGTH, LENGTH, 0)
    tiles = blockwise.backward(call.q, call.k, call.v, out, lse, do, settings, sequences, None, None)[-1]
    parts = []
    for one in scores_by_tile(call, tile):
        found = backward_tiles(one, choose(one, Rule((tau,))), tau)
        parts.append(torch.nn.functional.pad(found, (0, LENGTH // tile[1] - found.shape[-1])))
    assert torch.equal(torch.cat(parts).transpose(0, 1), tiles[0] == RETAINED)
    q, k, v = head_of(call, 0)
    numbers = {"tau": tau, "softmax_scale": 0.3, "tile": tile}
    of_head = backward_head(q, k, v, LEGAL, out[0, :, 0], lse[0, 0], do[0, :, 0], **numbers)[-1]
    assert torch.equal(torch.cat(parts)[:, 0], of_head)


def test_heads_and_layers_may_have_their_own_tau():
    call = call_of()
    by_layer = {0: 1.0, 1: [0.3, 8.0, 1.0, 8.0]}
    rule = Rule(by_layer=by_layer)
    assert torch.equal(chosen(call, rule, layer=0), chosen(call, Rule((1.0,))))
    found = chosen(call, rule, layer=1)
    for head, tau in enumerate(by_layer[1]):
        assert torch.equal(found[head], chosen(call, Rule((tau,)))[head])


def test_a_certificate_keeps_its_bound_in_every_row_and_saves_more_than_the_smallest_tau():
    call, ladder = call_of(), (0.3, 1.0, 8.0, 64.0)
    rule = Rule(ladder, max_bound=0.2)
    for one in scores_by_tile(call, TILE):
        found = outcome(one, choose(one, rule))
        cautious = outcome(one, choose(one, Rule(ladder[:1])))
        holds = (found.bound <= 0.2).all(2)
        assert (holds | torch.isclose(found.bound, cautious.bound).all(2)).all()
        assert (found.omitted <= found.bound + 1e-6).all()
    sparse, dense = chosen(call, rule).sum(), chosen(call, Rule(ladder[:1])).sum()
    assert chosen(call, Rule(ladder[-1:])).sum() < sparse < dense


@pytest.mark.parametrize(
    "wrong",
    [{"order": "up"}, {"splits": 0}, {"normalizer": "half"}, {"taus": ()}, {"taus": (1.0, 2.0)}, {"max_bound": 0.1},
     {"taus": (2.0, 1.0), "max_bound": 0.1}],
    ids=str,
)  # fmt: skip
def test_rules_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="a rule has"):
        Rule(**wrong)


def test_a_length_that_is_not_whole_tiles_is_refused():
    with pytest.raises(ValueError, match="200 is not whole tiles of 16 x 16"):
        next(scores_by_tile(call_of(200), (16, 16)))

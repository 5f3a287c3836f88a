# SPDX-License-Identifier: Apache-2.0
"""Allocations of equal work have equal work, and the freest one omits the least."""

from __future__ import annotations

import pytest
import torch
from tiny_model import runs_of_tokens, tiny_llama

from mala_hf.fidelity import percentile_95
from mala_hf.full_attention import full_attention
from mala_hf.studies.activations import observe
from mala_hf.studies.allocation import (
    ALLOCATIONS,
    allocate,
    oracle,
    scaled_budgets,
    visible_tiles,
    within_budgets,
)
from mala_hf.studies.matched_work import matched_work, tile_maps, typical_budgets

TILE, LENGTH = (16, 32), 128
VISIBLE = torch.tensor([1, 1, 2, 2, 3, 3, 4, 4])


def random_mass() -> torch.Tensor:
    """(2, 3, 8, 4), 0 where nothing is visible."""
    mass = torch.rand(2, 3, 8, 4, generator=torch.Generator().manual_seed(2)) ** 4
    return mass * (torch.arange(4) < VISIBLE[:, None])


def test_a_causal_sequence_sees_the_tiles_up_to_its_last_row():
    assert torch.equal(visible_tiles(LENGTH, TILE), VISIBLE)


def test_the_oracle_takes_the_largest_masses_and_every_diagonal():
    mass = random_mass()
    chosen = oracle(mass, VISIBLE, 80)
    assert chosen.sum() == 80
    diagonal = torch.zeros_like(chosen)
    diagonal[..., torch.arange(8), VISIBLE - 1] = True
    assert chosen[diagonal].all()
    others = mass[chosen & ~diagonal]
    assert len(others) == 80 - 48
    assert others.min() >= mass[~chosen].max()


def test_budgets_are_filled_with_the_largest_masses():
    mass = random_mass()
    budgets = torch.minimum(torch.full((2, 3, 8), 2), VISIBLE)
    chosen = within_budgets(mass, VISIBLE, budgets)
    assert torch.equal(chosen.sum(-1), budgets)
    row, kept = mass[1, 2, 7], chosen[1, 2, 7]
    assert kept[3]
    assert kept[row[:3].argmax()]


@pytest.mark.parametrize("total", [48, 77, 100, 120])
def test_scaled_budgets_add_up_and_keep_their_proportions(total):
    wanted = 0.5 + torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(4)) * VISIBLE
    budgets = scaled_budgets(wanted, VISIBLE, total)
    assert budgets.sum() == total
    assert (budgets >= 1).all()
    assert (budgets <= VISIBLE).all()
    free = (budgets > 1) & (budgets < VISIBLE)
    if free.sum() > 1:
        factor = budgets[free] / wanted[free]
        assert factor.max() - factor.min() < 2 / wanted[free].min()


@pytest.mark.parametrize("total", [47, 121])
def test_a_total_out_of_reach_is_refused(total):
    with pytest.raises(ValueError, match=f"{total} tiles is not between 48 and 120"):
        scaled_budgets(torch.ones(2, 3, 8), VISIBLE, total)


def test_a_position_has_the_same_budget_in_all_heads():
    mass, retained = random_mass(), random_mass() > 0.05
    retained[..., torch.arange(8), VISIBLE - 1] = True
    typical = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(3)) * VISIBLE
    chosen = allocate("position", mass, retained, typical, VISIBLE).sum(-1)
    assert ((chosen.amax((0, 1)) - chosen.amin((0, 1))) <= 1).all()  # whole tiles
    with pytest.raises(ValueError, match="'random'"):
        allocate("random", mass, retained, typical, VISIBLE)


@pytest.mark.transformers
def test_the_model_sees_full_attention_while_it_is_observed():
    model, ids = tiny_llama(layers=3), runs_of_tokens(LENGTH)
    outs = {}
    observe(model, ids, lambda layer, call: outs.setdefault(layer, call))
    assert sorted(outs) == [0, 1, 2]
    assert model.config._attn_implementation != "mala"
    some = {}
    observe(model, ids, lambda layer, call: some.setdefault(layer, call), layers=[1])
    torch.testing.assert_close(some[1].q, outs[1].q)
    expected = model.model.layers[0].self_attn.o_proj(full_attention(outs[0])[0].flatten(1))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    residual = states[0][0] + expected
    mlp = model.model.layers[0].mlp(model.model.layers[0].post_attention_layernorm(residual))
    torch.testing.assert_close(states[1][0], residual + mlp, atol=1e-4, rtol=1e-4)


@pytest.mark.transformers
def test_allocations_of_a_models_layers_have_equal_work_and_the_oracle_omits_least():
    model, taus = tiny_llama(layers=2), (1.0, 10.0)
    typical = typical_budgets(model, [runs_of_tokens(LENGTH, run=24, seed=seed) for seed in (2, 3)], taus, TILE)
    ids = runs_of_tokens(LENGTH, run=24)
    rows = matched_work(model, ids, taus, TILE, typical)
    assert [(row["tau"], row["allocation"]) for row in rows] == [(tau, name) for tau in taus for name in ALLOCATIONS]
    for tau in taus:
        by_name = {row["allocation"]: row for row in rows if row["tau"] == tau}
        assert len({row["key_slots_per_query"] for row in by_name.values()}) == 1
        assert by_name["mala"]["work_fraction"] < 0.95
        masses = {name: row["omitted_mass_mean"] for name, row in by_name.items()}
        assert masses["oracle"] == min(masses.values())
        assert masses["mala"] > 0
    # what is said of MALA is what its own operator did
    found = []
    observe(model, ids, lambda layer, call: found.append((call, call.mala(1.0, tile=TILE, return_work=True)[1])))
    omitted = torch.stack([full_attention(call, [work])[1][0] for call, work in found])
    mala = next(row for row in rows if row["allocation"] == "mala")
    assert mala["omitted_mass_mean"] == pytest.approx(omitted.mean().item(), rel=1e-4)
    assert mala["omitted_mass_p95"] == pytest.approx(percentile_95(omitted), rel=1e-4)
    slots = torch.stack([work.key_slots_per_query for _, work in found])
    assert mala["key_slots_per_query"] == pytest.approx(slots.mean().item())
    mass, (retained, _) = tile_maps(model, ids, taus, TILE)
    torch.testing.assert_close(mass.sum(-1), torch.full((2, 4, LENGTH // TILE[0]), float(TILE[0])))
    assert torch.equal(retained, torch.stack([work.retained[0] for _, work in found]))

# SPDX-License-Identifier: Apache-2.0
"""A rule in the place of a model's attention is MALA's own operator; gradients and paths are what they say."""

from __future__ import annotations

import pytest
import torch
from tiny_model import runs_of_tokens, tiny_llama

from mala_hf import mala_attention
from mala_hf.fidelity import percentile_95
from mala_hf.full_attention import full_attention
from mala_hf.perplexity import token_nll, window_logits
from mala_hf.studies.activations import run_rule, text_windows
from mala_hf.studies.decode_forms import decode_rows
from mala_hf.studies.open_questions import Baseline, Variant, head_path, head_points, layer_path, measure, variants_of
from mala_hf.studies.operator_fidelity import fidelity_rows, layer_steps
from mala_hf.studies.rules import Rule

TILE, LENGTH = (16, 32), 128

pytestmark = pytest.mark.transformers


@pytest.fixture(scope="module")
def model():
    return tiny_llama(layers=2)


IDS = runs_of_tokens(LENGTH, run=24)


def test_the_rule_in_every_layer_gives_the_logits_of_mala(model):
    logits, figures = run_rule(model, IDS, Rule((10.0,)), TILE)
    with mala_attention(model, tau=10.0, tile=TILE):
        expected = window_logits(model, IDS)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)
    assert figures.to_dict()["work_fraction"] < 0.9


def test_full_attention_is_its_own_baseline(model):
    baseline = Baseline.of(model, IDS)
    row = measure(model, baseline, Variant("rule", 0.0, Rule((0.0,)), TILE))
    assert (row["work_fraction"], row["omitted_mass_mean"]) == (1.0, 0.0)
    assert row["kl_max"] < 1e-5
    assert row["nll"] == pytest.approx(row["nll_full"], abs=1e-5)
    coarse = measure(model, baseline, Variant("rule", 100.0, Rule((100.0,)), TILE))
    assert coarse["kl_mean"] > 10 * row["kl_mean"]


def test_a_layers_gradient_is_that_of_the_loss(model):
    steps = layer_steps(model, IDS)
    assert all(weight.requires_grad for weight in model.parameters())
    assert [step.layer for step in steps] == [0, 1]
    # nudge the output of the last layer: the loss moves by the gradient times the nudge
    last = model.model.layers[1].self_attn.o_proj
    nudge = 1e-3 * torch.randn(1, LENGTH, 4, 32, generator=torch.Generator().manual_seed(0))

    def loss(change):
        def moved(module, arguments):
            return (arguments[0].double() + change.flatten(2),)

        handle = last.register_forward_pre_hook(moved)
        try:
            logits = window_logits(model, IDS)[:-1]
        finally:
            handle.remove()
        return token_nll(logits, IDS[0, 1:]).double().mean().item()

    model.double()
    try:
        slope = (loss(nudge) - loss(-nudge)) / 2
    finally:
        model.float()
    assert slope == pytest.approx((steps[1].do.double() * nudge).sum().item(), rel=1e-2)
    some = layer_steps(model, IDS, layers=[1])
    torch.testing.assert_close(some[0].do, steps[1].do)


def test_fidelity_is_that_of_the_operator(model):
    steps = layer_steps(model, IDS)
    full, mala = fidelity_rows(steps, (0.0, 10.0), tile=TILE)
    assert (full["omitted_mass_mean"], full["flops_fraction"]) == (0.0, 1.0)
    assert max(full[f"{name}_error_mean"] for name in ("output", "dv")) < 1e-5
    masses, errors = [], []
    for step in steps:
        out, work = step.call.mala(10.0, tile=TILE, return_work=True)
        truth, (omitted,) = full_attention(step.call, [work])
        masses.append(omitted)
        errors.append((out[0] - truth).norm(dim=-1) / truth.norm(dim=-1))
    assert mala["omitted_mass_mean"] == pytest.approx(torch.stack(masses).mean().item(), rel=1e-4)
    assert mala["omitted_mass_p95"] == pytest.approx(percentile_95(torch.stack(masses)), rel=1e-4)
    assert mala["output_error_mean"] == pytest.approx(torch.stack(errors).mean().item(), rel=0.02)  # rounding
    assert mala["dv_error_mean"] > 10 * full["dv_error_mean"]


def test_paths_end_at_the_least_work_and_heads_go_farther(model):
    points = head_points(model, IDS, (1.0, 10.0, 100.0), TILE)
    assert [[point.tau for point in head] for head in points[0]] == [[0.0, 1.0, 10.0, 100.0]] * 4
    layers, heads = layer_path(points, 3), head_path(points, 3)
    least = {
        layer: min(sum(head[place].slots for head in of_heads) for place in range(4))
        for layer, of_heads in points.items()
    }

    def slots(taus):
        found = {}
        for layer, of_layer in taus.items():
            by_head = of_layer if isinstance(of_layer, list) else [of_layer] * 4
            found[layer] = sum(
                next(point.slots for point in head if point.tau == tau)
                for head, tau in zip(points[layer], by_head, strict=True)
            )
        return found

    assert slots(layers[-1]) == least
    work = [sum(slots(taus).values()) for taus in layers]
    assert work == sorted(work, reverse=True)
    assert sum(slots(heads[-1]).values()) <= sum(least.values())
    _, figures = run_rule(model, IDS, Rule(by_layer=layers[-1]), TILE)
    assert figures.to_dict()["work_fraction"] < 1


def test_every_variant_has_a_name_of_its_own_at_its_setting():
    variants = variants_of((1.0, 10.0, 100.0), (0.1, 0.3), TILE)
    assert len({(one.name, one.setting) for one in variants}) == len(variants)
    assert {one.tile for one in variants if "8 keys" in one.name} == {(16, 8)}


def test_decode_omits_nothing_at_tau_0_and_splits_retain_more(model):
    rows = decode_rows(model, IDS, (0.0, 10.0), 8, 3, forms=(("single", 0), ("split", 4)))
    assert [(row["tau"], row["form"], row["splits"]) for row in rows[:2]] == [(0.0, "single", 0), (0.0, "split", 4)]
    assert all(row["work_fraction"] == 1 and row["omitted_mass_p95"] == 0 for row in rows[:2])
    assert all(row["output_error_p95"] < 1e-4 for row in rows[:2])
    assert rows[2]["work_fraction"] < rows[3]["work_fraction"] < 1
    assert rows[2]["omitted_mass_mean"] > rows[3]["omitted_mass_mean"] > 0


def test_windows_are_spread_over_a_text(place):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "tiny")
    windows = text_windows(tokenizer, "abcdefghij", 2, 3)
    assert [tokenizer.decode(one[0]) for one in windows] == ["ab", "de", "gh"]
    with pytest.raises(ValueError, match="fewer than 3 windows of 4"):
        text_windows(tokenizer, "abcdefghij", 4, 3)

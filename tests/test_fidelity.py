# SPDX-License-Identifier: Apache-2.0
"""The exact figures of a layer agree with an unblocked computation, and measuring leaves the model and the registry alone."""

import pytest
import torch
from tiny_model import runs_of_tokens, tiny_llama
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import mala_hf  # noqa: F401  registers "mala"
from mala_hf.fidelity import attention_fidelity, layer_fidelity, measured_attention, percentile_95
from mala_hf.ops import mala_attn_func


def peaked_inputs(length: int):
    """q (1, length, 4, 32), k and v (1, length, 2, 32) whose rows attend mostly to a few segments of 32 keys."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(length // 32 + 1, 32, generator=generator).repeat_interleave(32, 0)[:length]
    k = (codes[:, None] + 0.3 * torch.randn(length, 2, 32, generator=generator))[None]
    q = (1.2 * codes[:, None] + 0.3 * torch.randn(length, 4, 32, generator=generator))[None]
    return q, k, torch.randn(1, length, 2, 32, generator=generator)


@pytest.mark.parametrize("length", [256, 203], ids=["whole tiles", "odd length"])
def test_masses_and_errors_equal_an_unblocked_computation(length):
    q, k, v = peaked_inputs(length)
    out, figures = layer_fidelity(q, k, v, scale=32**-0.5, tau=1.0)
    expected_out, work = mala_attn_func(q, k, v, tau=1.0, causal=True, return_work=True)
    torch.testing.assert_close(out, expected_out)

    key, value = (x[0].transpose(0, 1).repeat_interleave(2, 0) for x in (k, v))
    scores = 32**-0.5 * q[0].transpose(0, 1) @ key.transpose(1, 2)
    probabilities = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    skipped = (
        (work.tiles[0] == 1).repeat_interleave(work.tile[0], 1).repeat_interleave(work.tile[1], 2)[:, :length, :length]
    )
    omitted = (probabilities * skipped).sum(-1)
    full = (probabilities @ value).transpose(0, 1)
    error = (out[0] - full).norm(dim=-1) / full.norm(dim=-1)

    assert 0 < figures.work_fraction[0] < 1
    assert figures.omitted_mass_mean == pytest.approx(omitted.mean().item(), rel=1e-4)
    assert figures.omitted_mass_p95 == pytest.approx(percentile_95(omitted), rel=1e-4)
    assert figures.output_error_mean == pytest.approx(error.mean().item(), rel=1e-3)
    assert figures.bound_violation <= 1e-6
    assert figures.rounding_error_mean < 1e-5


def test_tau_zero_omits_nothing():
    _, figures = layer_fidelity(*peaked_inputs(200), scale=32**-0.5, tau=0.0)
    assert figures.omitted_mass_p95 == 0
    assert figures.omitted_mass_bound_mean == 0
    assert set(figures.work_fraction) == {1.0}
    assert figures.output_error_p95 < 1e-5


def test_every_layer_is_measured_and_the_model_comes_back_as_it_was():
    model, ids = tiny_llama(layers=3), runs_of_tokens(256)
    before = model.config._attn_implementation, ALL_ATTENTION_FUNCTIONS["mala"]
    layers = attention_fidelity(model, ids, tau=1.0)
    assert [layer.layer for layer in layers] == [0, 1, 2]
    assert all(len(layer.work_fraction) == 4 and min(layer.work_fraction) < 1 for layer in layers)
    assert (model.config._attn_implementation, ALL_ATTENTION_FUNCTIONS["mala"]) == before


def test_layers_that_cannot_be_measured_are_refused_and_the_registry_is_restored():
    registered = ALL_ATTENTION_FUNCTIONS["mala"]
    q = torch.zeros(1, 4, 8, 32)
    with pytest.raises(NotImplementedError, match="sliding_window=4"), measured_attention(1.0):
        ALL_ATTENTION_FUNCTIONS["mala"](None, q, q, q, None, sliding_window=4)
    with pytest.raises(NotImplementedError, match="one unpadded sequence"), measured_attention(1.0):
        ALL_ATTENTION_FUNCTIONS["mala"](None, q, q, q, torch.ones(1, 8, dtype=torch.bool))
    assert ALL_ATTENTION_FUNCTIONS["mala"] is registered


def test_the_percentile_is_taken_over_all_entries():
    assert percentile_95(torch.arange(1, 101).view(10, 10).float()) == 95
    assert percentile_95(torch.tensor([2.0])) == 2

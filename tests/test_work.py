# SPDX-License-Identifier: Apache-2.0
"""What ``mala-hf work`` measures: masses, errors and gradients agree with unblocked computations, on the model's real inputs."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from models import DECODERS, WINDOW, tiny, tokens
from tiny_model import byte_tokenizer, runs_of_tokens, tiny_llama
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mala_hf.break_even import break_even
from mala_hf.fidelity import percentile_95
from mala_hf.full_attention import LayerCall, full_attention, full_gradients
from mala_hf.layer_work import gradient_errors, head_figures
from mala_hf.prompt import prompt_ids
from mala_hf.recording import record_work
from mala_hf.work_study import study_work

pytestmark = pytest.mark.transformers
TAUS = (1.0, 10.0)


def call_of(length: int = 150, **more) -> LayerCall:
    """Peaked float32 inputs of 4 query and 2 key-value heads, each row like the few rows before it."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randn(length // 16 + 1, 16, generator=generator).repeat_interleave(16, 0)[:length, None]
    q, k = (1.5 * codes + 0.5 * torch.randn(length, heads, 16, generator=generator) for heads in (4, 2))
    v = torch.randn(length, 2, 24, generator=generator)
    return LayerCall(q[None], k[None], v[None], softmax_scale=0.3, **more)


def unblocked(call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Out (L, H, E) and probabilities (H, L, L) in float64, all at once."""
    q, k, v = (x[0].double().transpose(0, 1) for x in (call.q, call.k, call.v))
    k, v = (x.repeat_interleave(2, 0) for x in (k, v))
    scores = call.softmax_scale * q @ k.transpose(1, 2)
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    row, key = torch.arange(q.shape[1])[:, None], torch.arange(q.shape[1])
    legal = (key <= row) & (row - key < (call.window or q.shape[1]))
    weights = scores.exp() * legal
    sinks = 0 if call.sinks is None else call.sinks.double().exp()[:, None, None]
    p = weights / (weights.sum(-1, keepdim=True) + sinks)
    return (p @ v).transpose(0, 1), p


KINDS = {
    "plain": {},
    "window": {"window": 40},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([-1.0, 0.5, 2.0, 4.0])},
}


@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
def test_full_attention_and_its_gradients_are_those_of_the_definition(more):
    call = call_of(**more)
    leaves = call.leaves()
    expected, _ = unblocked(leaves)
    do = torch.randn(expected[None].shape, generator=torch.Generator().manual_seed(1))
    truth = torch.autograd.grad(expected[None], (leaves.q, leaves.k, leaves.v), do.double())
    out, _ = full_attention(call)
    torch.testing.assert_close(out, expected.detach().float(), atol=1e-5, rtol=1e-4)
    for found, one in zip(full_gradients(call, do), truth, strict=True):
        torch.testing.assert_close(found, one.float(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
def test_the_figures_of_each_head_equal_an_unblocked_computation(more):
    call = call_of(**more)
    figures, works = head_figures(call, (0.0, *TAUS), audit=True)
    full, p = unblocked(call)
    length = p.shape[1]
    for tau, found, work in zip((0.0, *TAUS), figures, works, strict=True):
        out = call.mala(tau)[0].double()
        skipped = (work.tiles[0] == 1).repeat_interleave(work.tile[0], 1).repeat_interleave(work.tile[1], 2)
        omitted = (p * skipped[:, :length, :length]).sum(-1)
        error = ((out - full).norm(dim=-1) / full.norm(dim=-1)).T
        for head in range(4):
            assert found.omitted_mass_mean[head] == pytest.approx(omitted[head].mean().item(), rel=1e-3, abs=1e-9)
            assert found.omitted_mass_p95[head] == pytest.approx(percentile_95(omitted[head]), rel=1e-3, abs=1e-9)
            assert found.omitted_mass_mean[head] <= found.omitted_mass_bound_mean[head] + 1e-7
            assert found.output_error_mean[head] == pytest.approx(error[head].mean().item(), rel=1e-2, abs=1e-6)
    assert max(figures[0].output_error_p95) < 1e-5
    assert min(figures[2].work_fraction) < 1


def test_gradient_errors_are_relative_to_full_attention_and_grow_with_tau():
    call = call_of()
    do = torch.randn(1, 150, 4, 24, generator=torch.Generator().manual_seed(2))
    rounding, *errors, wild = gradient_errors(call, (0.0, *TAUS, 1e3), do)
    assert {name: len(values) for name, values in rounding.items()} == {"dq_error": 4, "dk_error": 2, "dv_error": 2}
    assert max(max(values) for values in rounding.values()) < 1e-4
    truth = full_gradients(call, do)[0]
    leaves = call.leaves()
    (dq,) = torch.autograd.grad(leaves.mala(10.0), leaves.q, do)
    error = (dq - truth).square().sum((0, 1, 3)).sqrt() / truth.square().sum((0, 1, 3)).sqrt()
    assert errors[1]["dq_error"] == pytest.approx(error.tolist(), rel=1e-4)
    assert min(wild["dq_error"]) > max(rounding["dq_error"])


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral", "qwen3_moe"])
def test_every_kind_of_layer_is_measured_and_full_attention_is_what_the_model_runs(name):
    assert name in DECODERS
    model, ids = tiny(name, peaked=3.0), tokens(1, 80 + WINDOW)
    before = model.config._attn_implementation, ALL_ATTENTION_FUNCTIONS["mala"]
    study = study_work(model, ids, TAUS, audit=True, gradients=True)
    assert (model.config._attn_implementation, ALL_ATTENTION_FUNCTIONS["mala"]) == before
    assert study.taus == (0.0, *TAUS)
    assert [[one.layer for one in run] for run in study.runs] == [[0, 1]] * 3
    for one, gradients in zip(study.runs[0], study.gradients, strict=True):
        assert max(one.output_error_p95) < 1e-5
        assert max(gradients[0]["dv_error"]) < 1e-4


def test_the_incoming_gradient_is_that_of_the_language_model_loss(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "mala_hf.work_study.gradient_errors", lambda call, taus, do: seen.append(do) or [{}] * len(taus)
    )
    model, ids = tiny("llama", peaked=2.0), tokens(1, 60)
    study_work(model, ids, gradients=True)

    hidden = []
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, inputs: inputs[0].retain_grad() or hidden.append(inputs[0])
        )
        for layer in model.model.layers
    ]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for handle in handles:
        handle.remove()
    for do, expected in zip(seen, hidden, strict=True):
        torch.testing.assert_close(do.flatten(2), expected.grad, atol=1e-6, rtol=1e-3)


def test_a_frozen_model_has_gradients_too():
    model, ids = tiny_llama().requires_grad_(False), runs_of_tokens(128)
    frozen = study_work(model, ids, gradients=True)
    assert frozen.gradients == study_work(model.requires_grad_(True), ids, gradients=True).gradients
    assert all(weight.grad is None for weight in model.parameters())


def test_the_first_layer_does_what_the_recorder_sees_in_a_run_with_mala():
    model, ids = tiny_llama(), runs_of_tokens(256)
    model.set_attn_implementation("mala")
    with torch.no_grad(), record_work(model) as report:
        model(input_ids=ids, use_cache=False)
    study = study_work(model, ids)
    assert study.runs[1][0].work_fraction == pytest.approx(report.layers[0].work_fraction.tolist())
    assert study.runs[1][0].omitted_mass_bound_mean == pytest.approx(report.layers[0].omitted_mass_bound_mean.tolist())


def test_the_tile_map_is_of_the_head_with_the_least_work_or_of_the_one_asked_for():
    model, ids = tiny_llama(layers=3), runs_of_tokens(300, run=96)
    study = study_work(model, ids, TAUS)
    fractions = {(one.layer, head): x for one in study.runs[1] for head, x in enumerate(one.work_fraction)}
    assert [one.tau for one in study.tile_maps] == [1.0, 10.0]
    assert fractions[study.tile_maps[0].layer, study.tile_maps[0].head] == min(fractions.values())
    (chosen,) = study_work(model, ids, layer=2, head=3).tile_maps
    assert (chosen.layer, chosen.head) == (2, 3)
    rows = chosen.to_rows()
    assert [len(row) for row in rows] == [1, 2, 3, 4, 5]
    slots = sum(row.count("#") * min(64, 300 - 64 * n) for n, row in enumerate(rows)) * 64 / 300
    assert slots == pytest.approx(study.runs[1][2].key_slots_per_query[3])


def test_the_summary_weighs_heads_and_names_the_lowest():
    study = study_work(tiny_llama(layers=3), runs_of_tokens(300, run=96), TAUS, audit=True).to_dict()
    for run in study["runs"]:
        found = run["summary"]
        slots, visible = (
            [x for layer in run["layers"] for x in layer[f"{kind}_slots_per_query"]] for kind in ("key", "visible")
        )
        assert found["work_fraction"] == pytest.approx(sum(slots) / sum(visible))
        lowest = run["layers"][found["min_head"]["layer"]]["work_fraction"][found["min_head"]["head"]]
        assert lowest == found["work_fraction_min_head"]
        assert lowest == pytest.approx(min(a / b for a, b in zip(slots, visible, strict=True)))
        assert found["operations_fraction"] == pytest.approx((1 + found["work_fraction"]) / 2)
        assert found["post_score_share"] == pytest.approx(found["work_fraction"] / (1 + found["work_fraction"]))


def test_the_estimate_counts_score_discovery_in_full():
    nothing_saved, mean = break_even(1000, 1000, 64, 64), break_even(250, 1000, 64, 64)
    assert (nothing_saved.operations_fraction, nothing_saved.overhead) == (1, 1)
    assert mean.post_score_share_of_full == 0.5
    assert mean.post_score_share == pytest.approx(0.2)
    assert mean.operations_fraction == pytest.approx(0.625)
    assert mean.overhead == pytest.approx(1.6)
    assert break_even(1000, 1000, 192, 128).post_score_share_of_full == 0.4
    with pytest.raises(ValueError, match="at most 10, got 11"):
        break_even(11, 10, 64, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": 2}, "layer 2 does not exist: the model has 2, 0 to 1"),
        ({"layer": -1}, "layer -1 does not exist"),
        ({"layer": 0, "head": 4}, "head 4 does not exist: the model has 4, 0 to 3"),
        ({"head": 1}, "head 1 of which layer"),
        ({"taus": ()}, "at least one, got"),
        ({"taus": (float("inf"),)}, "finite numbers >= 0"),
        ({"input_ids": torch.zeros(1, 1, dtype=torch.long)}, "at least 2 tokens are needed, got 1"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        study_work(tiny_llama(), **{"input_ids": runs_of_tokens(64), **arguments})


def test_models_without_such_attention_are_refused():
    config = hf.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ValueError, match="Mamba"):
        study_work(hf.MambaForCausalLM(config).eval(), tokens(1, 20))
    registered = ALL_ATTENTION_FUNCTIONS["mala"]
    model = tiny("llama")
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match="layer 0 is not plain causal attention"):
        study_work(model, tokens(1, 20))
    assert ALL_ATTENTION_FUNCTIONS["mala"] is registered


def test_dropout_is_not_ignored():
    model = tiny("llama").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="layer 0 asks for attention dropout"):
        study_work(model, tokens(1, 20))


def test_a_bias_that_a_layer_adds_is_not_ignored(monkeypatch):
    model = tiny("llama")
    attention = type(model.model.layers[0].self_attn)
    forward, bias = attention.forward, torch.zeros(1, 4, 20, 20)
    monkeypatch.setattr(attention, "forward", lambda *args, **kwargs: forward(*args, position_bias=bias, **kwargs))
    with pytest.raises(ValueError, match="layer 0 asks for a position bias"):
        study_work(model, tokens(1, 20))


def test_in_bfloat16_the_errors_at_tau_zero_are_its_rounding():
    study = study_work(tiny("llama", peaked=2.0).bfloat16(), tokens(1, 100), gradients=True)
    for one, gradients in zip(study.runs[0], study.gradients, strict=True):
        assert 1e-4 < min(one.output_error_mean) < max(one.output_error_mean) < 2e-2
        assert 1e-4 < min(gradients[0]["dv_error"]) < max(gradients[0]["dv_error"]) < 2e-2


def test_a_prompt_is_what_the_model_would_read():
    tokenizer = byte_tokenizer()
    assert prompt_ids(tokenizer, "abcdef").shape == (1, 6)
    assert prompt_ids(tokenizer, "abcdef", 4).tolist() == prompt_ids(tokenizer, "abcd").tolist()
    assert prompt_ids(tokenizer, "abcdef", at_most=5).shape == (1, 5)
    with pytest.raises(ValueError, match="has 6 tokens, fewer than the length 7"):
        prompt_ids(tokenizer, "abcdef", 7)
    with pytest.raises(ValueError, match="at least 2 tokens, got 0"):
        prompt_ids(tokenizer, "abcdef", 0)
    with pytest.raises(ValueError, match="no tokens"):
        prompt_ids(tokenizer, "")


def test_the_token_that_opens_every_text_counts():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer._tokenizer.post_processor = __import__("tokenizers").processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    ids = prompt_ids(tokenizer, "abcdef", 4)
    assert ids[0, 0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[0, 1:]) == "abc"

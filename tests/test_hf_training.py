# SPDX-License-Identifier: Apache-2.0
"""Training: loss and gradients, gradient checkpointing, low precision, dropout."""

from __future__ import annotations

import pytest
import torch
from models import DECODERS, SMALL_TILE, bart, bert, clone, padding, tiny, tokens
from torch.testing import assert_close

import mala_hf
from mala_hf.ops import operators

pytestmark = pytest.mark.transformers

LENGTH = 30
MASKS = {
    "plain": None,
    "left": padding(LENGTH, (0, LENGTH), (8, LENGTH)),
    "right": padding(LENGTH, (0, LENGTH), (0, 22)),
}


def step(model, mask: torch.Tensor | None = None, **options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of one training step."""
    model.train()
    ids = tokens(2, LENGTH)
    inputs: dict = {"input_ids": ids, "labels": ids.clone()}
    if mask is not None:
        # the token after the padding is predicted from a padded row, where implementations may differ
        first = mask * (mask.cumsum(-1) == 1)
        inputs |= {"attention_mask": mask, "labels": ids.masked_fill((mask == 0) | (first == 1), -100)}
    loss = model(**inputs, **options).loss
    loss.backward()
    return loss.detach(), [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def with_attention(model, name: str, **mala):
    model = clone(model)
    model.set_attn_implementation(name)
    if mala:
        model.config.mala = mala
    return model


def assert_same_step(one, other, tolerance: float = 1e-3):
    assert_close(one[0], other[0], atol=1e-4, rtol=1e-4)
    for gradient, expected in zip(one[1], other[1], strict=True):
        assert (gradient - expected).norm() <= tolerance * expected.norm() + 1e-6


def assert_same_bits(one, other):
    assert torch.equal(one[0], other[0])
    for gradient, expected in zip(one[1], other[1], strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("family", DECODERS)
def test_loss_and_gradients_equal_eager_at_tau_zero(family, mask):
    model = tiny(family)
    exact, out = (step(with_attention(model, name, tau=0), MASKS[mask]) for name in ("eager", "mala"))
    assert_same_step(out, exact)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt_oss"])
def test_loss_and_gradients_equal_the_reference_where_tiles_are_skipped(family):
    model = tiny(family, peaked=4)
    model.config.mala = {"tile": SMALL_TILE}
    names = ("mala_reference", "mala")
    exact, out = (step(with_attention(model, name), MASKS["left"]) for name in names)
    assert_same_step(out, exact)
    dense = step(with_attention(model, "mala", tau=0), MASKS["left"])
    assert max((a - b).norm() / b.norm() for a, b in zip(out[1], dense[1], strict=True)) > 1e-2


CHECKPOINTING = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "reused support": {"use_reentrant": False, "context_fn": mala_hf.reuse_support},
}


@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("mask", ["plain", "left"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_oss"])
def test_gradient_checkpointing_changes_no_bit(family, mask, kind):
    model = tiny(family, peaked=3)
    model.config.mala = {"tile": SMALL_TILE}
    plain = step(with_attention(model, "mala"), MASKS[mask], use_cache=False)  # as under checkpointing: other strides
    checkpointed = with_attention(model, "mala")
    checkpointed.gradient_checkpointing_enable(CHECKPOINTING[kind])
    if kind == "reentrant":
        checkpointed.enable_input_require_grads()
    assert_same_bits(step(checkpointed, MASKS[mask]), plain)


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_work_is_recorded_under_gradient_checkpointing(kind):
    model = with_attention(tiny("llama", peaked=3), "mala", tile=SMALL_TILE)
    model.gradient_checkpointing_enable(CHECKPOINTING[kind])
    model.enable_input_require_grads()
    with mala_hf.record_work(model) as report:
        step(model, MASKS["left"])
    assert report.layers[0].forwards == 2  # the second is the recomputation


def test_each_layer_recomputes_with_its_own_support(monkeypatch):
    model = with_attention(tiny("llama", peaked=4), "mala", tile=SMALL_TILE)
    model.gradient_checkpointing_enable(CHECKPOINTING["reused support"])
    calls, forward = [], operators.run_forward
    monkeypatch.setattr(operators, "run_forward", lambda *args: calls.append((args, forward(*args))) or calls[-1][1])
    step(model)
    (_, first), (_, second) = calls[:2]
    known = [
        args[6] for args, _ in calls
    ]  # autograd stops a recomputation inside its last operator, which is recorded here
    assert known[:2] == [None, None]
    assert known[2] is second[-1]
    assert known[3] is first[-1]
    assert not torch.equal(first[-1], second[-1])


@pytest.mark.parametrize("cache", [True, False])
def test_a_cache_left_on_in_training_changes_nothing(cache):
    model = tiny("llama")
    exact, out = (step(with_attention(model, name, tau=0), use_cache=cache) for name in ("eager", "mala"))
    assert_same_step(out, exact)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_autocast_trains_as_closely_as_eager_under_autocast(family):
    model = tiny(family)
    exact = step(with_attention(model, "eager"))
    errors = {}
    for name in ("eager", "mala"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, gradients = step(with_attention(model, name, tau=0))
        errors[name] = sum((a - b).norm() / b.norm() for a, b in zip(gradients, exact[1], strict=True))
    assert errors["mala"] <= 1.2 * errors["eager"]


def test_the_saved_support_changes_no_bit_of_a_step(monkeypatch):
    model = tiny("llama", peaked=4)
    saved, forward = [], operators.run_forward
    monkeypatch.setattr(operators, "run_forward", lambda *args: saved.append(args[-1]) or forward(*args))
    with_support = step(with_attention(model, "mala", tile=SMALL_TILE))
    assert saved == [True, True]
    monkeypatch.setattr(operators, "run_forward", lambda *args: forward(*args[:-1], False))
    assert_same_bits(step(with_attention(model, "mala", tile=SMALL_TILE)), with_support)


def test_bfloat16_trains_as_closely_as_eager():
    model = tiny("llama")
    exact = step(with_attention(model, "eager"))
    errors = {}
    for name in ("eager", "mala"):
        _, gradients = step(with_attention(model, name, tau=0).bfloat16(), MASKS["plain"])
        errors[name] = sum((a.float() - b).norm() / b.norm() for a, b in zip(gradients, exact[1], strict=True))
    assert errors["mala"] <= 1.2 * errors["eager"]


def test_padded_rows_give_finite_gradients():
    model = with_attention(tiny("gemma2"), "mala").bfloat16().train()
    out = model(tokens(2, LENGTH), attention_mask=padding(LENGTH, (0, LENGTH), (LENGTH // 2, LENGTH)))
    out.logits.sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)


@pytest.mark.parametrize("build", [bert, bart])
def test_encoders_and_encoder_decoders_have_the_gradients_of_eager(build):
    gradients = []
    for name in ("eager", "mala"):
        model = with_attention(tiny(build), name, tau=0)
        out = model(tokens(2, LENGTH), attention_mask=MASKS["right"])
        (out[0] * MASKS["right"][..., None]).square().mean().backward()
        gradients.append([weight.grad for weight in model.parameters() if weight.grad is not None])
    for exact, gradient in zip(*gradients, strict=True):
        assert (gradient - exact).norm() <= 1e-3 * exact.norm() + 1e-6


def test_dropout_is_refused_in_training_and_irrelevant_in_evaluation():
    model = with_attention(tiny("llama"), "mala")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model(tokens(1, 5))
    with pytest.raises(ValueError, match="attention_dropout"):
        model.train()(tokens(1, 5))


def test_output_attentions_warns_and_returns_no_weights():
    from mala_hf.ops import hf

    hf._warn_no_weights.cache_clear()
    model = with_attention(tiny("llama"), "mala")
    with pytest.warns(UserWarning, match="output_attentions"):
        out = model(tokens(1, 5), output_attentions=True)
    assert not [weights for weights in out.attentions or () if weights is not None]


def test_hidden_states_are_returned():
    model = with_attention(tiny("llama"), "mala")
    assert len(model(tokens(1, 5), output_hidden_states=True).hidden_states) == 3

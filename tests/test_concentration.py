# SPDX-License-Identifier: Apache-2.0
"""The concentration term is what its formula says, reaches the gradients as if added to the loss, and leaves nothing behind."""

from __future__ import annotations

import math

import pytest
import torch
from models import SMALL_TILE, clone, padding, tiny, tokens
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments

import mala_hf
from mala_hf import concentration
from mala_hf.concentration import Concentration, ConcentrationCallback, choose_starts, concentrating, tile_excess
from mala_hf.ops.reference import backward_head

pytestmark = pytest.mark.transformers

SCALE, LENGTH, TILE = 0.6, 30, (4, 4)


def qk(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences, four query heads, two KV heads."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, LENGTH, 8, generator=generator), torch.randn(2, 2, LENGTH, 8, generator=generator)


def excess_by_loops(q, k, start, tau, window, softcap):
    """Largest ``log(p_ij L_i / tau)`` of each key tile, from probabilities."""
    found = []
    first = 0 if window is None else max(0, start - window + 1) // TILE[1]
    for b in range(2):
        for h in range(4):
            for tile in range(first, start // TILE[1]):
                best = -math.inf
                for i in range(start, min(start + TILE[0], LENGTH)):
                    seen = range(0 if window is None else max(0, i - window + 1), i + 1)
                    scores = torch.stack([SCALE * q[b, h, i] @ k[b, h // 2, j] for j in seen]).double()
                    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                    p = dict(zip(seen, scores.softmax(0).tolist(), strict=True))
                    share = min(tau / len(seen), 1.0)
                    own = [math.log(p[j] / share) for j in range(tile * 4, tile * 4 + 4) if j in p]
                    best = max([best, *own])
                found.append(best)
    return torch.tensor(found).view(2, 4, -1)


@pytest.mark.parametrize(
    ("tau", "window", "softcap"), [(1.0, None, 0.0), (3.0, None, 2.0), (0.5, 11, 0.0), (40.0, None, 0.0)]
)
@pytest.mark.parametrize("start", [8, 28])
def test_excess_is_that_of_the_strongest_row(start, tau, window, softcap):
    q, k = qk()
    found = tile_excess(
        q, k, start, softmax_scale=SCALE, tau=tau, tile=TILE, window=window, softcap=softcap, temperature=1e-4
    )
    assert_close(found, excess_by_loops(q, k, start, tau, window, softcap).float(), atol=1e-4, rtol=1e-4)


def test_a_tile_with_a_positive_excess_is_what_backward_retains():
    q, k = (2 * x for x in qk(1))
    for head in range(4):
        q1, k1 = q[0, head], k[0, head // 2]
        scores = (SCALE * q1 @ k1.T).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        legal = torch.ones(LENGTH, LENGTH).tril().bool()
        tiles = backward_head(
            q1, k1, k1, legal, scores.softmax(-1) @ k1, scores.logsumexp(-1), torch.ones_like(q1),
            tau=1.0, softmax_scale=SCALE, tile=TILE,
        )[4]  # fmt: skip
        skipped = 0
        for start in range(0, LENGTH, TILE[0]):
            excess = tile_excess(q[:1], k[:1], start, softmax_scale=SCALE, tau=1.0, tile=TILE, temperature=1e-4)[
                0, head
            ]
            assert (excess >= 0).tolist() == tiles[start // 4, : start // 4].tolist()
            skipped += int((excess < 0).sum())
        assert skipped > 3


def test_rows_near_the_strongest_share_value_and_gradient():
    q, k = (x.requires_grad_() for x in qk(2))
    strongest, shared = (
        tile_excess(q, k, 28, softmax_scale=SCALE, tau=1.0, tile=TILE, temperature=t)[0, 0, 0] for t in (1e-4, 2.0)
    )
    assert shared < strongest
    rows = [torch.autograd.grad(x, q, retain_graph=True)[0][0, 0].norm(dim=1) for x in (strongest, shared)]
    assert [(row > 1e-6).sum().item() for row in rows] == [1, 2]  # rows 28 and 29
    assert all(row[:28].eq(0).all() for row in rows)


def test_query_tiles_are_drawn_with_the_weight_of_the_tiles_before_them():
    torch.manual_seed(0)
    starts = torch.tensor(choose_starts(64, (16, 16), 6000))
    share = torch.tensor([(starts == start).float().mean().item() for start in (0, 16, 32, 48)])
    assert_close(share, torch.tensor([0, 1, 2, 3]) / 6, atol=0.02, rtol=0)
    assert choose_starts(16, (16, 16), 2) == []
    assert choose_starts(32, (64, 16), 2) == []


def model_with(tau=1.0, **settings):
    model = tiny("llama", peaked=1.5, attention="sdpa").train()
    return mala_hf.patch_model(model, mala_hf.MalaConfig(tau=tau, tile=tuple(SMALL_TILE), **settings))


def gradients(model) -> list[torch.Tensor]:
    found = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return found


def test_the_gradient_is_that_of_loss_plus_weighted_term(monkeypatch):
    ids = tokens(2, LENGTH)
    model = model_with()
    model(input_ids=ids, labels=ids).loss.backward()
    plain = gradients(model)
    monkeypatch.setattr(concentration, "choose_starts", lambda *_: [12, 28])
    with concentrating(model, 0.7) as term:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found, value = gradients(model), term.drain()
        kept = []
        monkeypatch.setattr(term, "add", lambda *call: (kept.append(term.of_layer(*call[:3], **call[5])), call[4])[1])
        loss = model(input_ids=ids, labels=ids).loss
        assert len(kept) == 2
        (loss + 0.7 * torch.stack(kept).mean()).backward()
    assert value == pytest.approx(torch.stack(kept).mean().item())
    assert 0 < value < 1
    for one, expected in zip(found, gradients(model), strict=True):
        assert_close(one, expected, atol=1e-6, rtol=1e-4)
    assert any((one - before).norm() > 1e-3 * before.norm() for one, before in zip(found, plain, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant, monkeypatch):
    if reentrant:  # its first pass keeps no gradients and draws nothing, so layers would draw from other states
        monkeypatch.setattr(concentration, "choose_starts", lambda *_: [12, 28])
    ids, model = tokens(2, LENGTH), model_with()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(3)
        with concentrating(model, 5.0, query_tiles=2):
            model(input_ids=ids, labels=ids).loss.backward()
        found.append(gradients(model))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_only_training_has_the_term_and_nothing_stays():
    ids, model = tokens(1, LENGTH), model_with()
    model.eval()
    with torch.no_grad():
        before = model(ids).logits
    with concentrating(model, 1.0) as term:
        model(input_ids=ids, labels=ids).loss.backward()
        assert term.drain() is None
        model.train()
        with torch.no_grad():
            model(ids)
        assert term.drain() is None
        copy = clone(model)
        copy(input_ids=ids, labels=ids).loss.backward()
        assert term.drain() is None  # another model's layers have no term
    assert model.config._attn_implementation == "mala"
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_dense_layers_and_short_sequences_have_no_term():
    model = model_with(layers={0: "sdpa"})
    with concentrating(model, 1.0) as term:
        model(tokens(1, LENGTH))
        assert term._count == 1
        term.drain()
        model(tokens(1, 4))
        assert term.drain() is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"weight": -1.0}, "weight"), ({"weight": math.nan}, "weight"), ({"weight": 1, "temperature": 0}, "temperature"),
     ({"weight": 1, "query_tiles": 0}, "query_tiles")],
)  # fmt: skip
def test_nonsense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Concentration(**settings)


def test_what_it_does_not_cover_is_refused():
    ids = tokens(2, LENGTH)
    with pytest.raises(ValueError, match="switch it to"), concentrating(tiny("llama"), 1.0):
        pass
    model = model_with()
    with concentrating(model, 1.0), pytest.raises(ValueError, match="not padded"):
        model(input_ids=ids, attention_mask=padding(LENGTH, (0, LENGTH), (8, LENGTH)))
    assert model.config._attn_implementation == "mala"
    model = model_with(layers={0: {"heads": {0: 0.5}}})
    with concentrating(model, 1.0), pytest.raises(ValueError, match="one tau for all heads"):
        model(ids)


def trained(tmp_path, *callbacks, model=None, **options):
    windows = [{"input_ids": row, "labels": row} for row in tokens(8, LENGTH)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", **{"per_device_train_batch_size": 4, **options},
    )  # fmt: skip
    trainer = Trainer(model or model_with(), arguments, train_dataset=windows, callbacks=[*callbacks])
    trainer.train()
    return trainer


def test_trainer_logs_the_term_and_trains_on_it(tmp_path, monkeypatch):
    monkeypatch.setattr(concentration, "choose_starts", lambda *_: [28])
    plain = trained(tmp_path)
    found = trained(tmp_path, ConcentrationCallback(weight=3.0))
    logged = [entry["retained_surrogate"] for entry in found.state.log_history if "loss" in entry]
    assert len(logged) == 3
    assert all(0 < value < 1 for value in logged)
    assert found.model.config._attn_implementation == "mala"
    norms = [[entry["grad_norm"] for entry in one.state.log_history if "loss" in entry] for one in (plain, found)]
    assert norms[0][0] != norms[1][0]
    half = trained(
        tmp_path, ConcentrationCallback(weight=3.0), per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    for one, other in zip(half.state.log_history, found.state.log_history, strict=True):
        for key in {"loss", "grad_norm", "retained_surrogate"} & set(one):
            assert one[key] == pytest.approx(other[key], rel=1e-3)


def test_fp16_is_refused_when_training_begins():
    arguments = type("Arguments", (), {"fp16": True, "gradient_accumulation_steps": 1})()
    with pytest.raises(ValueError, match="fp16"):
        ConcentrationCallback(weight=1.0).on_train_begin(arguments, None, None, model=model_with())

# SPDX-License-Identifier: Apache-2.0
"""DSA against its report's definition, one query at a time; what trains what; the gathered form against the mask."""

import pytest
import torch
from torch.testing import assert_close

from mala_hf.studies.attention import masked_attention
from mala_hf.studies.dsa import DSA, dsa_slots, indexer_loss, selected_tokens, target_probabilities
from mala_hf.studies.token_gather import dsa_attention, dsa_decode, selected_numbers

TOPK = 12


@pytest.fixture(name="layer")
def small_layer():
    torch.manual_seed(0)
    return DSA(32, 2, TOPK, index_heads=16, index_dim=8).double()


@pytest.fixture(name="x")
def hidden_states():
    return torch.randn(2, 50, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def literal(layer, x):
    """The output and the mean divergence, from the layer's weights."""
    q, k, v = layer.qkv(x).view(*x.shape[:2], 3, 2, 16).unbind(2)
    qi, ki, w = layer.indexer(x)
    out, losses = torch.empty_like(q), []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            index = torch.stack(
                [sum(w[b, t, j] * torch.relu(qi[b, t, j] @ ki[b, s]) for j in range(16)) for s in range(t + 1)]
            )
            seen = index.argsort(descending=True)[:TOPK]
            probabilities = [(k[b, seen, h] @ q[b, t, h] * 16**-0.5).softmax(0) for h in range(2)]
            for h in range(2):
                out[b, t, h] = probabilities[h] @ v[b, seen, h]
            target = sum(probabilities) / sum(probabilities).sum()
            losses.append((target * (target.log() - index[seen].log_softmax(0))).sum())
    return layer.out(out.flatten(2)), torch.stack(losses).mean()


def test_dsa_is_the_definition_of_its_report(layer, x):
    expected, loss = literal(layer, x)
    assert_close(layer(x), expected)
    assert_close(layer.loss.double(), loss, rtol=1e-5, atol=1e-6)


def test_the_loss_is_taken_on_some_rows_of_which_every_step_draws_others(layer, x):
    whole = (layer(x), layer.loss.item())[1]
    layer.loss_rows = 25
    losses = [(layer(x), layer.loss.item())[1] for _ in range(200)]
    assert min(losses) < whole < max(losses)
    assert sum(losses) / 200 == pytest.approx(whole, rel=0.05)


def test_only_its_own_loss_trains_the_indexer_and_it_trains_nothing_else(layer, x):
    x.requires_grad_()
    layer(x).sum().backward()
    assert all(weight.grad is None for weight in layer.indexer.parameters())
    assert x.grad is not None
    x.grad = layer.qkv.weight.grad = None
    layer(x)
    layer.loss.backward()
    assert all(weight.grad.any() for weight in layer.indexer.parameters())
    assert x.grad is None
    assert layer.qkv.weight.grad is None


def test_training_on_its_loss_makes_the_indexer_find_what_attention_wants(layer, x):
    optimizer = torch.optim.Adam(layer.indexer.parameters(), lr=1e-2)
    first = (layer(x), layer.loss.item())[1]
    for _ in range(60):
        layer(x)
        layer.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert layer.loss.item() < 0.7 * first


def test_a_budget_of_all_tokens_is_the_dense_stage(layer, x):
    sparse = layer(x)
    layer.topk = 50
    q, k, v = layer.qkv(x).view(2, 50, 3, 2, 16).unbind(2)
    everything = torch.ones(50, 50, dtype=torch.bool).tril()
    assert_close(layer(x), layer.out(masked_attention(q, k, v, everything).flatten(2)))
    assert not torch.allclose(layer(x), sparse)
    assert_close(layer(x)[:, :TOPK], sparse[:, :TOPK])


def test_the_divergence_is_zero_only_where_scores_are_the_logarithms():
    allowed = torch.ones(1, 3, 5, dtype=torch.bool).tril(2)
    target = target_probabilities(torch.randn(1, 3, 2, 4), torch.randn(1, 5, 2, 4), allowed)
    assert indexer_loss(target, target.log() + 3.0, allowed).item() == pytest.approx(0.0, abs=1e-6)
    assert indexer_loss(target, target, allowed).item() > 1e-4


def test_gathered_tokens_give_what_the_mask_gives(layer, x, monkeypatch):
    monkeypatch.setattr("mala_hf.studies.token_gather.GATHER_ROWS", 7)
    monkeypatch.setattr("mala_hf.studies.token_gather.INDEX_ROWS", 11)
    qi, ki, w = (part.detach() for part in layer.indexer(x))
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 50, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    tensors = [part.requires_grad_() for part in (q, k, v)]
    allowed = selected_tokens(qi, ki, w, TOPK)[:, None]
    out = dsa_attention(*tensors, selected_numbers(qi, ki, w, TOPK))
    expected = masked_attention(*tensors, allowed)
    assert_close(out, expected)
    do = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    assert_close(torch.autograd.grad(out, tensors, do), torch.autograd.grad(expected, tensors, do))
    assert_close(dsa_decode(q[:, -1:], k, v, (qi[:, -1:], ki, w[:, -1:]), TOPK), expected[:, -1:])
    assert dsa_slots(50, TOPK) == pytest.approx(allowed.double().sum(-1).mean().item())

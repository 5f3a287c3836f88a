# SPDX-License-Identifier: Apache-2.0
"""Likelihoods agree with hand-computed ones, windows are weighted by their tokens, and models come back as they were."""

import math

import pytest
import torch
from tiny_model import VOCABULARY, runs_of_tokens, tiny_llama

import mala_hf  # noqa: F401  registers "mala"
from mala_hf import perplexity as module
from mala_hf.perplexity import (
    Perplexity,
    compare_implementations,
    fixed_windows,
    logit_agreement,
    perplexity,
    token_nll,
    using_implementation,
)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture
def input_ids():
    return torch.randint(VOCABULARY, (1, 300), generator=torch.Generator().manual_seed(1))


def test_token_nll_is_minus_the_log_of_the_softmax():
    # softmax of (log 1, log 2, log 5) is (1/8, 2/8, 5/8)
    logits = torch.log(torch.tensor([[1.0, 2.0, 5.0]])).expand(3, 3)
    expected = torch.tensor([math.log(8), math.log(4), math.log(8 / 5)])
    torch.testing.assert_close(token_nll(logits, torch.tensor([0, 1, 2])), expected)


def test_token_nll_computes_in_float32_however_low_the_precision_of_the_logits():
    logits = torch.tensor([[40.0, 39.75, -20.0]], dtype=torch.bfloat16)
    nll = token_nll(logits, torch.tensor([0]))
    assert nll.dtype == torch.float32
    assert nll.item() == pytest.approx(math.log(1 + math.exp(-0.25)), rel=1e-5)


def test_token_nll_does_not_depend_on_the_chunk(monkeypatch):
    logits, targets = torch.randn(50, 11), torch.randint(11, (50,))
    whole = token_nll(logits, targets)
    monkeypatch.setattr(module, "CHUNK", 7)
    torch.testing.assert_close(token_nll(logits, targets), whole)


def test_perplexity_equals_the_loss_of_the_model_window_by_window(model, input_ids):
    score = perplexity(model, input_ids, 128)
    windows = [input_ids[:, 0:128], input_ids[:, 128:256], input_ids[:, 256:300]]
    with torch.no_grad():
        losses = [model(window, labels=window).loss.item() for window in windows]
    assert score.window_tokens == (127, 127, 43)
    assert score.window_nll == pytest.approx(losses, rel=1e-5)
    assert score.nll == pytest.approx((127 * losses[0] + 127 * losses[1] + 43 * losses[2]) / 297, rel=1e-5)
    assert score.ppl == pytest.approx(math.exp(score.nll))


def test_windows_count_by_their_scored_tokens():
    assert Perplexity((1.0, 4.0), (3, 1)).nll == pytest.approx(1.75)


@pytest.mark.parametrize("flat", [True, False], ids=["n", "1xn"])
def test_windows_keep_every_token_but_a_lonely_last_one(flat):
    ids = torch.arange(9) if flat else torch.arange(9)[None]
    assert [window.tolist() for window in fixed_windows(ids, 4)] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert [window.shape[1] for window in fixed_windows(ids[..., :8], 3)] == [3, 3, 2]
    assert len(fixed_windows(ids, 4, max_windows=1)) == 1


@pytest.mark.parametrize(
    ("ids", "length", "max_windows", "message"),
    [
        (torch.zeros(2, 8), 4, None, r"\(2, 8\)"),
        (torch.zeros(8), 1, None, "got length 1"),
        (torch.zeros(1), 4, None, "1 token"),
        (torch.zeros(8), 4, 0, "got 0"),
    ],
    ids=["two rows", "window of one", "one token", "no windows"],
)
def test_windows_that_score_nothing_are_refused(ids, length, max_windows, message):
    with pytest.raises(ValueError, match=message):
        fixed_windows(ids, length, max_windows)


def test_a_window_longer_than_the_model_is_refused(model, input_ids):
    with pytest.raises(ValueError, match="1024 is more than the model's 512 positions"):
        perplexity(model, input_ids, 1024)


def test_logit_agreement_by_hand():
    # p = (3/4, 1/4) against q = (1/4, 3/4): KL = (1/2) log 3; second row equal
    reference = torch.log(torch.tensor([[3.0, 1.0], [1.0, 2.0]]))
    other = torch.log(torch.tensor([[1.0, 3.0], [1.0, 2.0]]))
    divergence, same = logit_agreement(reference, other)
    torch.testing.assert_close(divergence, torch.tensor([0.5 * math.log(3), 0.0]))
    assert same.tolist() == [False, True]


def test_an_implementation_is_put_back_also_after_an_error(model):
    before = model.config._attn_implementation

    def fail_inside():
        with using_implementation(model, "mala", 1.0):
            assert model.config._attn_implementation == "mala"
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert model.config._attn_implementation == before


def test_tau_zero_scores_as_full_attention_and_a_large_tau_does_not(model):
    rows = list(compare_implementations(model, runs_of_tokens(300), [256], taus=[0.0, 100.0], max_windows=1))
    assert [(row["implementation"], row["tau"]) for row in rows] == [("sdpa", None), ("mala", 0.0), ("mala", 100.0)]
    full, zero, large = (row["nll"] for row in rows)
    assert zero == pytest.approx(full, abs=1e-5)
    assert abs(large - full) > 1e-3

# SPDX-License-Identifier: Apache-2.0
"""Likelihoods agree with hand-computed ones, windows are weighted by their tokens, and models come back as they were."""

import math

import pytest
import torch
from tiny_model import VOCABULARY, runs_of_tokens, tiny_llama

from mala_hf import perplexity as module
from mala_hf.implementations import Implementation, implementations_of
from mala_hf.perplexity import (
    Perplexity,
    compare_implementations,
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
    implementations = implementations_of(["sdpa", "mala"], [0, 100])
    rows = list(
        compare_implementations(model, [runs_of_tokens(300)], [256], implementations=implementations, max_windows=1)
    )
    assert [(row["implementation"], row["tau"]) for row in rows] == [("sdpa", None), ("mala", 0.0), ("mala", 100.0)]
    full, zero, large = rows
    assert zero["nll"] == pytest.approx(full["nll"], abs=1e-5)
    assert abs(large["nll"] - full["nll"]) > 1e-3
    assert (zero["kl_max"], zero["top1_agreement"]) == (pytest.approx(0, abs=1e-5), 1)
    assert large["kl_mean"] > 1e-3
    assert full["work_fraction"] is None
    assert zero["work_fraction"] == 1 > large["work_fraction"]


def test_each_bucket_of_context_has_its_own_mean(model, input_ids):
    (row,) = compare_implementations(model, [input_ids], [100], implementations=[Implementation("sdpa")])
    with torch.no_grad():
        nll = [token_nll(model(window).logits[0, :-1], window[0, 1:]) for window in input_ids.split(100, dim=1)]
    assert [bucket["context"] for bucket in row["buckets"]][-2:] == [[32, 63], [64, 127]]
    assert [bucket["tokens"] for bucket in row["buckets"]] == [3, 6, 12, 24, 48, 96, 108]
    expected = torch.cat([one[63:] for one in nll]).mean().item()
    assert row["buckets"][-1]["nll"] == pytest.approx(expected, rel=1e-5)
    assert sum(bucket["tokens"] * bucket["nll"] for bucket in row["buckets"]) == pytest.approx(297 * row["nll"])


def test_the_stride_gives_every_token_its_context_and_scores_it_once(model, input_ids):
    (row,) = compare_implementations(model, [input_ids], [128], implementations=[Implementation("sdpa")], stride=50)
    with torch.no_grad():
        logits = model(input_ids[:, 100:228]).logits[0]
    assert row["window_tokens"] == [127, 50, 50, 50, 22]
    assert row["tokens"] == 299
    expected = token_nll(logits[77:127], input_ids[0, 178:228]).mean().item()
    assert row["window_nll"][2] == pytest.approx(expected, rel=1e-5)


def test_differences_are_paired_by_document_where_there_are_several(model):
    implementations = implementations_of(["sdpa", "mala"], [100])
    documents = [runs_of_tokens(256, seed=seed) for seed in (1, 2, 3)]
    full, mala = compare_implementations(model, documents, [128], implementations=implementations)
    found = mala["difference"]
    assert (found["by"], found["units"], mala["windows"]) == ("document", 3, 6)
    assert found["mean"] == pytest.approx(mala["nll"] - full["nll"])
    assert found["low"] < found["mean"] < found["high"]
    full, mala = compare_implementations(model, documents[:1], [128], implementations=implementations)
    assert (mala["difference"]["by"], mala["difference"]["units"]) == ("window", 2)

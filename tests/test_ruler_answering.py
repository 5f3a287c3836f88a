# SPDX-License-Identifier: Apache-2.0
"""An answer does not depend on what else is in its batch, and ends where it should."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_model import VOCABULARY, tiny_llama

from mala_hf.implementations import using_implementation
from mala_hf.ruler.answering import greedy_answers, stop_tokens

pytestmark = pytest.mark.transformers

LENGTHS = (41, 7, 90, 64)
BUDGETS = (12, 5, 12, 9)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("name", ["sdpa", "mala"])
def test_answers_of_a_batch_are_those_of_each_prompt_alone(model, prompts, name):
    with using_implementation(model, name):
        together = greedy_answers(model, prompts, BUDGETS)
        alone = [greedy_answers(model, [one], [budget])[0] for one, budget in zip(prompts, BUDGETS, strict=True)]
    assert together == alone
    assert [len(answer) for answer in together] == list(BUDGETS)
    assert len({tuple(answer[:5]) for answer in together}) > 1


def test_an_answer_is_the_most_likely_continuation_whatever_the_model_s_own_settings(model, prompts, monkeypatch):
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 50.0)
    monkeypatch.setattr(model.generation_config, "do_sample", True)
    ids = torch.tensor([prompts[1]])
    expected = []
    with torch.no_grad():
        for _ in range(6):
            expected.append(int(model(ids).logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([expected[-1:]])], dim=1)
    assert greedy_answers(model, [prompts[1]], [6]) == [expected]


def test_an_answer_ends_before_its_first_stop_token(model, prompts):
    whole = greedy_answers(model, prompts, [12] * 4)
    stop = whole[0][2]
    expected = [answer[: answer.index(stop)] if stop in answer else answer for answer in whole]
    assert greedy_answers(model, prompts, [12] * 4, stop=[stop]) == expected
    assert len(expected[0]) <= 2


def test_both_model_and_tokenizer_say_what_ends_an_answer(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "eos_token_id", [7, 3])
    assert stop_tokens(model, SimpleNamespace(eos_token_id=9)) == [3, 7, 9]
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    assert stop_tokens(model, SimpleNamespace(eos_token_id=None)) == []

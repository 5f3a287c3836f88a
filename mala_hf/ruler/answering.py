# SPDX-License-Identifier: Apache-2.0
"""Greedy answers to a batch of prompts, padded on the left; each answer is the one that its prompt alone would get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: those of the model's generation config and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    found = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in [*found, tokenizer.eos_token_id] if token is not None})


@torch.inference_mode()
def greedy_answers(
    model: Any, prompts: Sequence[Sequence[int]], budgets: Sequence[int], *, stop: Sequence[int] = ()
) -> list[list[int]]:
    """Return the most likely tokens after each prompt, up to its budget or its first ``stop`` token, which is left out.

    prompts: token ids. budgets: largest number of new tokens for each. Sampling and penalties of the model's own generation
    config do not apply.
    """
    longest = max(len(prompt) for prompt in prompts)
    padding = stop[0] if stop else 0
    input_ids = torch.full((len(prompts), longest), padding)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, longest - len(prompt) :] = 1
    config = GenerationConfig(
        max_new_tokens=max(budgets),
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=list(stop) or None,
        pad_token_id=padding,
    )
    done = model.generate(
        input_ids.to(model.device), attention_mask=attention_mask.to(model.device), generation_config=config
    )
    answers = (row[:budget] for row, budget in zip(done[:, longest:].tolist(), budgets, strict=True))
    return [_before_first(answer, set(stop)) for answer in answers]


def _before_first(answer: list[int], stop: set[int]) -> list[int]:
    end = next((place for place, token in enumerate(answer) if token in stop), len(answer))
    return answer[:end]

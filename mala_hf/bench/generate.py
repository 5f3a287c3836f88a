# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a real model's ``generate`` over a static cache, with full attention and with MALA."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import load_model
from ..implementations import using_implementation
from ..perplexity import check_positions
from ..prompt import prompt_ids
from ..text import read_text

NEW_TOKENS = 129  # the first of them belongs to the prompt's pass
GPU_LENGTH, CPU_LENGTH = 4096, 256  # tokens of prompt where none are asked for


def measure_generate(
    name: str, device: torch.device, length: int | None = None, new_tokens: int = NEW_TOKENS
) -> list[dict[str, Any]]:
    """A row for "sdpa" and one for "mala": greedy decoding after ``length`` tokens of the default text.

    A call for all new tokens less a call for the first alone, each after a call that warms up; so the prompt does not count.
    Raises ``ValueError`` where the model has too few positions, and what ``load_model`` raises.
    """
    model, tokenizer = load_model(name, device=device)
    length = length or (GPU_LENGTH if device.type == "cuda" else CPU_LENGTH)
    ids = prompt_ids(tokenizer, read_text()[0], length).to(device)
    check_positions(model, length + new_tokens)
    rows, first = [], None
    for attention, tau in (("sdpa", None), ("mala", 1.0)):
        with using_implementation(model, attention, tau):
            _generate(model, ids, new_tokens)
            seconds, tokens = _generate(model, ids, new_tokens)
            _generate(model, ids, 1)
            of_prompt, _ = _generate(model, ids, 1)
        first = tokens if first is None else first
        rows.append(
            {
                "model": name,
                "attention": attention,
                "dtype": str(model.dtype).removeprefix("torch."),
                "prompt_tokens": length,
                "new_tokens": new_tokens,
                "prompt_seconds": of_prompt,
                "tokens_per_second": (new_tokens - 1) / (seconds - of_prompt),
                "same_tokens_as_sdpa": int((tokens == first).cumprod(0).sum()),
            }
        )
    return rows


def _generate(model: Any, ids: Tensor, new_tokens: int) -> tuple[float, Tensor]:
    """Seconds of one call, and the new tokens."""
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
    )
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    return time.perf_counter() - start, out[0, ids.shape[1] :]

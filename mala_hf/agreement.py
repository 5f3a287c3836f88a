# SPDX-License-Identifier: Apache-2.0
"""Do two attentions generate the same tokens? Greedy continuations of many prompts, and how close a call each disagreement was."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .implementations import Implementation, using_implementation


@dataclass(frozen=True)
class Agreement:
    """One prompt with one attention beside the first one, the baseline; logits as the model gives them, gaps >= 0.

    Attributes:
        same_tokens: new tokens up to the first that differs, or all of them.
        gap: how far the baseline's logits put its token above the other's, where they first differ; None if nowhere. Near 0: a tie.
        own_gap: how far the other attention's logits put its own token above the baseline's, there.
        typical_gap: median over the baseline's steps of its best logit above its second best, for comparison.
    """

    prompt: int
    implementation: str
    tau: float | None
    same_tokens: int
    gap: float | None
    own_gap: float | None
    typical_gap: float


def compare_generation(
    model: Any,
    prompts: Sequence[Tensor],
    new_tokens: int,
    implementations: Sequence[Implementation],
    *,
    cache: str | None = None,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[Agreement]:
    """Continue each prompt (1, L) greedily by exactly ``new_tokens`` with every implementation; the first one is the baseline.

    cache: Transformers' ``cache_implementation``, "static" for example; None for the model's own.

    Raises:
        ValueError: for fewer than two implementations, no prompt, no new token, or a cache that Transformers lacks.
    """
    check_cache(cache)
    if len(implementations) < 2 or not prompts or new_tokens < 1:
        raise ValueError(
            f"a comparison needs two attentions, a prompt and a new token, got {len(implementations)}, {len(prompts)} and {new_tokens}"
        )
    found = []
    for number, prompt in enumerate(progress(prompts)):
        runs = [_greedy(model, prompt, new_tokens, one, cache) for one in implementations]
        for one, run in zip(implementations[1:], runs[1:], strict=True):
            found.append(_agreement(number, one, *runs[0], *run))
    return found


def check_cache(name: str | None) -> None:
    """Raise ``ValueError`` for a ``cache_implementation`` that this Transformers lacks."""
    from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

    if name is not None and name not in ALL_CACHE_IMPLEMENTATIONS:
        raise ValueError(f"a cache is one of {', '.join(ALL_CACHE_IMPLEMENTATIONS)}, got {name!r}")


def _greedy(
    model: Any, prompt: Tensor, new_tokens: int, implementation: Implementation, cache: str | None
) -> tuple[Tensor, Tensor]:
    """New tokens (new_tokens,) and their logits (new_tokens, vocabulary), float32."""
    with using_implementation(model, implementation.name, implementation.tau):
        done = model.generate(
            prompt.to(model.device), attention_mask=torch.ones_like(prompt).to(model.device), do_sample=False, num_beams=1,
            min_new_tokens=new_tokens, max_new_tokens=new_tokens, cache_implementation=cache, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    return done.sequences[0, prompt.shape[1] :], torch.cat(done.logits).float()


def _agreement(
    prompt: int, implementation: Implementation, tokens: Tensor, logits: Tensor, others: Tensor, other_logits: Tensor
) -> Agreement:
    same = int((tokens == others).int().cumprod(0).sum())
    best = logits.topk(2).values
    gap = own_gap = None
    if same < len(tokens):
        pair = [int(tokens[same]), int(others[same])]
        step, other_step = logits[same, pair], other_logits[same, pair]
        gap, own_gap = float(step[0] - step[1]), float(other_step[1] - other_step[0])
    typical = float((best[:, 0] - best[:, 1]).median())
    return Agreement(prompt, implementation.name, implementation.tau, same, gap, own_gap, typical)


def summaries(found: Sequence[Agreement], new_tokens: int) -> list[dict[str, Any]]:
    """Per implementation: prompts, those with the same tokens throughout, the median of equal tokens, the gaps where they part."""
    rows = []
    for name, tau in dict.fromkeys((one.implementation, one.tau) for one in found):
        own = [one for one in found if (one.implementation, one.tau) == (name, tau)]
        rows.append(
            {
                "implementation": name,
                "tau": tau,
                "prompts": len(own),
                "prompts_same": sum(one.same_tokens == new_tokens for one in own),
                "same_tokens_median": statistics.median(one.same_tokens for one in own),
                "largest_gap": max((one.gap for one in own if one.gap is not None), default=None),
                "typical_gap": statistics.median(one.typical_gap for one in own),
                "disagreements": [asdict(one) for one in own if one.gap is not None],
            }
        )
    return rows

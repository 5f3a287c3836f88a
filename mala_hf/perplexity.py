# SPDX-License-Identifier: Apache-2.0
"""Perplexity over windows of documents, and how far attention implementations agree on the same windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .bootstrap import paired_difference
from .implementations import Implementation, using_implementation
from .recording import WorkReport, record_work
from .windows import Window, cut_windows

CHUNK = 512  # positions whose float32 log-probabilities exist at once: 100 MB at a vocabulary of 49,152
BUCKETS = 40  # of context lengths, in powers of two: more than any model has positions


@dataclass(frozen=True)
class Perplexity:
    """Negative log-likelihood of each window in nats: ``window_nll`` (mean per scored token), ``window_tokens`` (scored)."""

    window_nll: tuple[float, ...]
    window_tokens: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Scored tokens of all windows."""
        return sum(self.window_tokens)

    @property
    def nll(self) -> float:
        """Mean over tokens, in nats: a window counts by its scored tokens."""
        total = sum(nll * tokens for nll, tokens in zip(self.window_nll, self.window_tokens, strict=True))
        return total / self.tokens

    @property
    def ppl(self) -> float:
        """Perplexity, ``exp(nll)``."""
        return math.exp(self.nll)


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats, float32 (n,), of targets (n,) under logits (n, vocabulary) of any dtype."""
    pieces = [
        torch.nn.functional.cross_entropy(some_logits.float(), some_targets, reduction="none")
        for some_logits, some_targets in zip(logits.split(CHUNK), targets.split(CHUNK), strict=True)
    ]
    return torch.cat(pieces)


def logit_agreement(reference: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Compare two logits (n, vocabulary): ``KL(reference || other)`` in nats, float32 (n,), and whether the top-1 agrees, bool (n,)."""
    divergences, agreements = [], []
    for some_reference, some_other in zip(reference.split(CHUNK), other.split(CHUNK), strict=True):
        log_p, log_q = some_reference.float().log_softmax(-1), some_other.float().log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0))  # rounding can leave -1e-7
        agreements.append(some_reference.argmax(-1) == some_other.argmax(-1))
    return torch.cat(divergences), torch.cat(agreements)


@torch.inference_mode()
def window_logits(model: Any, window: Tensor) -> Tensor:
    """Run one window (1, length) without a cache and return its logits (length, vocabulary)."""
    return model(input_ids=window.to(model.device), use_cache=False).logits[0]


def score_window(model: Any, window: Window) -> tuple[Tensor, Tensor]:
    """Return the likelihoods, float32 (scored,), in nats and the logits (scored, vocabulary) that predict the scored tokens."""
    logits = window_logits(model, window.input_ids)[-window.scored - 1 : -1]
    return token_nll(logits, window.input_ids[0, -window.scored :].to(logits.device)), logits


def perplexity(model: Any, input_ids: Tensor, length: int, *, max_windows: int | None = None) -> Perplexity:
    """Score ids (n,) or (1, n) in windows of ``length`` tokens that do not overlap.

    Raises ``ValueError`` as ``cut_windows`` does, and when a window is longer than the model's positions.
    """
    check_positions(model, length)
    windows = cut_windows([input_ids], length, max_windows=max_windows)
    nll = [score_window(model, window)[0].double().mean().item() for window in windows]
    return Perplexity(tuple(nll), tuple(window.scored for window in windows))


def check_positions(model: Any, length: int) -> None:
    """Raise ``ValueError`` when ``length`` is more tokens than the model has positions for."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ValueError(f"length {length} is more than the model's {positions} positions")


@dataclass
class _Scores:
    """What one implementation gathers over the windows of a length."""

    nll: list[float] = field(default_factory=list)  # mean of each window
    bucket_nll: Tensor = field(default_factory=lambda: torch.zeros(BUCKETS, dtype=torch.float64))  # sums
    bucket_tokens: Tensor = field(default_factory=lambda: torch.zeros(BUCKETS, dtype=torch.float64))
    divergence: float = 0.0  # sum over tokens
    divergence_max: float = 0.0
    same_top1: int = 0
    retained: float = 0.0  # key slots over all rows
    visible: float = 0.0

    def add(self, window: Window, nll: Tensor, logits: Tensor, baseline: Tensor | None, work: WorkReport) -> None:
        """Add a window: likelihoods (scored,), logits (scored, vocabulary), and the baseline's logits unless this is it."""
        nll = nll.double().cpu()
        self.nll.append(nll.mean().item())
        context = torch.arange(window.input_ids.shape[1] - window.scored, window.input_ids.shape[1])
        bucket = context.double().log2().floor().long()
        self.bucket_nll.index_add_(0, bucket, nll)
        self.bucket_tokens.index_add_(0, bucket, torch.ones_like(nll))
        if baseline is not None:
            divergence, same_top1 = logit_agreement(baseline, logits)
            self.divergence += divergence.double().sum().item()
            self.divergence_max = max(self.divergence_max, divergence.max().item())
            self.same_top1 += int(same_top1.sum())
        for layer in work.layers.values():
            self.retained += float(layer.key_slots_per_query.sum()) * layer.rows
            self.visible += float(layer.visible_slots_per_query.sum()) * layer.rows

    def buckets(self) -> list[dict[str, Any]]:
        """Mean likelihood by tokens of context, in powers of two."""
        return [
            {"context": [2**n, 2 ** (n + 1) - 1], "tokens": int(tokens), "nll": float(self.bucket_nll[n] / tokens)}
            for n, tokens in enumerate(self.bucket_tokens.tolist())
            if tokens
        ]


def compare_implementations(
    model: Any,
    documents: Sequence[Tensor],
    lengths: Iterable[int],
    *,
    implementations: Sequence[Implementation] = (Implementation("sdpa"), Implementation("mala", 1.0)),
    stride: int | None = None,
    max_windows: int | None = None,
    bos: int | None = None,
    progress: Callable[[Iterable[Window]], Iterable[Window]] = iter,
) -> Iterator[dict[str, Any]]:
    """Yield one row per length and implementation, all of a length scored on the same windows (``cut_windows``).

    A row has the means over scored tokens (nll in nats, ppl), those of each window and of each bucket of context, and the share
    of MALA's post-score work (``work_fraction``). All but the first also have, against the first: the KL divergence in nats, how
    often the most likely token is the same, and the difference in nats with its 95 % interval, paired by document where
    there are several, else by window. The model's own implementation and settings are back after each forward.
    Raises ``ValueError`` as ``cut_windows`` does, and for a length beyond the model or the longest document.
    """
    lengths = list(lengths)
    longest = max((document.shape[-1] for document in documents), default=0) + (bos is not None)
    for length in lengths:
        check_positions(model, length)
        if length > longest:
            raise ValueError(f"length {length} is more than the {longest} tokens of the longest text")
    for length in lengths:
        windows = cut_windows(documents, length, stride=stride, max_windows=max_windows, bos=bos)
        scores = [_Scores() for _ in implementations]
        for window in progress(windows):
            baseline: Tensor | None = None
            for implementation, score in zip(implementations, scores, strict=True):
                with using_implementation(model, implementation.name, implementation.tau), record_work(model) as work:
                    nll, logits = score_window(model, window)
                score.add(window, nll, logits, baseline, work)
                baseline = logits if baseline is None else baseline
        for implementation, score in zip(implementations, scores, strict=True):
            yield _row(length, implementation, windows, score, None if score is scores[0] else scores[0])


def _row(
    length: int, implementation: Implementation, windows: list[Window], score: _Scores, baseline: _Scores | None
) -> dict[str, Any]:
    whole = Perplexity(tuple(score.nll), tuple(window.scored for window in windows))
    row: dict[str, Any] = {
        "length": length,
        "implementation": implementation.name,
        "tau": implementation.tau,
        "documents": len({window.document for window in windows}),
        "windows": len(windows),
        "tokens": whole.tokens,
        "nll": whole.nll,
        "ppl": whole.ppl,
        "window_nll": score.nll,
        "window_tokens": list(whole.window_tokens),
        "window_document": [window.document for window in windows],
        "buckets": score.buckets(),
        "work_fraction": score.retained / score.visible if score.visible else None,
    }
    if baseline is not None:
        row |= {
            "kl_mean": score.divergence / whole.tokens,
            "kl_max": score.divergence_max,
            "top1_agreement": score.same_top1 / whole.tokens,
            "difference": _difference(windows, score.nll, baseline.nll),
        }
    return row


def _difference(windows: list[Window], nll: list[float], baseline: list[float]) -> dict[str, Any]:
    """Difference in nats per token, paired by document if there are several, else by window."""
    by_document = len({window.document for window in windows}) > 1
    totals: dict[int, tuple[float, int]] = {}
    for number, (window, ours, theirs) in enumerate(zip(windows, nll, baseline, strict=True)):
        unit = window.document if by_document else number
        total, tokens = totals.get(unit, (0.0, 0))
        totals[unit] = total + (ours - theirs) * window.scored, tokens + window.scored
    found = paired_difference(
        [[total / tokens for total, tokens in totals.values()]], [[float(tokens) for _, tokens in totals.values()]]
    )
    return found.to_dict() | {"by": "document" if by_document else "window"}

# SPDX-License-Identifier: Apache-2.0
"""The main job on a real model: full attention ("sdpa") and "mala" side by side on the same text.

The default taus are the canonical 1 and, to show that the measures can move, 10.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from .checkpoint import OFFLINE_MODEL, load_model
from .fidelity import LayerFidelity, attention_fidelity
from .info import device_name, versions
from .perplexity import check_positions, logit_agreement, token_nll, using_implementation, window_logits
from .quiet import quietly
from .text import read_text

TEXT_START = 2000  # tokens; past the title page and the opening of the default text
CPU_LENGTH, GPU_LENGTH = 2048, 8192


@dataclass(frozen=True)
class DemoSettings:
    """What to run; ``None`` picks the offline checkpoint, the default text, a length and a device."""

    model: str | None = None
    text: str | None = None
    length: int | None = None
    new_tokens: int = 64
    taus: tuple[float, ...] = (1.0, 10.0)
    device: str | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 32:
            raise ValueError(f"length must be at least 32 tokens, got {self.length}")
        if self.new_tokens < 1:
            raise ValueError(f"new_tokens must be at least 1, got {self.new_tokens}")
        if not self.taus or not all(0 <= tau < math.inf for tau in self.taus):
            raise ValueError(f"taus must be finite numbers >= 0, at least one, got {list(self.taus)}")


@contextmanager
def layer_progress(model: Any, description: str, passes: int = 1, disable: bool = False) -> Iterator[None]:
    """Show a bar that moves with each attention layer that finishes; ``passes`` forward passes are expected."""
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    with tqdm(total=len(layers) * passes, desc=f"{description:<32}", unit="layer", disable=disable) as bar:
        hooks = [layer.register_forward_hook(lambda *_: bar.update() and None) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def timed(device: torch.device, function: Any, *arguments: Any, **keywords: Any) -> tuple[Any, float]:
    """Return the function's result and its wall time in seconds, the GPU's queue included."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    result = function(*arguments, **keywords)
    synchronize()
    return result, time.perf_counter() - start


def greedy(model: Any, prompt: Tensor, new_tokens: int) -> list[int]:
    """Return the most likely continuation of prompt (1, L), token by token."""
    done = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    return done[0, prompt.shape[1] :].tolist()


def warm_up(model: Any, window: Tensor) -> None:
    """Compile kernels (GPU) and touch memory before anything is timed."""
    part = window if model.device.type == "cuda" else window[:, :64]
    for name in ("sdpa", "mala"):
        with using_implementation(model, name):
            window_logits(model, part)
            greedy(model, part[:, :32], 2)


def run_demo(settings: DemoSettings, *, quiet: bool = False) -> dict[str, Any]:
    """Run everything and return plain numbers, lists and strings, fit for JSON: ``runs`` has full attention first, then each tau.

    Masses and fractions are between 0 and 1, times in seconds, likelihoods in nats. quiet: without progress bars. Raises ``ValueError``
    for a text or model that is too short, and whatever loading the model raises.
    """
    text, text_name = read_text(settings.text)
    with quietly(quiet):
        model, tokenizer = load_model(settings.model, device=settings.device)
    length = settings.length or default_length(model, settings.new_tokens)
    check_positions(model, length + settings.new_tokens)
    window = text_window(tokenizer, text, length, skip=TEXT_START if settings.text is None else 0).to(model.device)
    warm_up(model, window)

    full_logits, full = run_one(model, tokenizer, window, settings.new_tokens, "sdpa", None, quiet)
    runs = [full]
    for tau in settings.taus:
        logits, run = run_one(model, tokenizer, window, settings.new_tokens, "mala", tau, quiet)
        divergence, same_top1 = logit_agreement(full_logits, logits)
        with layer_progress(model, f"mala, tau {tau:g}: exact comparison", disable=quiet):
            layers = attention_fidelity(model, window, tau=tau)
        run |= {
            "kl_mean": divergence.mean().item(),
            "kl_max": divergence.max().item(),
            "top1_agreement": same_top1.float().mean().item(),
            "same_continuation_tokens": matching_prefix(full["continuation_tokens"], run["continuation_tokens"]),
            "summary": summary(layers),
            "layers": [layer.to_dict() for layer in layers],
        }
        runs.append(run)
    return {
        "settings": asdict(settings),
        "versions": versions(),
        "model": settings.model or OFFLINE_MODEL,
        "device": device_name(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "text": text_name,
        "length": length,
        "tile": list(layers[0].tile),
        "implementation_that_ran": layers[0].impl,
        "runs": runs,
    }


def run_one(
    model: Any, tokenizer: Any, window: Tensor, new_tokens: int, name: str, tau: float | None, quiet: bool
) -> tuple[Tensor, dict[str, Any]]:
    """Score the window and continue it with one implementation; return the logits (length, vocabulary) and the figures."""
    label = name if tau is None else f"{name}, tau {tau:g}"
    with using_implementation(model, name, tau):
        with layer_progress(model, f"{label}: {window.shape[1]} tokens of text", disable=quiet):
            logits, prefill_seconds = timed(model.device, window_logits, model, window)
        with layer_progress(model, f"{label}: {new_tokens} new tokens", new_tokens, quiet):
            tokens, generate_seconds = timed(model.device, greedy, model, window, new_tokens)
    nll = token_nll(logits[:-1], window[0, 1:]).double().mean()
    return logits, {
        "implementation": name,
        "tau": tau,
        "nll": nll.item(),
        "ppl": nll.exp().item(),
        "prefill_seconds": prefill_seconds,
        "generate_seconds": generate_seconds,
        "continuation": tokenizer.decode(tokens),
        "continuation_tokens": tokens,
    }


def default_length(model: Any, new_tokens: int) -> int:
    """Return 2048 tokens on a CPU, 8192 on a GPU, or what the model's positions leave beside the new tokens."""
    wanted = GPU_LENGTH if model.device.type == "cuda" else CPU_LENGTH
    return min(wanted, getattr(model.config, "max_position_embeddings", wanted) - new_tokens)


def text_window(tokenizer: Any, text: str, length: int, skip: int) -> Tensor:
    """Return ``length`` token ids (1, length) of the text after the first ``skip``; ``ValueError`` when it is too short."""
    # eight characters a token is more than any language model's vocabulary averages
    head = text[: 8 * (skip + length)]
    input_ids = tokenizer(head, return_tensors="pt", add_special_tokens=False, truncation=False).input_ids[
        :, skip : skip + length
    ]
    if input_ids.shape[1] < length:
        raise ValueError(f"the text has {input_ids.shape[1]} tokens, fewer than the length {length}")
    return input_ids


def summary(layers: list[LayerFidelity]) -> dict[str, float]:
    """Means over layers (all have the same heads and rows), the worst layer's P95, and the extreme heads."""
    fractions = [fraction for layer in layers for fraction in layer.work_fraction]
    return {
        "key_slots_per_query": statistics.fmean(slots for layer in layers for slots in layer.key_slots_per_query),
        "visible_slots_per_query": statistics.fmean(
            slots for layer in layers for slots in layer.visible_slots_per_query
        ),
        "work_fraction": statistics.fmean(fractions),
        "work_fraction_min_head": min(fractions),
        "work_fraction_max_head": max(fractions),
        "omitted_mass_mean": statistics.fmean(layer.omitted_mass_mean for layer in layers),
        "omitted_mass_p95_worst_layer": max(layer.omitted_mass_p95 for layer in layers),
        "omitted_mass_bound_mean": statistics.fmean(layer.omitted_mass_bound_mean for layer in layers),
        "omitted_mass_bound_p95_worst_layer": max(layer.omitted_mass_bound_p95 for layer in layers),
        "bound_violation": max(layer.bound_violation for layer in layers),
        "output_error_mean": statistics.fmean(layer.output_error_mean for layer in layers),
        "output_error_p95_worst_layer": max(layer.output_error_p95 for layer in layers),
        "rounding_error_mean": statistics.fmean(layer.rounding_error_mean for layer in layers),
    }


def matching_prefix(first: list[int], second: list[int]) -> int:
    """Return how many leading entries are the same."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )

# SPDX-License-Identifier: Apache-2.0
"""Before and after: perplexity, RULER, work, fidelity and time of one loaded model, with full attention and with its MALA settings."""

from __future__ import annotations

from statistics import median
from typing import Any

from torch import Tensor

from .config import MalaConfig
from .convert_bench import Bench, Evidence, check_nll
from .convert_layers import head_taus, heads_in, layers_at
from .convert_ruler import score_ruler
from .implementations import Implementation, using_implementation
from .layer_work import summary
from .perplexity import compare_implementations, window_logits
from .windows import beginning_token

TIMED_RUNS, TIMED_TOKENS = 3, 16


def gather(bench: Bench, config: MalaConfig, evidence: Evidence, name: str, *, part: int) -> dict[str, Any]:
    """Measure before and after on a part of the text, as JSON types; the model's config holds the settings from here on."""
    text_config = bench.model.config.get_text_config()
    text_config.mala = config.to_dict()
    settings = {"part": part, "mala": config.to_dict()}
    runs = bench.study(part, taus_in(config, text_config))["runs"]
    perplexity = bench.store.get("perplexity", settings, lambda: _perplexity(bench, part))
    for row in perplexity:
        check_nll(row["nll"], row["implementation"])
    layers = layers_at(runs, head_taus(config, text_config, heads_in(runs[0])))
    return {
        "tile": layers[0]["tile"],
        "impl": layers[0]["impl"],
        "perplexity": perplexity,
        "work": {"summary": summary(layers), "layers": layers, "rounding": runs[0]["summary"]["output_error_mean"]},
        "time": bench.store.get("time", settings, lambda: _time(bench, bench.windows_of(part)[0].input_ids)),
        "ruler": score_ruler(bench, evidence, before_and_after(bench), settings, name)
        if evidence.ruler_samples
        else None,
    }


def before_and_after(bench: Bench) -> tuple[Implementation, Implementation]:
    """Return the model's full attention, and MALA with the settings in its config."""
    return Implementation(bench.store.made_with["full_attention"]), Implementation("mala")


def taus_in(config: MalaConfig, text_config: Any) -> list[float]:
    """Return every tau that some head of the model gets, in order; raises as ``head_taus`` does."""
    count = getattr(text_config, "num_attention_heads", 1)
    heads = dict.fromkeys(range(text_config.num_hidden_layers), count)
    return sorted({tau for of_heads in head_taus(config, text_config, heads).values() for tau in of_heads})


def _perplexity(bench: Bench, part: int) -> list[dict[str, Any]]:
    from tqdm.auto import tqdm

    bench.say(f"perplexity of {bench.windows} x {bench.length} tokens, before and after")
    rows = compare_implementations(
        bench.model,
        [bench.part(part)],
        [bench.length],
        implementations=before_and_after(bench),
        max_windows=bench.windows,
        bos=beginning_token(bench.tokenizer),
        progress=lambda windows: tqdm(windows, desc="windows", unit="window", leave=False, disable=bench.quiet),
    )
    return list(rows)


def _time(bench: Bench, window: Tensor) -> dict[str, Any]:
    """Seconds of a prefill of ids (1, L), and of a generation after nearly as many: medians, the two attentions by turns."""
    from .demo import greedy, timed

    bench.say(f"time of {TIMED_RUNS} prefills of {bench.length} tokens and {TIMED_RUNS} generations, before and after")
    model, window = bench.model, window.to(bench.model.device)
    prompt = window[:, : window.shape[1] - TIMED_TOKENS]
    prefill: dict[str, list[float]] = {"full": [], "mala": []}
    generation: dict[str, list[float]] = {"full": [], "mala": []}
    for _ in range(1 + TIMED_RUNS):
        for name, one in zip(prefill, before_and_after(bench), strict=True):
            with using_implementation(model, one.name, one.tau):
                prefill[name].append(timed(model.device, window_logits, model, window)[1])
                generation[name].append(timed(model.device, greedy, model, prompt, TIMED_TOKENS)[1])
    return {
        "tokens": window.shape[1],
        "new_tokens": TIMED_TOKENS,
        "runs": TIMED_RUNS,
        # the first warms up: kernels are compiled, memory is touched
        "prefill_seconds": {name: median(seconds[1:]) for name, seconds in prefill.items()},
        "generate_seconds": {name: median(seconds[1:]) for name, seconds in generation.items()},
    }

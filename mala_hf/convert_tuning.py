# SPDX-License-Identifier: Apache-2.0
"""``--search-tau`` on a loaded model: the pass of measurements, the choice, and what it bought."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import Any

from .config import MalaConfig
from .convert_bench import Bench
from .convert_layers import heads_in, layers_at
from .convert_search import TauSearch, choose, points_of
from .layer_work import summary


def search_taus(bench: Bench, search: TauSearch) -> tuple[MalaConfig, dict[str, Any]]:
    """Choose taus on part 0 of the text, verify them on part 1; return the settings and, as JSON types, what was seen and bought.

    The same model, text and budget give the same settings. Raises ``ValueError`` as ``choose`` does.
    """
    runs = bench.study(0, sorted({1.0, *search.taus}))["runs"]
    ladder = [run for run in runs if run["tau"] in (0.0, *search.taus)]
    increases = [partial(_increase, bench, part) for part in (0, 1)]
    found = choose(points_of(ladder), search, increases, dense=can_be_dense(bench.model))
    by_head = {layer: [found.taus[layer]] * heads for layer, heads in heads_in(runs[0]).items()}
    return found.config, {
        "max_ppl_increase": search.max_ppl_increase,
        "max_omitted_mass": search.max_omitted_mass,
        "taus": {str(layer): tau for layer, tau in sorted(found.taus.items())},
        "increases": found.increases,
        "trials": found.trials,
        "work": summary(layers_at(runs, by_head)),
        "work_at_tau_1": next(run["summary"] for run in runs if run["tau"] == 1.0),
        "ladder": [{"tau": run["tau"], "layers": [_means(layer) for layer in run["layers"]]} for run in ladder],
    }


def _increase(bench: Bench, part: int, config: MalaConfig) -> float:
    return bench.nll(part, config) - bench.nll(part, None)


def can_be_dense(model: Any) -> bool:
    """Whether torch's SDPA can run the layers: they have neither softcap nor sinks."""
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return not softcap and not any(hasattr(module, "sinks") for module in model.modules())


def _means(layer: dict[str, Any]) -> dict[str, Any]:
    slots, visible = (sum(layer[f"{kind}_slots_per_query"]) for kind in ("key", "visible"))
    return {
        "layer": layer["layer"],
        "work_fraction": slots / visible,
        "omitted_mass": fmean(layer["omitted_mass_mean"]),
    }

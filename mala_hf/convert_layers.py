# SPDX-License-Identifier: Apache-2.0
"""The figures of a work study, taken for each head at the tau that some settings give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from .break_even import break_even
from .config import MalaConfig
from .ops.hf_settings import layer_settings, named

Row = dict[str, Any]
HeadTaus = Mapping[int, Sequence[float]]  # of each layer, each query head's; 0, full attention, where SDPA runs


def head_taus(config: MalaConfig, text_config: Any, heads: Mapping[int, int]) -> dict[int, list[float]]:
    """Return the taus that settings give the heads of a model's layers; ``heads``: how many query heads each layer has.

    Raises ``ValueError`` for a window: it is no part of the rule, and changes the model.
    """
    of_model = SimpleNamespace(mala=config.to_dict(), num_hidden_layers=text_config.num_hidden_layers)
    found: dict[int, list[float]] = {}
    for layer, count in heads.items():
        settings = layer_settings(SimpleNamespace(config=of_model, layer_idx=layer))
        own = dict(settings.heads)
        owners = named(tuple(own), count, "head")
        of_heads = [own[owners[head]] if head in owners else settings.common for head in range(count)]
        if any(one.window is not None for one in of_heads):
            raise ValueError(
                f"layer {layer} has a window, which changes the model: a conversion sets taus and sdpa alone"
            )
        found[layer] = [0.0 if one.tau is None else float(one.tau) for one in of_heads]
    return found


def heads_in(run: Row) -> dict[int, int]:
    """Return how many query heads each layer of a study's run has."""
    return {layer["layer"]: len(layer["work_fraction"]) for layer in run["layers"]}


def layers_at(runs: Sequence[Row], taus: HeadTaus) -> list[Row]:
    """Return one row for each layer, like those of the study's runs, with every head's figures at its own tau, and ``taus``."""
    by_tau = {run["tau"]: {layer["layer"]: layer for layer in run["layers"]} for run in runs}
    return [_mixed([by_tau[tau][layer] for tau in of_heads], of_heads) for layer, of_heads in sorted(taus.items())]


def _mixed(rows: list[Row], taus: Sequence[float]) -> Row:
    """One layer's row, head by head from the rows of its taus."""
    per_head = [key for key, value in rows[0].items() if isinstance(value, list) and key != "tile"]
    mixed = rows[0] | {key: [row[key][head] for head, row in enumerate(rows)] for key in per_head}
    share = rows[0]["break_even"]["post_score_share_of_full"]
    slots, visible = (sum(mixed[f"{kind}_slots_per_query"]) for kind in ("key", "visible"))
    return mixed | {"break_even": break_even(slots, visible, 1 - share, share).to_dict(), "taus": list(taus)}

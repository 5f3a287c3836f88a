# SPDX-License-Identifier: Apache-2.0
"""Study 7: what the paper left open. Variants of the rule in every layer of a model: work against errors, KL and likelihood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..convert_search import Point, assignments
from ..full_attention import LayerCall
from ..perplexity import logit_agreement, token_nll, window_logits
from .activations import observe, run_rule
from .figures import Figures
from .rules import Rule, choose
from .scores import outcome, scores_by_tile

HeadPoints = dict[int, list[list[Point]]]  # by layer: for each head what it does at each tau, tau 0 among them


@dataclass(frozen=True)
class Variant:
    """A named rule with its tiles; ``setting``: the number that its curve runs along (tau, a bound, or a step of a path)."""

    name: str
    setting: float
    rule: Rule
    tile: tuple[int, int]


@dataclass(frozen=True)
class Baseline:
    """Full attention on a window: ids (1, L), logits (L, vocabulary), likelihoods (L - 1,) in nats."""

    ids: Tensor
    logits: Tensor
    nll: Tensor

    @classmethod
    def of(cls, model: Any, ids: Tensor) -> Baseline:
        """Run the model as it is."""
        ids = ids.to(model.device)
        logits = window_logits(model, ids)
        return cls(ids, logits, token_nll(logits[:-1], ids[0, 1:]))


def measure(model: Any, baseline: Baseline, variant: Variant) -> dict[str, Any]:
    """Return one row: work, omitted mass, its certificate and output error of all layers; KL, top-1 and likelihood of the model."""
    logits, figures = run_rule(model, baseline.ids, variant.rule, variant.tile)
    divergence, same = logit_agreement(baseline.logits, logits)
    nll = token_nll(logits[:-1], baseline.ids[0, 1:])
    return {
        "variant": variant.name,
        "setting": variant.setting,
        "tile": list(variant.tile),
        **figures.to_dict(),
        "kl_mean": divergence.double().mean().item(),
        "kl_max": divergence.max().item(),
        "top1_agreement": same.double().mean().item(),
        "nll": nll.double().mean().item(),
        "nll_full": baseline.nll.double().mean().item(),
    }


def head_points(model: Any, ids: Tensor, taus: Sequence[float], tile: tuple[int, int]) -> HeadPoints:
    """What every head does at every tau, and at 0, on the inputs that full attention gives it."""
    gathered: dict[float, Figures] = {tau: Figures() for tau in (0.0, *taus)}

    def observer(layer: int, call: LayerCall) -> None:
        for scores in scores_by_tile(call, tile):
            for tau, figures in gathered.items():
                figures.add(layer, outcome(scores, choose(scores, Rule((tau,)))))

    observe(model, ids, observer)
    found: HeadPoints = {}
    for tau, figures in gathered.items():
        for layer, heads in figures.by_head().items():
            points = found.setdefault(layer, [[] for _ in heads])
            for head, one in enumerate(heads):
                points[head].append(Point(tau, one["slots"], one["omitted"]))
    return found


def layer_path(points: HeadPoints, steps: int) -> list[dict[int, float | list[float]]]:
    """Taus by layer, ``steps`` of them, evenly in work from nothing omitted to the least work, as ``mala-hf convert`` searches them."""
    layers = {
        layer: [
            Point(of_tau[0].tau, sum(one.slots for one in of_tau), sum(one.omitted for one in of_tau) / len(of_tau))
            for of_tau in zip(*heads, strict=True)
        ]
        for layer, heads in points.items()
    }
    return [dict(taus) for taus in _evenly(layers, steps)]


def head_path(points: HeadPoints, steps: int) -> list[dict[int, float | list[float]]]:
    """The same with a tau for each head."""
    places = [(layer, head) for layer, heads in points.items() for head in range(len(heads))]
    of_heads = {place: points[layer][head] for place, (layer, head) in enumerate(places)}
    path: list[dict[int, float | list[float]]] = []
    for taus in _evenly(of_heads, steps):
        by_layer: dict[int, list[float]] = {}
        for place, (layer, _) in enumerate(places):
            by_layer.setdefault(layer, []).append(taus[place])
        path.append(dict(by_layer))
    return path


def _evenly(layers: Mapping[int, Sequence[Point]], steps: int) -> list[dict[int, float]]:
    path = assignments(layers)
    slots = {(layer, point.tau): point.slots for layer, points in layers.items() for point in points}
    work = torch.tensor([sum(slots[layer, tau] for layer, tau in taus.items()) for taus in path], dtype=torch.float64)
    wanted = torch.linspace(work[0].item(), work[-1].item(), steps + 1, dtype=torch.float64)[1:]
    chosen = dict.fromkeys(int((work - one).abs().argmin()) for one in wanted)
    return [path[place] for place in chosen]


def variants_of(taus: Sequence[float], bounds: Sequence[float], tile: tuple[int, int]) -> list[Variant]:
    """The variants that need no measurement before: orders, splits, normalizers, key tiles, certified bounds."""
    block_m, _ = tile
    few = taus[::2]
    curves = [
        ("rule", Rule(), tile, taus),
        ("sink first", Rule(order="sink"), tile, taus),
        ("full normalizer", Rule(normalizer="full"), tile, few),
        ("4 splits", Rule(splits=4), tile, few),
        ("16 splits", Rule(splits=16), tile, few),
        ("16 keys", Rule(), (block_m, 16), taus),
        ("8 keys", Rule(), (block_m, 8), taus),
        ("8 keys, sink first", Rule(order="sink"), (block_m, 8), few),
    ]
    found = [
        Variant(name, tau, Rule((tau,), rule.order, rule.splits, rule.normalizer), of_tile)
        for name, rule, of_tile, some in curves
        for tau in some
    ]
    ladder = tuple(sorted(taus))
    return found + [Variant("certified", bound, Rule(ladder, max_bound=bound), tile) for bound in bounds]


def path_variants(points: HeadPoints, tile: tuple[int, int], steps: int) -> list[Variant]:
    """Tau by layer and by head, chosen on the text of ``points``."""
    paths = {"tau by layer": layer_path(points, steps), "tau by head": head_path(points, steps)}
    return [
        Variant(name, float(step), Rule(by_layer=taus), tile)
        for name, path in paths.items()
        for step, taus in enumerate(path, 1)
    ]

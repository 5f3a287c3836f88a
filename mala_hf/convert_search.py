# SPDX-License-Identifier: Apache-2.0
"""A tau for each layer under a budget of error, from one pass of measurements.

In that pass every layer is measured at a ladder of taus: the work it keeps, and the mass it omits. A layer's useful taus are those on
the lower convex hull of the two, from nothing omitted to least work. All layers' steps along their hulls, the one that saves the most
work for the mass it omits first, are one path from full attention to the least work. How far to go on it is found by bisection, with
the perplexity measured each time, and verified on another text; so what is chosen was measured itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

from .config import MalaConfig
from .ops.hf import DENSE

LADDER = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
MAX_PPL_INCREASE = 1e-3  # nats per token, where no budget is named


@dataclass(frozen=True)
class TauSearch:
    """The budget: the increase of the mean negative log-likelihood in nats per token, and the mean omitted mass of any layer.

    A limit that is None does not count; one is needed. ``taus`` are tried beside 0. Raises ``ValueError`` for anything else.
    """

    max_ppl_increase: float | None = MAX_PPL_INCREASE
    max_omitted_mass: float | None = None
    taus: tuple[float, ...] = LADDER

    def __post_init__(self) -> None:
        if self.max_ppl_increase is None and self.max_omitted_mass is None:
            raise ValueError("a search needs a budget: max_ppl_increase or max_omitted_mass")
        if self.max_ppl_increase is not None and not 0 <= self.max_ppl_increase < math.inf:
            raise ValueError(f"max_ppl_increase must be a finite number of nats >= 0, got {self.max_ppl_increase}")
        if self.max_omitted_mass is not None and not 0 <= self.max_omitted_mass <= 1:
            raise ValueError(f"max_omitted_mass must be a share from 0 to 1, got {self.max_omitted_mass}")
        if not self.taus or not all(0 < tau < math.inf for tau in self.taus):
            raise ValueError(f"taus must be finite numbers > 0, at least one, got {list(self.taus)}")


@dataclass(frozen=True)
class Point:
    """One layer at one tau: key slots per query, summed over heads, and the mean omitted mass."""

    tau: float
    slots: float
    omitted: float


Layers = Mapping[int, Sequence[Point]]
Taus = dict[int, float]  # by layer


def points_of(runs: Sequence[dict[str, Any]]) -> dict[int, list[Point]]:
    """Read the runs of an audited work study (``WorkStudy.to_dict``), tau 0 among them."""
    found: dict[int, list[Point]] = {}
    for run in runs:
        for layer in run["layers"]:
            point = Point(run["tau"], sum(layer["key_slots_per_query"]), fmean(layer["omitted_mass_mean"]))
            found.setdefault(layer["layer"], []).append(point)
    return found


def hull(points: Sequence[Point], max_omitted: float = math.inf) -> list[Point]:
    """Return the lower convex hull from the least omitted mass to the least work, by rising mass; at ties the smaller tau."""
    allowed = [point for point in points if point.omitted <= max_omitted]
    found = [min(allowed, key=lambda point: (point.omitted, point.slots, point.tau))]
    while better := [point for point in allowed if point.slots < found[-1].slots]:
        here = found[-1]
        found.append(min(better, key=lambda point: (-_gain(here, point), point.slots, point.tau)))
    return found


def _gain(here: Point, there: Point) -> float:
    """Work saved for each unit of mass omitted."""
    return (here.slots - there.slots) / (there.omitted - here.omitted)


def assignments(layers: Layers, max_omitted: float = math.inf) -> list[Taus]:
    """Return the path: all layers at the start of their hulls, then one step after another until all are at the end."""
    hulls = {layer: hull(points, max_omitted) for layer, points in sorted(layers.items())}
    steps = [
        (-_gain(here, there), layer, there.tau) for layer, points in hulls.items() for here, there in pairwise(points)
    ]
    path = [{layer: points[0].tau for layer, points in hulls.items()}]
    for _, layer, tau in sorted(steps, key=lambda step: step[:2]):
        path.append(path[-1] | {layer: tau})
    return path


def settings_of(taus: Taus, *, dense: bool) -> MalaConfig:
    """Return the settings: the most common tau for all layers, and the others'. dense: let SDPA run the layers with tau 0."""
    chosen = {layer: DENSE if dense and tau == 0 else tau for layer, tau in taus.items()}
    counts = Counter(tau for tau in taus.values() if tau > 0)
    common = min(counts, key=lambda tau: (-counts[tau], tau), default=1.0)
    return MalaConfig(tau=common, layers={layer: setting for layer, setting in chosen.items() if setting != common})


@dataclass(frozen=True)
class Choice:
    """The settings, the tau of each layer, the measured increase on each text in nats per token, and all trials (JSON types)."""

    config: MalaConfig
    taus: Taus
    increases: list[float]
    trials: list[dict[str, Any]]


def choose(
    layers: Layers, search: TauSearch, increases: Sequence[Callable[[MalaConfig], float]], *, dense: bool
) -> Choice:
    """Return the settings with the least work that bisection finds within the budget, on one text after another.

    increases: for each text, what measures the increase of some settings in nats per token. The first text decides; a later one
    verifies, and shortens the path again if it must: what is chosen is within on all. A limit on the omitted mass shortens it at
    the start. Without a limit on the increase the end is taken, and measured all the same. Raises ``ValueError`` if even the start
    is over the budget.
    """
    path = assignments(layers, math.inf if search.max_omitted_mass is None else search.max_omitted_mass)
    limit = math.inf if search.max_ppl_increase is None else search.max_ppl_increase
    found: list[dict[int, float]] = [{} for _ in increases]  # by text: the increase at each step that was tried
    trials: list[dict[str, Any]] = []

    def within(texts: int, step: int) -> bool:
        return all(measured(text, step) <= limit for text in range(texts))

    def measured(text: int, step: int) -> float:
        if step not in found[text]:
            found[text][step] = increases[text](settings_of(path[step], dense=dense))
            trials.append({"text": text, "step": step, "steps": len(path) - 1, "increase": found[text][step]})
        return found[text][step]

    last = len(path) - 1
    for texts in range(1, len(increases) + 1):
        farthest = _farthest(last, partial(within, texts))
        if farthest is None:
            least = next(by_step[0] for by_step in found if by_step[0] > limit)
            raise ValueError(f"no setting stays within {limit} nats per token: the most cautious one adds {least:.2g}")
        last = farthest
    return Choice(settings_of(path[last], dense=dense), path[last], [by_step[last] for by_step in found], trials)


def _farthest(last: int, within: Callable[[int], bool]) -> int | None:
    """Return the farthest step up to ``last`` that bisection finds within; None if the first is not."""
    if within(last):
        return last
    if last == 0 or not within(0):
        return None
    good, bad = 0, last
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if within(middle) else (good, middle)
    return good

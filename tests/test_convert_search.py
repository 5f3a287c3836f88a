# SPDX-License-Identifier: Apache-2.0
"""A budget gives each layer a tau: the path through the measurements is the greedy one, and what is chosen was measured."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mala_hf import MalaConfig, TauSearch
from mala_hf.convert_search import Point, assignments, choose, hull, points_of, settings_of

STEEP = [Point(0.0, 100, 0.0), Point(1.0, 40, 0.01), Point(10.0, 30, 0.20)]
FLAT = [Point(0.0, 100, 0.0), Point(1.0, 95, 0.05), Point(10.0, 60, 0.10)]
LAYERS = {0: STEEP, 3: FLAT}

point_lists = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 16)), min_size=0, max_size=7).map(
    lambda pairs: (
        [Point(0.0, 100, 0.0)] + [Point(float(n), slots, omitted / 16) for n, (slots, omitted) in enumerate(pairs, 1)]
    )
)


def test_points_off_the_hull_are_passed_over():
    assert [point.tau for point in hull(STEEP)] == [0, 1, 10]
    assert [point.tau for point in hull(FLAT)] == [0, 10]


def test_a_tau_that_omits_nothing_and_saves_work_is_where_a_layer_starts():
    assert hull([Point(0.0, 100, 0.0), Point(0.1, 90, 0.0), Point(0.3, 90, 0.0)])[0].tau == 0.1


def test_a_limit_on_the_omitted_mass_ends_the_hull():
    assert [point.tau for point in hull(STEEP, 0.05)] == [0, 1]
    assert [point.tau for point in hull(FLAT, 0.05)] == [0, 1]


@given(point_lists)
def test_a_hull_loses_work_at_a_falling_rate_and_ends_at_the_least(points):
    found = hull(points)
    assert found[-1].slots == min(point.slots for point in points)
    gains = [(a.slots - b.slots) / (b.omitted - a.omitted) for a, b in pairwise(found)]
    assert all(gain > 0 for gain in gains)
    assert gains == sorted(gains, reverse=True)


def test_the_path_takes_the_step_that_saves_most_for_its_mass_first():
    assert assignments(LAYERS) == [{0: 0, 3: 0}, {0: 1, 3: 0}, {0: 1, 3: 10}, {0: 10, 3: 10}]


@given(st.dictionaries(st.integers(0, 5), point_lists, min_size=1), st.floats(0, 1))
def test_each_step_of_the_path_keeps_less_work_and_stays_within_the_limit(layers, limit):
    def total(taus):
        return sum(next(p.slots for p in layers[layer] if p.tau == tau) for layer, tau in taus.items())

    path = assignments(layers, limit)
    works = [total(taus) for taus in path]
    assert works == sorted(set(works), reverse=True)
    for taus in path:
        assert all(next(p.omitted for p in layers[layer] if p.tau == tau) <= limit for layer, tau in taus.items())


@pytest.mark.parametrize("budget", [0.0, 0.004, 0.006, 0.025, 1.0])
def test_bisection_finds_the_farthest_step_within_the_budget_and_measured_it(budget):
    path = assignments(LAYERS)
    increases = {step: 0.01 * step for step in range(len(path))}  # rises along the path

    def increase(config):
        return increases[[settings_of(taus, dense=True) for taus in path].index(config)]

    found = choose(LAYERS, TauSearch(max_ppl_increase=budget), [increase], dense=True)
    best = max(step for step, value in increases.items() if value <= budget)
    assert found.taus == path[best]
    assert found.config == settings_of(path[best], dense=True)
    assert found.increases == [increases[best]]
    assert {"text": 0, "step": best, "steps": 3, "increase": increases[best]} in found.trials


@given(st.lists(st.lists(st.sampled_from([0.0, 0.05, 0.2]), min_size=4, max_size=4), min_size=1, max_size=3))
def test_what_was_chosen_is_within_the_budget_on_all_texts_however_the_increase_runs(texts):
    path = [settings_of(taus, dense=True) for taus in assignments(LAYERS)]
    measured = []

    def measures(text):
        return lambda config: measured.append((text, path.index(config))) or texts[text][path.index(config)]

    try:
        found = choose(
            LAYERS, TauSearch(max_ppl_increase=0.1), [measures(text) for text in range(len(texts))], dense=True
        )
    except ValueError:
        assert max(increases[0] for increases in texts) > 0.1
    else:
        assert found.increases == [increases[path.index(found.config)] for increases in texts]
        assert max(found.increases) <= 0.1
    assert len(set(measured)) == len(measured)


def test_a_text_that_verifies_shortens_the_path():
    path = [settings_of(taus, dense=True) for taus in assignments(LAYERS)]
    first, second = (lambda config: 0.01), (lambda config: 0.1 * path.index(config))
    search = TauSearch(max_ppl_increase=0.1)
    assert choose(LAYERS, search, [first], dense=True).config == path[3]
    assert choose(LAYERS, search, [first, second], dense=True).config == path[1]


def test_a_limit_on_the_mass_alone_takes_the_end_of_its_path_and_reports_the_increase():
    search = TauSearch(max_ppl_increase=None, max_omitted_mass=0.05)
    found = choose(LAYERS, search, [lambda config: 7.0], dense=True)
    assert (found.taus, found.increases, len(found.trials)) == ({0: 1.0, 3: 1.0}, [7.0], 1)


def test_a_budget_that_nothing_meets_is_an_error_that_says_what_was_measured():
    with pytest.raises(ValueError, match=r"no setting stays within 0.001 nats per token: .* adds 0.5"):
        choose(LAYERS, TauSearch(), [lambda config: 0.5], dense=True)


def test_settings_name_the_layers_that_differ_from_the_most_common_tau():
    taus = {0: 0.0, 1: 3.0, 2: 3.0, 3: 10.0}
    assert settings_of(taus, dense=True) == MalaConfig(tau=3.0, layers={0: "sdpa", 3: 10.0})
    assert settings_of(taus, dense=False) == MalaConfig(tau=3.0, layers={0: 0.0, 3: 10.0})
    assert settings_of({0: 3.0, 1: 1.0}, dense=True) == MalaConfig(tau=1.0, layers={0: 3.0})
    assert settings_of({0: 0.0, 1: 0.0}, dense=True) == MalaConfig(tau=1.0, layers={0: "sdpa", 1: "sdpa"})


def test_points_are_sums_of_work_and_means_of_mass_over_heads():
    layer = {"layer": 4, "key_slots_per_query": [64.0, 128.0], "omitted_mass_mean": [0.1, 0.3]}
    assert points_of([{"tau": 1.0, "layers": [layer]}]) == {4: [Point(1.0, 192.0, pytest.approx(0.2))]}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_ppl_increase": None}, "needs a budget"),
        ({"max_ppl_increase": -0.1}, "max_ppl_increase"),
        ({"max_ppl_increase": math.nan}, "max_ppl_increase"),
        ({"max_omitted_mass": 1.5}, "max_omitted_mass"),
        ({"taus": ()}, "taus"),
        ({"taus": (0.0, 1.0)}, "taus"),
    ],
    ids=str,
)
def test_a_budget_that_is_none_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        TauSearch(**settings)

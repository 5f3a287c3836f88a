# SPDX-License-Identifier: Apache-2.0
"""Programs of a causal kernel start the longest first, over as many heads as share the L2 cache; and none is left out."""

from __future__ import annotations

import heapq

import pytest
import torch
from backward_calls import gradient_of, run_backward, run_forward
from calls import build
from inputs import Case

from mala_hf.ops import program_order
from mala_hf.ops.program_order import longest_first, units_at_once

triton = pytest.importorskip("triton")
tl = triton.language

MIB = 1 << 20
PROCESSORS = 132


@triton.jit
def _write_order(place_ptr, unit_ptr, num_tiles, units_at_once):
    place, unit = longest_first(num_tiles, units_at_once)
    tl.store(place_ptr + tl.program_id(0), place)
    tl.store(unit_ptr + tl.program_id(0), unit)


def order(num_tiles: int, num_units: int, together: int, device) -> list[tuple[int, int]]:
    places, units = (torch.full((num_tiles * num_units,), -1, dtype=torch.int32, device=device) for _ in range(2))
    _write_order[(num_tiles * num_units,)](places, units, num_tiles, together)
    return list(zip(places.tolist(), units.tolist(), strict=True))


@pytest.mark.parametrize("together", [1, 2, 3, 5, 7])
def test_every_tile_of_every_unit_is_computed_once_the_longest_of_a_part_first(together, device):
    programs = order(4, 7, together, device)
    assert sorted(programs) == [(place, unit) for place in range(4) for unit in range(7)]
    for first in range(0, 7, together):
        part = programs[4 * first : 4 * min(first + together, 7)]
        assert {unit for _, unit in part} == set(range(first, min(first + together, 7)))
        assert [place for place, _ in part] == sorted(place for place, _ in part)


@pytest.mark.parametrize(
    ("num_units", "units_of_keys", "key_mib", "expected"),
    [
        (16, 2, 4, 16),  # eight KV heads of 4 MiB each
        (16, 2, 8, 8),  # four of them fit: two even parts
        (20, 2, 8, 7),  # three even parts of at most eight
        (16, 2, 100, 2),  # heads that share their keys stay together
        (3, 1, 0, 3),
        (1, 1, 100, 1),
    ],
)
def test_as_many_units_are_mixed_as_have_their_keys_in_the_cache(
    num_units, units_of_keys, key_mib, expected, monkeypatch
):
    monkeypatch.setattr(program_order, "L2_BYTES", 32 * MIB)
    program_order._l2_bytes.cache_clear()
    assert units_at_once(num_units, units_of_keys, key_mib * MIB, torch.device("cpu")) == expected


def _end(programs: list[tuple[int, int]], num_tiles: int) -> float:
    """When the last program ends, if each starts as soon as a multiprocessor is free and takes as long as its row of tiles."""
    free = [0] * PROCESSORS
    for place, _ in programs:
        heapq.heapreplace(free, free[0] + num_tiles - place)
    return max(free)


def test_mixed_units_end_together(device):
    """2,048 tokens of 16 heads, 128 rows a program: one head after the other takes 27 steps where 16.5 are the mean."""
    assert _end(order(16, 16, 1, device), 16) == 27
    assert _end(order(16, 16, 16, device), 16) == 17


@pytest.mark.parametrize("l2_bytes", [1, 40_000])  # each KV head alone; two of four at a time
def test_results_do_not_depend_on_the_order(l2_bytes, device, monkeypatch):
    case = Case(seqlen_q=150, num_heads=8, num_kv_heads=4, batch=2, tile=(16, 32))
    results = []
    for l2 in (l2_bytes, 1 << 40):
        monkeypatch.setattr(program_order, "_l2_bytes", lambda device, l2=l2: l2)
        call = build(case, device=device)
        forward = run_forward(call)
        gradients = run_backward(call, forward, gradient_of(call), None).named()
        results.append([forward.out, forward.lse, *gradients.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

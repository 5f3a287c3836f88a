# SPDX-License-Identifier: Apache-2.0
"""The order in which programs of a causal kernel start: the longest first, over several heads.

A GPU starts programs by number, each as soon as another ends. Were heads done one after the other, the last head's longest program
would start near the end and run on alone: at 2,048 tokens for a third of the time. With all heads mixed, and batches of them, running
programs would read more keys than the L2 cache holds. So heads are mixed as far as theirs fit.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl

L2_BYTES = 32 << 20  # where a device does not say
CPU_PROCESSORS = 8  # multiprocessors to plan for where there is no GPU
# programs a multiprocessor below which fewer and longer ones end later (results/forward_three_h200.json)
FEWEST_OF_THREE = 4


@triton.jit
def longest_first(num_tiles, units_at_once):
    """(place, unit) of this program of a grid (num_tiles * units,): place 0 is a unit's longest tile, num_tiles - 1 its shortest.

    A unit is a head of a sequence; ``units_at_once`` of them have their tiles mixed.
    """
    program = tl.program_id(0)
    first = program // (num_tiles * units_at_once) * units_at_once
    units = tl.minimum(tl.num_programs(0) // num_tiles - first, units_at_once)
    within = program - first * num_tiles
    return within // units, first + within % units


def units_at_once(num_units: int, units_of_keys: int, key_bytes: int, device: torch.device) -> int:
    """Units to mix, in even parts: as many as have what they read in the L2 cache together, at least those that share it.

    num_units: heads of all sequences. units_of_keys: units that read the same keys. key_bytes: what those read.
    """
    fitting = max(1, _l2_bytes(device) // max(key_bytes, 1)) * units_of_keys
    return math.ceil(num_units / max(1, math.ceil(num_units / fitting)))


def are_enough_for_three(seqlen_q: int, block_m: int, num_units: int, device: torch.device) -> bool:
    """Whether programs of three query tiles are as many as it takes to run them faster than those of two, where nothing is skipped."""
    return math.ceil(seqlen_q / (3 * block_m)) * num_units >= FEWEST_OF_THREE * multiprocessors(device)


@lru_cache
def _l2_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return L2_BYTES
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or L2_BYTES


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; elsewhere a number that gives a few programs."""
    if device.type != "cuda":
        return CPU_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count

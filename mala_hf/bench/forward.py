# SPDX-License-Identifier: Apache-2.0
"""Forward of a whole sequence: MALA at tau = 1, fused, with INT8 discovery and as it chooses, and at tau = 0, beside the baselines."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..ops import mala_attn_func
from ..ops.choice_memory import memory as remembered
from ..ops.discover_choice import choose
from ..ops.query_tile import Settings
from ..ops.visibility import fixed_sequences
from ..workloads import Inputs
from .baselines import Attention
from .gate import check, full_attention, relative_error
from .rows import add_baselines, add_speedups
from .timing import copies_for_cold_reads, device_times, eager_times, peak_bytes
from .workload import Workload, copies_of, described

mala = functools.partial(mala_attn_func, causal=True)
FORMS: dict[str, Attention] = {
    "mala": functools.partial(mala, discovery="fused"),
    "mala_int8": functools.partial(mala, discovery="int8"),
    "mala_auto": mala,  # in a CUDA graph lengths alone decide, so at length its eager time is the one that tells
    "mala_tau0": functools.partial(mala, tau=0.0, discovery="fused"),
}


def forms_on(device: torch.device) -> dict[str, Attention]:
    """The columns of MALA that there are on this device: INT8 discovery needs a GPU."""
    return {name: form for name, form in FORMS.items() if device.type == "cuda" or name != "mala_int8"}


def measure_forward(
    workload: Workload, baselines: dict[str, Attention], device: torch.device, budget_ms: float
) -> dict[str, Any]:
    """One row: the same inputs through MALA and through the baselines, each checked and then timed.

    Raises ``RuntimeError`` where MALA is wrong; a baseline that fails says why in its place.
    """
    inputs = workload.inputs(device)
    remembered.clear()  # another row's inputs are another layer's: "auto" looks at these
    _, work = mala(inputs.q, inputs.k, inputs.v, discovery="fused", return_work=True)
    row = {
        **described(workload, inputs),
        "key_slots_per_query": work.key_slots_per_query.mean().item(),
        "key_slots_per_query_by_head": work.key_slots_per_query[0].tolist(),
        "work_fraction": work.work_fraction.mean().item(),
        "omitted_mass_bound_mean": work.omitted_mass_bound.mean().item(),
        "tile": list(work.tile),
    }
    truth = full_attention(inputs.q, inputs.k, inputs.v)
    copies = copies_of(inputs, copies_for_cold_reads(2 * inputs.k.numel() * inputs.k.element_size(), device))

    def measured(name: str, attention: Attention) -> dict[str, Any]:
        error = check(
            f"{name} at {workload.seqlen} tokens", relative_error(attention(inputs.q, inputs.k, inputs.v), truth)
        )
        calls = [functools.partial(attention, one.q, one.k, one.v) for one in copies]
        memory = peak_bytes(calls[0], device)
        eager = eager_times(calls, device, budget_ms)["median_ms"]
        times = device_times(calls, device, budget_ms)
        return {"relative_error": error, **times, "eager_ms": eager, "peak_bytes": memory}

    ours = forms_on(device)
    row |= {name: measured(name, attention) for name, attention in ours.items()}
    add_baselines(row, baselines, measured)
    add_speedups(row, [name for name in ours if name != "mala_tau0"], baselines)
    row["mala_auto"]["choices"] = choices_for(inputs, work.tile)
    return row


def choices_for(inputs: Inputs, tile: tuple[int, int]) -> list[str]:
    """What discovery="auto" does with these inputs in an eager call after others like it, and why."""
    length, head_dim = inputs.q.shape[1], inputs.q.shape[3]
    settings = Settings(1.0, head_dim**-0.5, (-1, 0), 0.0, tile)
    may_be = ("fused", "int8", "dense") if inputs.q.is_cuda else ("fused",)
    sequences = fixed_sequences(inputs.q.shape[0], length, length, 0)
    return [str(choice) for choice in choose(inputs.q, inputs.k, settings, sequences, may_be, remembered)]

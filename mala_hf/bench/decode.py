# SPDX-License-Identifier: Apache-2.0
"""Decode, one new token for each sequence: the forms of MALA and the dense kernels on the same caches."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..ops import mala_attn_func
from .baselines import Attention
from .decode_inputs import DecodeShape
from .decode_workload import DecodeWorkload
from .gate import check, full_attention, relative_error
from .rows import add_baselines, add_speedups
from .timing import copies_for_cold_reads, device_times, eager_times, peak_bytes

FORMS = ("two_pass", "split", "single")
BASELINES = ("sdpa_cudnn", "sdpa_flash")  # unless others are asked for


def mala(q: Tensor, k: Tensor, v: Tensor, form: str, **options: Any) -> Any:
    """The call that is measured."""
    return mala_attn_func(q, k, v, causal=True, decode=form, **options)


def retained_keys(retained: Tensor, num_kv_heads: int, block_n: int, context: int) -> int:
    """Keys whose values some query head of their KV head needs. retained: bool (batch, num_heads, 1, k_tiles)."""
    needed = retained.unflatten(1, (num_kv_heads, -1)).any(2).any(2)  # (batch, kv_heads, k_tiles)
    starts = torch.arange(needed.shape[-1], device=needed.device) * block_n
    return int((needed * (context - starts).clamp(max=block_n)).sum())


def measure_decode(
    workload: DecodeWorkload,
    baselines: dict[str, Attention],
    device: torch.device,
    *,
    budget_ms: float,
    bandwidth: dict[str, float],
) -> dict[str, Any]:
    """One row: every form and baseline checked and timed, retained slots stated, and what they read for it.

    ``gb_s`` is what must be read (keys, and the values of retained tiles; keys and values for a dense kernel) over the time, and
    ``of_copy`` that over the copy bandwidth. Raises ``RuntimeError`` where a form of MALA is wrong; a baseline that fails says why.
    """
    inputs = workload.inputs(device)
    q, k, v = inputs.q, inputs.k, inputs.v
    key_bytes, value_bytes = (x.numel() * x.element_size() for x in (k, v))
    copies = copies_for_cold_reads(key_bytes, device)
    caches = [(k, v), *((k.clone(), v.clone()) for _ in range(copies - 1))]
    truth = full_attention(q, k, v, 1)
    row: dict[str, Any] = {
        **asdict(DecodeShape(q.shape[0], q.shape[2], k.shape[2], k.shape[1], q.shape[3])),
        "dtype": str(q.dtype).removeprefix("torch."),
        "requested_slots": workload.slots if inputs.flat_heads < q.shape[2] and workload.shape else None,
        "flat_heads": inputs.flat_heads,
        "captured": None if workload.captured is None else workload.captured.name,
        "cache_copies": copies,
    }

    def measured(name: str, attention: Attention, read: int) -> dict[str, Any]:
        error = check(f"decode, {name} at {k.shape[1]} tokens", relative_error(attention(q, k, v), truth))
        calls = [functools.partial(attention, q, *cache) for cache in caches]
        memory = peak_bytes(calls[0], device)
        times = device_times(calls, device, budget_ms)
        eager = eager_times(calls, device, budget_ms / 4)["median_ms"]
        rate = read / times["median_ms"] / 1e6
        return {
            "relative_error": error,
            **times,
            "eager_ms": eager,
            "peak_bytes": memory,
            "read_bytes": read,
            "gb_s": rate,
            "of_copy": rate / bandwidth["copy_gb_s"],
        }

    for form in FORMS:
        _, work = mala(q, k, v, form, return_work=True)
        kept = retained_keys(work.retained, k.shape[2], work.tile[1], k.shape[1])
        read = key_bytes + kept * v.shape[-1] * v.element_size()
        row[form] = {
            "key_slots_per_query": work.key_slots_per_query.mean().item(),
            "key_slots_per_query_by_head": work.key_slots_per_query.mean(0).tolist(),
            "work_fraction": work.work_fraction.mean().item(),
            "tile": list(work.tile),
            **measured(form, functools.partial(mala, form=form), read),
        }
    add_baselines(row, baselines, lambda name, attention: measured(name, attention, key_bytes + value_bytes))
    add_speedups(row, FORMS, baselines)
    return row

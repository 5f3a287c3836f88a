# SPDX-License-Identifier: Apache-2.0
"""Decode, one new token for each sequence: the forms of MALA and the dense kernels on the same caches."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..ops import KeyPlane, mala_attn_func, quantize_keys
from ..ops.choice_memory import memory as remembered
from .baselines import Attention
from .decode_inputs import DecodeShape
from .decode_workload import DecodeWorkload
from .gate import check, full_attention, relative_error
from .rows import add_baselines, add_speedups
from .timing import Call, copies_for_cold_reads, device_times, eager_times, peak_bytes

# columns; "mala_int8": two passes, the first over an INT8 plane of the keys; "auto": whichever the call chooses
FORMS = ("two_pass", "mala_int8", "split", "single", "auto")
BASELINES = ("sdpa_cudnn", "sdpa_flash")  # unless others are asked for


def mala(q: Tensor, k: Tensor, v: Tensor, plane: KeyPlane | None, form: str, **options: Any) -> Any:
    """The call that is measured. Only the column "mala_int8" reads ``plane``, which the others do without."""
    if form == "mala_int8":
        return mala_attn_func(q, k, v, causal=True, decode="int8_two_pass", key_plane=plane, **options)
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

    ``gb_s`` is what must be read (keys, and the values of retained tiles; the plane, and keys and values of retained tiles; keys and
    values for a dense kernel) over the time, and ``of_copy`` that over the copy bandwidth. Raises
    ``RuntimeError`` where a form of MALA is wrong; a baseline that fails says why.
    """
    inputs = workload.inputs(device)
    q, k, v = inputs.q, inputs.k, inputs.v
    key_bytes, value_bytes = (x.numel() * x.element_size() for x in (k, v))
    plane = quantize_keys(k)
    copies = copies_for_cold_reads(min(key_bytes, plane.nbytes), device)
    remembered.clear()  # another row's inputs are another layer's: "auto" looks at these
    caches = [(k, v, plane)]
    caches += [(k.clone(), v.clone(), KeyPlane(*(x.clone() for x in plane.tensors))) for _ in range(copies - 1)]
    truth = full_attention(q, k, v, 1)
    row: dict[str, Any] = {
        **asdict(DecodeShape(q.shape[0], q.shape[2], k.shape[2], k.shape[1], q.shape[3])),
        "dtype": str(q.dtype).removeprefix("torch."),
        "requested_slots": workload.slots if inputs.flat_heads < q.shape[2] and workload.shape else None,
        "flat_heads": inputs.flat_heads,
        "captured": None if workload.captured is None else workload.captured.name,
        "cache_copies": copies,
    }

    def measured(name: str, calls: list[Call], read: int) -> dict[str, Any]:
        error = check(f"decode, {name} at {k.shape[1]} tokens", relative_error(calls[0](), truth))
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
        _, work = mala(q, k, v, plane, form, return_work=True)
        kept = retained_keys(work.retained, k.shape[2], work.tile[1], k.shape[1])
        read = kept * v.shape[-1] * v.element_size()
        read += plane.nbytes + kept * k.shape[-1] * k.element_size() if form == "mala_int8" else key_bytes
        row[form] = {
            "key_slots_per_query": work.key_slots_per_query.mean().item(),
            "key_slots_per_query_by_head": work.key_slots_per_query.mean(0).tolist(),
            "work_fraction": work.work_fraction.mean().item(),
            "tile": list(work.tile),
            "form": work.form,
            "choices": [str(choice) for choice in work.choices],
            **measured(form, [functools.partial(mala, q, *cache, form=form) for cache in caches], read),
        }

    def of_baseline(name: str, attention: Attention) -> dict[str, Any]:
        return measured(
            name, [functools.partial(attention, q, *cache[:2]) for cache in caches], key_bytes + value_bytes
        )

    add_baselines(row, baselines, of_baseline)
    add_speedups(row, FORMS, baselines)
    return row

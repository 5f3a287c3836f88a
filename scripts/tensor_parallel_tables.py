# SPDX-License-Identifier: Apache-2.0
"""The tables of several GPUs: a layer's attention with its heads split over them, and a training step."""

from __future__ import annotations

from typing import Any

from stored_results import results, table

PARTS = {
    "forward": ("mala_int8", "mala"),
    "backward": ("mala", "mala_state_only"),
    "decode": ("mala",),
}
NAMES = {
    ("forward", "mala_int8"): "forward, INT8 discovery",
    ("forward", "mala"): "forward, fused",
    ("backward", "mala"): "backward, support kept",
    ("backward", "mala_state_only"): "backward, state-only",
    ("decode", "mala"): "decode, one token",
}
DENSE = "sdpa_cudnn"
GIB, MIB = 2**30, 2**20


def tensor_parallel(name: str = "tensor_parallel_h200") -> str:
    """Each part of the operator: the slowest process, with the heads in order and balanced, beside cuDNN on the same split."""
    found = results(name)
    header = ("", "retained slots", "MALA, ms", "heads balanced", "cuDNN", "speedup", "MALA, peak MiB", "cuDNN")
    return table(header, [cells(found[part], part, form) for part, forms in PARTS.items() for form in forms])


def cells(part: dict[str, Any], name: str, form: str) -> list[str]:
    """A line of the table."""
    ours, dense = part[form], part[DENSE]
    in_order = ours["in_order"]
    return [
        NAMES[name, form],
        f"{part['key_slots_per_query']:,.0f}",
        *(f"{ours[split]['slowest_ms']:.3f}" for split in ("in_order", "balanced")),
        f"{dense['slowest_ms']:.3f}",
        f"{in_order['speedup_over_cudnn']:.2f}x",
        *(f"{column['peak_bytes'] / MIB:,.0f}" for column in (in_order, peak_of(dense))),
    ]


def peak_of(column: dict[str, Any]) -> dict[str, Any]:
    """The largest of all processes."""
    return {"peak_bytes": max(rank["peak_bytes"] for rank in column["by_rank"])}


def tensor_parallel_step(name: str = "tensor_parallel_h200") -> str:
    """One training step of Llama-shaped layers with ``tp_plan="auto"``: where its time goes."""
    step = results(name)["step"]
    header = ("attention", "step, ms", "of it attention", "communication", "the rest", "peak GiB")
    rows = [
        [
            title,
            *(f"{step[form][key]:,.0f}" for key in ("step_ms", "attention_ms", "communication_ms", "rest_ms")),
            f"{step[form]['peak_bytes'] / GIB:.1f}",
        ]
        for form, title in (("mala", "MALA"), ("sdpa", "SDPA"))
    ]
    return table(header, rows)

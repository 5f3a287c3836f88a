# SPDX-License-Identifier: Apache-2.0
"""Backward of a whole sequence: with the forward's support saved, and state-only (every tile scored again), beside the baselines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import mala_attn_func
from ..ops.reference import full_attention_head, legal_pairs
from ..workloads import Inputs
from .baselines import Attention
from .gate import CHECKED_ROWS, MAX_GRADIENT_ERROR, check
from .rows import add_baselines, add_speedups
from .timing import copies_for_cold_reads, device_times, eager_times, peak_bytes
from .workload import Workload, copies_of, described

Gradients = tuple[Tensor, Tensor, Tensor]
FORMS: dict[str, Attention] = {
    "mala": functools.partial(mala_attn_func, causal=True, save_support=True),
    "mala_state_only": functools.partial(mala_attn_func, causal=True, save_support=False, discovery="fused"),
    "mala_auto": functools.partial(mala_attn_func, causal=True),  # its steps are eager: the forward chooses
}


def true_gradients(inputs: Inputs, do: Tensor) -> Gradients:
    """dq (last rows), dk, dv of full attention in float32, for a ``do`` (1, rows, heads, head_dim) on the last rows only."""
    rows, groups = do.shape[1], inputs.q.shape[2] // inputs.k.shape[2]
    q = inputs.q[0, -rows:].detach().float().requires_grad_()
    k, v = (x[0].detach().float().requires_grad_() for x in (inputs.k, inputs.v))
    legal = legal_pairs(rows, len(k), (-1, 0)).to(q.device)
    for head in range(q.shape[1]):  # one at a time: memory
        out, _, _ = full_attention_head(
            q[:, head], k[:, head // groups], v[:, head // groups], legal, softmax_scale=q.shape[-1] ** -0.5
        )
        out.backward(do[0, :, head].float())
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return q.grad, k.grad, v.grad


def gradient_errors(attention: Attention, inputs: Inputs, do: Tensor, truth: Gradients) -> list[float]:
    """Relative L2 errors of dq, dk, dv for a ``do`` on the last rows only."""
    rows = do.shape[1]
    out = attention(inputs.q, inputs.k, inputs.v)
    dq, dk, dv = torch.autograd.grad(out[:, -rows:], (inputs.q, inputs.k, inputs.v), do)
    return [
        ((x.float() - y).norm() / y.norm()).item() for x, y in zip((dq[0, -rows:], dk[0], dv[0]), truth, strict=True)
    ]


def backward_of(out: Tensor, inputs: Inputs, do: Tensor) -> Callable[[], Any]:
    """The backward of that forward, to be run any number of times."""
    return lambda: torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), do, retain_graph=True)


def measure_backward(
    workload: Workload, baselines: dict[str, Attention], device: torch.device, budget_ms: float
) -> dict[str, Any]:
    """One row: the gradients of both forms of MALA and of the baselines, each checked and then timed.

    Memory is that of one forward and backward, inputs excluded. Raises ``RuntimeError`` where MALA is wrong; a baseline that fails says
    why in its place.
    """
    inputs = workload.inputs(device)
    copies = copies_of(inputs, copies_for_cold_reads(2 * inputs.k.numel() * inputs.k.element_size(), device))
    for one in copies:
        for x in (one.q, one.k, one.v):
            x.requires_grad_()
    out, work = mala_attn_func(inputs.q, inputs.k, inputs.v, causal=True, save_support=True, return_work=True)
    row = {
        **described(workload, inputs),
        "key_slots_per_query": work.key_slots_per_query.mean().item(),
        "support_bytes": work.support_bytes,
        "tile": list(work.tile),
    }
    generator = torch.Generator(device).manual_seed(1)
    do = torch.randn(out.shape, generator=generator, device=device, dtype=out.dtype)
    del out, work
    gate = do[:, -CHECKED_ROWS:]
    truth = true_gradients(inputs, gate)

    def measured(name: str, attention: Attention) -> dict[str, Any]:
        errors = gradient_errors(attention, inputs, gate, truth)
        for error in errors:
            check(f"backward of {name} at {workload.seqlen} tokens", error, MAX_GRADIENT_ERROR)
        return {"relative_errors": errors, **backward_times(attention, copies, do, device, budget_ms)}

    row |= {name: measured(name, attention) for name, attention in FORMS.items()}
    add_baselines(row, baselines, measured)
    add_speedups(row, FORMS, baselines)
    return row


def backward_times(
    attention: Attention, copies: list[Inputs], do: Tensor, device: torch.device, budget_ms: float
) -> dict[str, Any]:
    """Times of the backward alone, on the device and eagerly, and of forward and backward together, with their memory."""

    def step(inputs: Inputs) -> None:
        out = attention(inputs.q, inputs.k, inputs.v)
        torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), do)

    def backwards() -> list[Callable[[], Any]]:
        return [backward_of(attention(one.q, one.k, one.v), one, do) for one in copies]

    steps = [functools.partial(step, one) for one in copies]
    memory = peak_bytes(steps[0], device)
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # a backward runs where its forward ran
            times = device_times(backwards(), device, budget_ms, stream)
    else:
        times = device_times(backwards(), device, budget_ms)
    return {
        **times,
        "eager_ms": eager_times(backwards(), device, budget_ms)["median_ms"],
        "forward_and_backward_ms": eager_times(steps, device, budget_ms)["median_ms"],
        "step_peak_bytes": memory,
    }

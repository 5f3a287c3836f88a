# SPDX-License-Identifier: Apache-2.0
"""Forward, backward, decode and memory of the methods on the same inputs, each checked against its definition before it is timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..bench.baselines import reason
from ..bench.decode_inputs import DecodeShape, decode_inputs
from ..bench.decode_workload import decode_slots
from ..bench.gate import CHECKED_ROWS, MAX_GRADIENT_ERROR, check, relative_error
from ..bench.timing import copies_for_cold_reads, device_times, laps, peak_bytes
from ..bench.workload import Workload, bench_dtype
from ..flops import causal_slots, post_score_forward_flops, score_flops
from ..ops import mala_attn_func
from ..workloads import Inputs
from . import operator_methods as methods
from .nsa import NSAShape

OURS = ("full", "mala")  # that must run; the others say why they do not
LAPS = (3, 50)
COMPRESSED_ROWS = 2048


@dataclass(frozen=True)
class OperatorShape:
    """One sequence; ``slots`` key slots per query for the methods with a budget, and to aim at in the inputs for MALA."""

    seqlen: int = 131072
    num_heads: int = 16
    num_kv_heads: int = 1
    head_dim: int = 128
    slots: int = 1024
    moba_block: int = 128
    nsa_block: int = 64
    index_heads: int = 8
    index_dim: int = 64

    def __post_init__(self) -> None:
        block = max(self.moba_block, self.nsa_block)
        if self.seqlen % block or self.slots % (2 * block) or self.seqlen <= self.slots:
            raise ValueError(
                f"lengths and slots must be whole blocks, and the sequence longer than the slots, got {self}"
            )

    def inputs(self, device: torch.device) -> Inputs:
        """q, k, v in which MALA retains about ``slots`` per query."""
        workload = Workload(self.seqlen, float(self.slots), self.num_heads, self.num_kv_heads, self.head_dim)
        return workload.inputs(device)


def methods_of(shape: OperatorShape, q: Tensor) -> Iterator[tuple[str, Callable[[], methods.Method]]]:
    """The methods and how to make each. NSA's selected blocks and window have half the slots each; compressed keys come on top."""
    device, dtype = q.device, q.dtype
    nsa = NSAShape(selected=shape.nsa_block, count=shape.slots // 2 // shape.nsa_block, window=shape.slots // 2)
    yield "full", lambda: methods.full(device)
    yield "mala", lambda: methods.mala(device)
    yield "moba", lambda: methods.MoBA(shape.moba_block, shape.slots // shape.moba_block)
    yield "nsa_package", lambda: methods.PackagedNSA(nsa, q)
    yield "nsa", lambda: methods.NSA(nsa, q, COMPRESSED_ROWS)
    yield "dsa", lambda: methods.DSA(shape.seqlen, shape.slots, shape.index_heads, shape.index_dim, device, dtype)


def forward_flops(name: str, shape: OperatorShape, slots: float) -> float:
    """FLOPs of a method's forward, what it takes to choose counted in full; ``slots`` retained per query.

    NSA's compressed keys are among its slots; the products that compress are not counted.
    """
    rows = shape.seqlen * shape.num_heads
    visible = causal_slots(shape.seqlen)
    scored = shape.num_heads * visible if name in OURS else rows * slots
    chosen = {
        "moba": score_flops(shape.num_heads * visible / shape.moba_block, shape.head_dim),
        "dsa": score_flops(shape.index_heads * visible, shape.index_dim),
    }
    attended = score_flops(scored, shape.head_dim) + post_score_forward_flops(rows * slots, shape.head_dim)
    return attended + chosen.get(name, 0.0)


def median_ms(call: Callable[[], Any], device: torch.device, budget_ms: float) -> dict[str, float]:
    """Median, fastest and slowest of a call that is much longer than its launches, in ms, and how often it ran."""
    one = laps(call, device, 1)[0]
    times = torch.tensor(laps(call, device, min(LAPS[1], max(LAPS[0], int(budget_ms / one)))))
    return {
        "median_ms": times.median().item(),
        "fastest_ms": times.min().item(),
        "slowest_ms": times.max().item(),
        "calls": len(times),
    }


def measure_sequence(method: methods.Method, inputs: Inputs, device: torch.device, budget_ms: float) -> dict[str, Any]:
    """Errors against the definition, times of the forward and the backward, and the memory of both, inputs excluded."""
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    rows = min(CHECKED_ROWS, q.shape[1])
    generator = torch.Generator(device).manual_seed(1)
    do = torch.randn(q.shape, generator=generator, device=device, dtype=q.dtype)
    errors = errors_of(method, (q, k, v), do[:, -rows:])

    def forward() -> Tensor:
        with torch.no_grad():
            return method.attention(q, k, v)

    def step() -> None:
        torch.autograd.grad(method.attention(q, k, v), (q, k, v), do)

    found = {**errors, "forward": median_ms(forward, device, budget_ms)}
    found["forward_peak_bytes"] = peak_bytes(forward, device)
    found["step_peak_bytes"] = peak_bytes(step, device)
    out = method.attention(q, k, v)
    backward = functools.partial(torch.autograd.grad, out, (q, k, v), do, retain_graph=True)
    return found | {"backward": median_ms(backward, device, budget_ms)}


def errors_of(method: methods.Method, inputs: tuple[Tensor, Tensor, Tensor], do: Tensor) -> dict[str, Any]:
    """Relative errors of out, dq, dk, dv on the last rows against the definition. Raises ``RuntimeError`` where one is too large."""
    q, k, v = inputs
    rows = do.shape[1]
    with torch.no_grad():
        selection = method.selection(q, k, v)
    last = q[:, -rows:].detach().requires_grad_()
    truth = method.definition(last, k, v, selection)
    true_gradients = torch.autograd.grad(truth, (last, k, v), do.float())
    out = method.attention(q, k, v)
    error = check("the output", relative_error(out.detach(), truth.detach()))
    dq, dk, dv = torch.autograd.grad(out[:, -rows:], (q, k, v), do)
    gradients = [
        check("a gradient", ((x.float() - y.float()).norm() / y.float().norm()).item(), MAX_GRADIENT_ERROR)
        for x, y in zip((dq[:, -rows:], dk, dv), true_gradients, strict=True)
    ]
    full = methods.masked_rows(last.detach(), k, v, methods.last_rows(last, k)).detach()
    return {
        "relative_error": error,
        "gradient_errors": gradients,
        "error_to_full_attention": relative_error(out.detach(), full),
    }


def measure_decode(method: methods.Method, inputs: Inputs, device: torch.device, budget_ms: float) -> dict[str, Any]:
    """The same of one new token: device time on caches that were not just read."""
    q, k, v = inputs.q, inputs.k, inputs.v
    selection = None
    if isinstance(method, (methods.MoBA, methods.DSA, methods.NSA)):
        whole = torch.zeros(1, k.shape[1], *q.shape[2:], device=device, dtype=q.dtype)
        whole[:, -1:] = q
        selection = method.selection(whole, k, v)
    truth = method.definition(q, k, v, selection)
    copies = copies_for_cold_reads(k.numel() * k.element_size(), device)
    caches = [(k, v), *((k.clone(), v.clone()) for _ in range(copies - 1))]
    runs = [method.decode(*cache) for cache in caches]
    error = check("the new token", relative_error(runs[0](q, k, v), truth))
    calls = [functools.partial(run, q, *cache) for run, cache in zip(runs, caches, strict=True)]
    memory = peak_bytes(calls[0], device)
    return {"relative_error": error, "peak_bytes": memory, **device_times(calls, device, budget_ms)}


class OperatorBench:
    """The methods on the same inputs, one after another. ``row``: what MALA retains of the inputs."""

    def __init__(self, shape: OperatorShape, device: torch.device, budget_ms: float) -> None:
        self.shape, self.device, self.budget_ms = shape, device, budget_ms
        self.inputs = shape.inputs(device)
        _, work = mala_attn_func(self.inputs.q, self.inputs.k, self.inputs.v, causal=True, return_work=True)
        one = DecodeShape(1, shape.num_heads, shape.num_kv_heads, shape.seqlen, shape.head_dim)
        self.token = decode_inputs(one, float(shape.slots), decode_slots, dtype=bench_dtype(device), device=device)
        self.row: dict[str, Any] = {
            "mala_key_slots_per_query": work.key_slots_per_query.mean().item(),
            "mala_work_fraction": work.work_fraction.mean().item(),
            "mala_decode_key_slots_per_query": decode_slots(self.token),
        }
        self._makers = dict(methods_of(shape, self.inputs.q))

    def measure(self, name: str) -> dict[str, Any]:
        """A method's forward, backward and decode, or the reason why there is none.

        Raises ``RuntimeError`` where full attention or MALA is wrong.
        """
        found: dict[str, Any] = {}
        try:
            method = self._makers[name]()
            slots = method.slots(self.shape.seqlen) or self.row["mala_key_slots_per_query"]
            found = {"implementation": method.implementation, "key_slots_per_query": slots}
            found["forward_flops"] = forward_flops(name, self.shape, slots)
            found |= measure_sequence(method, self.inputs, self.device, self.budget_ms)
            found["decode"] = measure_decode(method, self.token, self.device, self.budget_ms)
        except Exception as error:  # a package that is absent, or no memory: the others can still be measured
            if name in OURS:
                raise
            found["failed"] = reason(error)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return found


METHODS = ("full", "mala", "moba", "nsa_package", "nsa", "dsa")

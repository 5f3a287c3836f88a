# SPDX-License-Identifier: Apache-2.0
"""Time the backward beside full attention's in one run, on inputs whose retained work is stated; write JSON.

    python scripts/bench_backward.py --lengths 8192 32768 131072 --slots 400 1000 --output results/backward.json

Both forms are timed: with the forward's support saved, and state-only (every tile scored again). The speedups are of device time,
each backward replayed as a CUDA graph; eager times stand beside it, and for short calls they are those of the host. A correctness
gate runs first: the gradients of the last rows against full attention in float32. Memory is that of one forward and backward, inputs
excluded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bench_operator import BASELINES, CHECKED_ROWS, graphed, measured_slots, peak_bytes, run_benchmark, sdpa, time_ms
from torch import Tensor

from mala_hf.ops import mala_attn_func
from mala_hf.ops.reference import full_attention_head, legal_pairs
from mala_hf.workloads import Inputs, calibrated_inputs

MAX_RELATIVE_ERROR = 0.03  # of bfloat16 gradients against float32; a wrong tile gives errors near 1
Gradients = tuple[Tensor, Tensor, Tensor]


def mala(inputs: Inputs, save_support: bool) -> Tensor:
    """MALA with the support saved, or state-only."""
    return mala_attn_func(inputs.q, inputs.k, inputs.v, causal=True, save_support=save_support)


FORMS: dict[str, Callable[[Inputs], Tensor]] = {
    "mala": lambda inputs: mala(inputs, save_support=True),
    "mala_state_only": lambda inputs: mala(inputs, save_support=False),
    **{name: (lambda inputs, backend=backend: sdpa(inputs, backend)) for name, backend in BASELINES.items()},
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
    return q.grad, k.grad, v.grad


def errors(attention: Callable[[Inputs], Tensor], inputs: Inputs, do: Tensor, truth: Gradients) -> list[float]:
    """Relative L2 errors of dq, dk, dv for a ``do`` on the last rows only."""
    rows = do.shape[1]
    out = attention(inputs)
    dq, dk, dv = torch.autograd.grad(out[:, -rows:], (inputs.q, inputs.k, inputs.v), do)
    return [
        ((x.float() - y).norm() / y.norm()).item() for x, y in zip((dq[0, -rows:], dk[0], dv[0]), truth, strict=True)
    ]


def backward_of(out: Tensor, inputs: Inputs, do: Tensor) -> Callable[[], Any]:
    """The backward of that forward, to be run any number of times."""
    return lambda: torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), do, retain_graph=True)


def measure(seqlen: int, slots: float, shape: dict[str, int], budget_ms: float) -> dict[str, Any]:
    """One row: the same inputs through both forms of MALA and through the baselines."""
    inputs = calibrated_inputs(seqlen, slots, measured_slots, **shape)
    for x in (inputs.q, inputs.k, inputs.v):
        x.requires_grad_()
    out, work = mala_attn_func(inputs.q, inputs.k, inputs.v, causal=True, return_work=True)
    row: dict[str, Any] = {
        "seqlen": seqlen,
        **shape,
        "dtype": "bfloat16",
        "causal": True,
        "requested_slots": slots,
        "key_slots_per_query": work.key_slots_per_query.mean().item(),
        "support_bytes": work.support_bytes,
        "tile": list(work.tile),
    }
    generator = torch.Generator("cuda").manual_seed(1)
    do = torch.randn(out.shape, generator=generator, device="cuda", dtype=out.dtype)
    del out, work
    gate = do[:, -CHECKED_ROWS:]
    truth = true_gradients(inputs, gate)
    for name, attention in FORMS.items():
        found = errors(attention, inputs, gate, truth)
        if not max(found) < MAX_RELATIVE_ERROR:
            raise SystemExit(f"{name} is wrong at {seqlen} tokens: relative errors {found}; no timing is reported")

        def step(attention: Callable[[Inputs], Tensor] = attention) -> None:
            torch.autograd.grad(attention(inputs), (inputs.q, inputs.k, inputs.v), do)

        memory = peak_bytes(step)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # a backward runs where its forward ran
            backward = backward_of(attention(inputs), inputs, do)
        graph = graphed(backward, stream)
        times = time_ms(graph.replay, budget_ms)
        del graph
        eager = time_ms(backward_of(attention(inputs), inputs, do), budget_ms)["median_ms"]
        del backward
        both = time_ms(step, budget_ms)["median_ms"]
        row[name] = {
            "relative_errors": found,
            **times,
            "eager_ms": eager,
            "forward_and_backward_ms": both,
            "step_peak_bytes": memory,
        }
    for name in ("mala", "mala_state_only"):
        row[name]["speedup_over_cudnn"] = row["sdpa_cudnn"]["median_ms"] / row[name]["median_ms"]
    return row


if __name__ == "__main__":
    run_benchmark(__doc__, 1000.0, measure, list(FORMS))

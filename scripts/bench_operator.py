# SPDX-License-Identifier: Apache-2.0
"""Time the fused forward beside full attention in one run, on inputs whose retained work is stated; write JSON.

    python scripts/bench_operator.py --lengths 8192 32768 131072 --slots 400 1000 --output results/forward.json

Times are device times: each call is replayed as a CUDA graph. Eager times stand beside them; for short calls they are the host's.
Every timing is preceded by a correctness gate on the same inputs: the error of MALA and of the baseline's 16-bit output against
full attention in float32, on the last rows. Baselines are torch's scaled_dot_product_attention with cuDNN and with FlashAttention.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mala_hf.info import versions
from mala_hf.ops import mala_attn_func
from mala_hf.ops.reference import full_attention_head, legal_pairs
from mala_hf.workloads import Inputs, calibrated_inputs

CHECKED_ROWS = 128
MAX_RELATIVE_ERROR = 0.02  # of a bfloat16 output against float32; a wrong tile gives errors near 1
BASELINES = {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}


COLUMNS = ("mala", "mala_int8", "mala_tau0", *BASELINES)


def time_ms(run: Callable[[], Any], budget_ms: float) -> dict[str, float]:
    """Median, 10th and 90th percentile of device times in milliseconds; the L2 cache is cleared before each, the queue kept full."""
    median, low, high = triton.testing.do_bench(run, warmup=budget_ms / 4, rep=budget_ms, quantiles=[0.5, 0.1, 0.9])
    return {"median_ms": median, "p10_ms": low, "p90_ms": high}


def graphed(run: Callable[[], Any], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """``run`` as a CUDA graph, captured on ``stream`` (default: a new one)."""
    stream = torch.cuda.Stream() if stream is None else stream
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):  # whatever is done once only
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
    torch.cuda.synchronize()
    return graph


def peak_bytes(run: Callable[[], Any]) -> int:
    """Device memory that ``run`` allocates on top of what is there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def sdpa(inputs: Inputs, backend: SDPBackend) -> torch.Tensor:
    """Full causal attention through torch, (batch, seqlen, num_heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def relative_error(out: torch.Tensor, inputs: Inputs) -> float:
    """Relative L2 error of the last rows of every head against full attention in float32."""
    q, k, v = inputs.q[0, -CHECKED_ROWS:].float(), inputs.k[0].float(), inputs.v[0].float()
    groups = q.shape[1] // k.shape[1]
    legal = legal_pairs(len(q), len(k), (-1, 0)).to(q.device)
    truth = torch.stack(
        [
            full_attention_head(
                q[:, h], k[:, h // groups], v[:, h // groups], legal, softmax_scale=q.shape[-1] ** -0.5
            )[0]
            for h in range(q.shape[1])
        ],
        1,
    )
    return ((out[0, -CHECKED_ROWS:].float() - truth).norm() / truth.norm()).item()


def measured_slots(inputs: Inputs) -> float:
    """Retained key slots per query, mean over heads."""
    _, work = mala_attn_func(inputs.q, inputs.k, inputs.v, causal=True, return_work=True)
    return work.key_slots_per_query.mean().item()


def measure(seqlen: int, slots: float, shape: dict[str, int], budget_ms: float) -> dict[str, Any]:
    """One row: the same inputs through MALA at tau = 1 and tau = 0 and through the baselines."""
    inputs = calibrated_inputs(seqlen, slots, measured_slots, **shape)
    _, work = mala_attn_func(inputs.q, inputs.k, inputs.v, causal=True, return_work=True)
    row: dict[str, Any] = {
        "seqlen": seqlen,
        **shape,
        "dtype": "bfloat16",
        "causal": True,
        "requested_slots": slots,
        "key_slots_per_query": work.key_slots_per_query.mean().item(),
        "key_slots_per_query_by_head": work.key_slots_per_query[0].tolist(),
        "work_fraction": work.work_fraction.mean().item(),
        "omitted_mass_bound_mean": work.omitted_mass_bound.mean().item(),
        "tile": list(work.tile),
    }
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "mala": lambda: mala_attn_func(inputs.q, inputs.k, inputs.v, causal=True),
        "mala_int8": lambda: mala_attn_func(inputs.q, inputs.k, inputs.v, causal=True, discovery="int8"),
        "mala_tau0": lambda: mala_attn_func(inputs.q, inputs.k, inputs.v, causal=True, tau=0.0),
        **{name: (lambda backend=backend: sdpa(inputs, backend)) for name, backend in BASELINES.items()},
    }
    for name, run in runs.items():
        error = relative_error(run(), inputs)
        if not error < MAX_RELATIVE_ERROR:
            raise SystemExit(f"{name} is wrong at {seqlen} tokens: relative error {error:.3g}; no timing is reported")
        memory = peak_bytes(run)
        eager = time_ms(run, budget_ms)["median_ms"]
        graph = graphed(run)
        row[name] = {
            "relative_error": error,
            **time_ms(graph.replay, budget_ms),
            "eager_ms": eager,
            "peak_bytes": memory,
        }
        del graph
    for name in ("mala", "mala_int8"):
        row[name]["speedup_over_cudnn"] = row["sdpa_cudnn"]["median_ms"] / row[name]["median_ms"]
    return row


def run_benchmark(
    description: str, default_slots: float, measure: Callable[..., dict[str, Any]], columns: Sequence[str]
) -> None:
    """A benchmark's command: measure every length and slot count, print a line for each, and write the rows as they come."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument(
        "--slots", type=float, nargs="+", default=[default_slots], help="retained key slots per query to aim at"
    )
    parser.add_argument("--heads", type=int, nargs=2, default=[16, 8], metavar=("QUERY", "KV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--budget-ms", type=float, default=1000.0, help="device time spent on each timing")
    parser.add_argument("--commit", help="commit to record; default: that of this checkout")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"{Path(sys.argv[0]).name} needs a GPU")
    commit = (
        options.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    )
    shape = {"num_heads": options.heads[0], "num_kv_heads": options.heads[1], "head_dim": options.head_dim}
    result = {"gpu": torch.cuda.get_device_name(), "commit": commit, "versions": versions(), "rows": []}
    for seqlen in options.lengths:
        for slots in options.slots:
            row = measure(seqlen, slots, shape, options.budget_ms)
            result["rows"].append(row)
            times = "  ".join(f"{name} {row[name]['median_ms']:8.3f}" for name in columns)
            speedups = "  ".join(
                f"{x['speedup_over_cudnn']:.2f}x" for x in map(row.get, columns) if "speedup_over_cudnn" in x
            )
            print(f"{seqlen:>7} tokens  {row['key_slots_per_query']:7.0f} slots  ms: {times}  {speedups}", flush=True)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_benchmark(__doc__, 400.0, measure, COLUMNS)

# SPDX-License-Identifier: Apache-2.0
"""Time the blockwise CPU form beside Transformers' eager attention on the same inputs; write JSON.

python scripts/bench_blockwise.py --output results/blockwise_cpu.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.llama.modeling_llama import eager_attention_forward

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mala_hf.info import versions
from mala_hf.ops import mala_attn_func
from mala_hf.workloads import peaked_inputs


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    """Median wall time of ``repeats`` runs after one warm-up, in milliseconds."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    """Measure one shape and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--heads", type=int, nargs=2, default=[9, 3], metavar=("QUERY", "KV"))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    num_heads, num_kv_heads = options.heads
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": options.head_dim}
    inputs = peaked_inputs(options.seqlen, **shape, links=1.0, dtype=torch.float32, device="cpu")
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    layer = SimpleNamespace(num_key_value_groups=num_heads // num_kv_heads, training=False)
    causal = torch.full((options.seqlen, options.seqlen), torch.finfo(torch.float32).min).triu(1)[None, None]
    scale = options.head_dim**-0.5
    times = {
        "eager_ms": median_ms(lambda: eager_attention_forward(layer, q, k, v, causal, scale), options.repeats),
        "blockwise_ms": median_ms(lambda: mala_attn_func(inputs.q, inputs.k, inputs.v, causal=True), options.repeats),
    }
    result = {
        "cpu": platform.processor() or platform.machine(),
        "threads": options.threads,
        "versions": versions(),
        "seqlen": options.seqlen,
        **shape,
        "dtype": "float32",
        **times,
        "blockwise_over_eager": times["blockwise_ms"] / times["eager_ms"],
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(times))


if __name__ == "__main__":
    with torch.inference_mode():
        main()

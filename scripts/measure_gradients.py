# SPDX-License-Identifier: Apache-2.0
"""MALA's gradients against full attention's in float32, on captured activations of a real model; write JSON.

    python scripts/measure_gradients.py --captured smollm2_qkv.safetensors --lengths 2048 4096 8192 --output results/gradients.json

The file holds q.NAME (1, heads, seqlen, head_dim), k.NAME and v.NAME (1, 1, seqlen, head_dim) for each NAME; the first n rows are those
of a sequence of n tokens. The incoming gradient is Gaussian. Errors are relative L2 distances of a whole head's gradient, averaged
over heads; for scale, those of torch's own attention in the same precision stand beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mala_hf.checkpoint import sha256_of
from mala_hf.info import checked_out_commit, versions
from mala_hf.ops import mala_attn_func

NAMES = ("dq", "dk", "dv")


def mala(q: Tensor, k: Tensor, v: Tensor, tau: float) -> Tensor:
    """MALA on (1, heads, seqlen, head_dim)."""
    return mala_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, tau=tau).transpose(1, 2)


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full causal attention on (1, heads, seqlen, head_dim), all keys under one KV head."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def gradients(attention, inputs: list[Tensor], do: Tensor) -> list[Tensor]:
    """out, dq, dk, dv as float32."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves)
    return [x.float() for x in (out.detach(), *torch.autograd.grad(out, leaves, do.to(out.dtype)))]


def relative(found: Tensor, truth: Tensor) -> float:
    """Relative L2 distance, mean over heads."""
    difference, size = ((x[0].flatten(1)).norm(dim=1) for x in (found - truth, truth))
    return (difference / size).mean().item()


def measure(inputs: list[Tensor], tau: float) -> dict[str, Any]:
    """Errors of one group of heads, in float32 and in bfloat16, and its retained work."""
    generator = torch.Generator(inputs[0].device).manual_seed(0)
    do = torch.randn(inputs[0].shape, generator=generator, device=inputs[0].device)
    do = do.bfloat16().float()  # the same in both precisions
    truth = gradients(full, [x.float() for x in inputs], do)
    row: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        cast = [x.to(dtype) for x in inputs]
        _, work = mala_attn_func(*(x.transpose(1, 2) for x in cast), causal=True, tau=tau, return_work=True)
        found = gradients(lambda q, k, v: mala(q, k, v, tau), cast, do)
        same_precision = gradients(full, cast, do)
        row[str(dtype).removeprefix("torch.")] = {
            "tile": list(work.tile),
            "work_fraction": work.work_fraction[0].tolist(),
            "output_error": relative(found[0], truth[0]),
            **{f"{name}_error": relative(x, y) for name, x, y in zip(NAMES, found[1:], truth[1:], strict=True)},
            **{
                f"full_{name}_error": relative(x, y)
                for name, x, y in zip(NAMES, same_precision[1:], truth[1:], strict=True)
            },
        }
    return row


def main() -> None:
    """Measure every length and group and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captured", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--taus", type=float, nargs="+", default=[1.0])
    parser.add_argument("--commit", help="commit to record; default: that of this checkout")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    commit = options.commit or checked_out_commit()
    if not options.captured.is_file():
        raise SystemExit(f"no such file: {options.captured}")
    data = load_file(options.captured, device=device)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "commit": commit,
        "versions": versions(),
        "captured": {"file": options.captured.name, "sha256": sha256_of(options.captured)},
        "rows": [],
    }
    for seqlen in options.lengths:
        for group in sorted(name[2:] for name in data if name.startswith("q.")):
            inputs = [data[f"{name}.{group}"][:, :, :seqlen] for name in "qkv"]
            if inputs[0].shape[2] < seqlen:
                raise SystemExit(f"{options.captured} holds {inputs[0].shape[2]} tokens of {group}, asked for {seqlen}")
            for tau in options.taus:
                row = {"seqlen": seqlen, "group": group, "tau": tau, **measure(inputs, tau)}
                result["rows"].append(row)
                print(json.dumps(row), flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer with its heads split over GPUs, and a training step of a tensor-parallel model; write JSON.

    torchrun --nproc-per-node 2 scripts/bench_tensor_parallel.py --output results/tensor_parallel.json

Forward, backward and decode of MALA and of the dense kernels on the same calibrated inputs. Each process takes its share of the KV
heads with their query heads; what counts is the slowest, since a layer waits for all. Retained work differs between heads: MALA is
timed with the heads in order, as tensor parallelism has them, and balanced, each process with as many heads and as even a sum of the
slots that they retained in the call before. Every output and gradient is compared with full attention in float32 before it is timed.
Times are device times of the attention alone, nothing is sent between the GPUs; ``parallel_step.py`` says what a step's are.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parallel_runs as runs
import torch
import torch.distributed as dist
from parallel_step import measure_training_step
from torch.nn.attention import SDPBackend

from mala_hf.bench import backward, decode, forward
from mala_hf.bench.baselines import Attention, load_baselines, reason, sdpa
from mala_hf.bench.decode_inputs import DecodeShape, decode_inputs
from mala_hf.bench.gate import CHECKED_ROWS, MAX_GRADIENT_ERROR, check, full_attention, relative_error
from mala_hf.bench.runner import new_result, save
from mala_hf.bench.timing import copies_for_cold_reads, device_times, peak_bytes
from mala_hf.bench.workload import bench_dtype, copies_of
from mala_hf.workloads import Inputs, calibrated_inputs

PARTS = ("forward", "backward", "decode", "step")
BASELINES = ("sdpa_cudnn", "fa4")
FORMS: dict[str, Attention] = {
    "mala": functools.partial(forward.mala, discovery="fused"),
    "mala_int8": functools.partial(forward.mala, discovery="int8"),
}
Split = list[list[int]]  # the KV heads of each process


def in_order(num_kv_heads: int, ranks: int) -> Split:
    """As tensor parallelism has them; ``ValueError`` where the processes do not divide the KV heads."""
    if num_kv_heads % ranks:
        raise ValueError(f"{ranks} processes do not divide {num_kv_heads} KV heads")
    each = num_kv_heads // ranks
    return [list(range(rank * each, (rank + 1) * each)) for rank in range(ranks)]


def balanced(slots: list[float], ranks: int) -> Split:
    """As many KV heads for each process, the largest first to the process that has least so far and room. slots: by KV head."""
    each = len(in_order(len(slots), ranks)[0])
    split: Split = [[] for _ in range(ranks)]
    for head in sorted(range(len(slots)), key=lambda head: -slots[head]):
        open_ = [heads for heads in split if len(heads) < each]
        min(open_, key=lambda heads: sum(slots[own] for own in heads)).append(head)
    return [sorted(heads) for heads in split]


def share(inputs: Inputs, kv_heads: list[int]) -> Inputs:
    """A process's heads."""
    groups = inputs.q.shape[2] // inputs.k.shape[2]
    queries = [head * groups + i for head in kv_heads for i in range(groups)]
    return Inputs(inputs.q[:, :, queries], inputs.k[:, :, kv_heads], inputs.v[:, :, kv_heads], inputs.links)


def of_every_rank(value: Any) -> list[Any]:
    """The values of all processes, in order of rank."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def slots_by_kv_head(inputs: Inputs, call: Callable[..., Any]) -> list[float]:
    """Retained key slots per query of every KV head, sum over its query heads; each process measures its own. ``call`` returns work."""
    num_kv_heads = inputs.k.shape[2]
    own = share(inputs, in_order(num_kv_heads, dist.get_world_size())[dist.get_rank()])
    _, work = call(own.q, own.k, own.v, return_work=True)
    slots = work.key_slots_per_query[0].unflatten(0, (own.k.shape[2], -1)).sum(1).tolist()
    return [x for own_slots in of_every_rank(slots) for x in own_slots]


def mean_slots(inputs: Inputs, call: Callable[..., Any]) -> float:
    """Retained key slots per query, mean over all heads: the same in every process."""
    return sum(slots_by_kv_head(inputs, call)) / inputs.q.shape[2]


def of_ranks(measure: Callable[[], dict[str, Any]], ours: bool) -> dict[str, Any]:
    """``measure`` in every process at the same time: the slowest, the fastest, and all.

    Raises ``RuntimeError`` where ours fails in any process; a baseline that fails says why in its place.
    """
    of_every_rank(None)  # together from here
    try:
        found = measure()
    except Exception as error:  # all processes must hear of it, whatever it is
        found = {"failed": reason(error)}
    every = of_every_rank(found)
    failed = [one["failed"] for one in every if "failed" in one]
    if failed and ours:
        raise RuntimeError(failed[0])
    if failed:
        return {"failed": failed[0]}
    times = [one["median_ms"] for one in every]
    peaks = [one["peak_bytes"] for one in every]
    return {
        "slowest_ms": max(times),
        "fastest_ms": min(times),
        "spread": max(times) / min(times) - 1,
        "peak_bytes": None if None in peaks else max(peaks),
        "by_rank": every,
    }


def measured_call(
    attention: Attention, own: Inputs, truth: torch.Tensor, device: torch.device, budget_ms: float
) -> dict:
    """Error, time and memory of an output: forward of a sequence or of a new token."""
    error = check("the output", relative_error(attention(own.q, own.k, own.v), truth))
    copies = copies_of(own, copies_for_cold_reads(2 * own.k.numel() * own.k.element_size(), device))
    calls = [functools.partial(attention, one.q, one.k, one.v) for one in copies]
    return {
        "relative_error": error,
        "peak_bytes": peak_bytes(calls[0], device),
        **device_times(calls, device, budget_ms),
    }


def measured_backward(
    attention: Attention, own: Inputs, do: torch.Tensor, truth: Any, device: torch.device, budget_ms: float
) -> dict:
    """Errors, time and memory of the gradients; memory is that of forward and backward."""
    errors = backward.gradient_errors(attention, own, do[:, -CHECKED_ROWS:], truth)
    check("the gradients", max(errors), MAX_GRADIENT_ERROR)
    times = backward.backward_times(attention, [own], do, device, budget_ms)
    return {"relative_errors": errors, "peak_bytes": times.pop("step_peak_bytes"), **times}


def measure_splits(
    inputs: Inputs,
    counted: Callable[..., Any],
    ours: dict[str, Attention],
    baselines: dict[str, Attention],
    measurer: Callable[[Inputs], Callable[[Attention], dict[str, Any]]],
) -> dict[str, Any]:
    """One operation: ours with both splits, the dense ones with the heads in order, where it makes no difference to them.

    counted: the call whose work says what the heads retain. measurer: prepares a share, and measures an attention on it.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    slots = slots_by_kv_head(inputs, counted)
    splits = {"in_order": in_order(len(slots), ranks), "balanced": balanced(slots, ranks)}
    groups = inputs.q.shape[2] // inputs.k.shape[2]
    row: dict[str, Any] = {"key_slots_per_query": sum(slots) / len(slots) / groups, "splits": {}}
    for name, split in splits.items():
        by_rank = [sum(slots[head] for head in heads) / len(heads) / groups for heads in split]
        row["splits"][name] = {"kv_heads": split, "key_slots_per_query_by_rank": by_rank}
        measure = measurer(share(inputs, split[rank]))
        for form, attention in ours.items():
            row.setdefault(form, {})[name] = of_ranks(functools.partial(measure, attention), True)
        if name == "in_order":
            for form, attention in baselines.items():
                row[form] = of_ranks(functools.partial(measure, attention), False)
    for form in ours:
        for found in row[form].values():
            for baseline in baselines:
                if "failed" not in row[baseline]:
                    label = f"speedup_over_{baseline.removeprefix('sdpa_')}"
                    found[label] = row[baseline]["slowest_ms"] / found["slowest_ms"]
    return row


def measure_operator(options: argparse.Namespace, device: torch.device, result: dict[str, Any]) -> None:
    """Forward, backward and decode, each into the result when it is there."""
    shape = {"num_heads": options.heads[0], "num_kv_heads": options.heads[1], "head_dim": options.head_dim}
    place: dict[str, Any] = {"dtype": bench_dtype(device), "device": device}
    if device.type == "cuda":
        baselines, result["missing"] = load_baselines(BASELINES)
    else:
        baselines = {"sdpa_math": functools.partial(sdpa, backend=SDPBackend.MATH)}
    inputs = calibrated_inputs(
        options.seqlen, options.slots, functools.partial(mean_slots, call=forward.mala), tolerance=0.1, **shape, **place
    )

    forms = {name: form for name, form in FORMS.items() if device.type == "cuda" or name != "mala_int8"}

    def forward_of(own: Inputs) -> Callable[[Attention], dict[str, Any]]:
        truth = full_attention(own.q, own.k, own.v)
        return lambda attention: measured_call(attention, own, truth, device, options.budget_ms)

    def backward_of(own: Inputs) -> Callable[[Attention], dict[str, Any]]:
        own = Inputs(*(x.requires_grad_() for x in (own.q, own.k, own.v)))
        generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
        do = torch.randn(own.q.shape, generator=generator, **place)
        truth = backward.true_gradients(own, do[:, -CHECKED_ROWS:])
        return lambda attention: measured_backward(attention, own, do, truth, device, options.budget_ms)

    def decode_of(own: Inputs) -> Callable[[Attention], dict[str, Any]]:
        truth = full_attention(own.q, own.k, own.v, 1)
        return lambda attention: measured_call(attention, own, truth, device, options.budget_ms)

    def done(name: str, row: dict[str, Any]) -> None:
        result[name] = row
        write(result, options.output)
        columns = "  ".join(
            f"{form} {slowest(row[form])}" for form in row if form not in ("splits", "key_slots_per_query")
        )
        runs.say(f"{name}  {row['key_slots_per_query']:.0f} slots  ms of the slowest (in order / balanced): {columns}")

    if "forward" in options.parts:
        done("forward", measure_splits(inputs, forward.mala, forms, baselines, forward_of))
    if "backward" in options.parts:
        done("backward", measure_splits(inputs, forward.mala, backward.FORMS, baselines, backward_of))
    del inputs
    if "decode" not in options.parts:
        return
    two_pass = functools.partial(decode.mala, plane=None, form="two_pass")
    token = decode_inputs(
        DecodeShape(1, *options.heads, options.seqlen, options.head_dim),
        options.slots,
        functools.partial(mean_slots, call=two_pass),
        **place,
    )
    done("decode", measure_splits(token, two_pass, {"mala": two_pass}, baselines, decode_of))


def slowest(column: dict[str, Any]) -> str:
    """One column for the terminal."""
    if "failed" in column:
        return column["failed"]
    found = [column[split] for split in ("in_order", "balanced")] if "in_order" in column else [column]
    return " / ".join(f"{one['slowest_ms']:.3f}" for one in found)


def write(result: dict[str, Any], output: Path) -> None:
    """The first process writes what there is."""
    if dist.get_rank() == 0:
        save(result, output)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=131072)
    parser.add_argument("--slots", type=float, default=1024.0, help="retained key slots per query to aim at")
    parser.add_argument("--heads", type=int, nargs=2, default=[16, 8], metavar=("QUERY", "KV"), help="of all processes")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4, help="of the training step")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--budget-ms", type=float, default=150.0, help="device time spent on each timing")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the benchmark without GPUs"
    )
    parser.add_argument("--commit", help="commit to record; default: that of this checkout")
    parser.add_argument("--output", type=Path, required=True)
    return parser


def run(options: argparse.Namespace) -> None:
    device = runs.device_of_process() if options.device == "cuda" else torch.device("cpu")
    if device.type != options.device:
        raise ValueError("torch sees no GPU: --device cpu tries the benchmark without one")
    runs.world_size()
    # what is no tensor goes through gloo: CUDA graphs are captured while nothing waits in NCCL
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    in_order(options.heads[1], dist.get_world_size())
    sizes = {"seqlen": options.seqlen, "heads": options.heads, "head_dim": options.head_dim, "slots": options.slots}
    result = {**new_result(device, options.commit), "ranks": dist.get_world_size(), **sizes}
    if {*options.parts} - {"step"}:
        measure_operator(options, device, result)
    if "step" in options.parts:
        shape = {"num_heads": options.heads[0], "num_kv_heads": options.heads[1], "head_dim": options.head_dim}
        result["step"] = measure_training_step(shape, options.layers, options.seqlen, device)
        write(result, options.output)
        runs.say(f"step  { ({name: x for name, x in result['step'].items() if name != 'by_rank'}) }")


if __name__ == "__main__":
    runs.main(run, build_parser())

# SPDX-License-Identifier: Apache-2.0
"""``mala-hf bench``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..model_place import check_model
from ..ops.checks import MAX_HEAD_DIM
from .checks import check_numbers, check_place
from .options import add_command, notice

LENGTHS = (512, 2048, 8192, 32768, 131072)
SLOTS = {"forward": 400.0, "backward": 1000.0, "decode": 400.0}
HEADS, HEAD_DIM = (16, 8), 128
BUDGET_MS, DECODE_BUDGET_MS = 1000.0, 150.0  # for each timing

Case = tuple[str, Callable[[], dict[str, Any]]]


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = add_command(commands, "bench", run, "MALA beside the dense kernels, checked and then timed")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--backward", action="store_true", help="the backward, instead of the forward")
    mode.add_argument("--decode", action="store_true", help="one new token over a long cache")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help="tokens (default: 512 to 131072)")
    parser.add_argument("--slots", type=float, nargs="+", metavar="N", help="retained per query to aim at")
    parser.add_argument("--heads", type=int, nargs=2, metavar=("Q", "KV"), help="default: 16 8")
    parser.add_argument("--head-dim", type=int, metavar="N", help="default: 128")
    parser.add_argument("--shapes", nargs="+", metavar="S", help="Q,KV,D,LENGTH,SLOTS; --decode: B,Q,KV,CONTEXT")
    parser.add_argument("--flat-share", type=float, default=0.0, metavar="X", help="of the heads; 1: worst case")
    parser.add_argument("--captured", type=Path, metavar="FILE", help="safetensors with q, k, v, instead")
    parser.add_argument("--baselines", nargs="*", metavar="B", help="default: all that are here")
    parser.add_argument("--generate", metavar="MODEL", help="with --decode, also tokens/s of its generate")
    parser.add_argument("--device", metavar="NAME", help="default: a GPU; cpu tries the benchmark out")
    parser.add_argument("--budget-ms", type=float, metavar="X", help="of each timing (1000; --decode 150)")
    parser.add_argument("--seconds", type=float, metavar="X", help="begin no row after that time")
    parser.add_argument("--commit", metavar="SHA", help="to record (default: the checkout's)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON, written after each row")


def run(options: argparse.Namespace) -> None:
    """Measure, write JSON as rows come, and print tables or JSON."""
    from ..bench.baselines import LOADERS, load_baselines
    from ..bench.decode import BASELINES
    from ..bench.runner import bench_device, new_result, run_rows, save
    from ..bench.tables import closing_lines, row_lines

    check_options(options)
    device = bench_device(options.device)
    check_place(options, file=options.output)
    wanted = (BASELINES if options.decode else LOADERS) if options.baselines is None else options.baselines
    baselines, missing = load_baselines(wanted, device)
    result = new_result(device, options.commit) | {"unavailable": missing}
    cases = (decode_cases if options.decode else sequence_cases)(options, result, baselines, device)

    def show(row: dict[str, Any]) -> None:
        lines = row_lines(row)
        if options.json:
            notice(lines[0])
        else:
            print("\n".join(lines) + "\n", flush=True)

    run_rows(result, cases, seconds=options.seconds, output=options.output, on_row=show)
    if options.generate:
        from ..bench.generate import measure_generate

        length = max(options.lengths) if options.lengths else None
        result["generate"] = measure_generate(options.generate, device, length)
        save(result, options.output)
    print(json.dumps(result) if options.json else "\n".join(closing_lines(result)))


def check_options(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for options that do not go together and numbers that mean nothing, ``OSError`` for an absent file."""
    if not options.decode and options.generate:
        raise ValueError("--generate belongs to --decode")
    if options.decode and options.heads and not options.lengths and not options.captured:
        raise ValueError(
            "--decode without --lengths measures shapes that have their heads: give --lengths with --heads"
        )
    if options.shapes and (options.lengths or options.heads):
        raise ValueError("a shape of --shapes has its heads and its length: leave out --heads and --lengths")
    if options.shapes and not options.decode and (options.slots or options.flat_share or options.head_dim is not None):
        raise ValueError(
            "a shape of --shapes has its head_dim and its slots: leave out --head-dim, --slots and --flat-share"
        )
    if options.captured and (
        (options.shapes and options.decode)
        or options.heads
        or options.head_dim is not None
        or options.slots
        or options.flat_share
    ):
        raise ValueError("captured q, k, v are as they are: --captured takes --lengths, and nothing else of the inputs")
    check_numbers(options, lengths=1, heads=1, head_dim=1)
    if options.head_dim is not None and options.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"--head-dim must be at most {MAX_HEAD_DIM}, got {options.head_dim}")
    if not 0 <= options.flat_share <= 1:
        raise ValueError(f"--flat-share must be from 0 to 1, got {options.flat_share}")
    for name in ("budget_ms", "seconds"):
        if getattr(options, name) is not None and not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(options, name)}")
    if any(not slots > 0 for slots in options.slots or ()):
        raise ValueError(f"--slots must be above 0, got {options.slots}")
    if options.captured and not options.captured.is_file():
        raise FileNotFoundError(f"--captured {options.captured}: no such file")


def head_dim_of(options: argparse.Namespace) -> int:
    """head_dim of synthetic inputs."""
    return HEAD_DIM if options.head_dim is None else options.head_dim


def sequence_cases(
    options: argparse.Namespace, result: dict[str, Any], baselines: dict[str, Any], device: Any
) -> list[Case]:
    """Rows of the forward or the backward."""
    from ..bench.backward import measure_backward
    from ..bench.forward import measure_forward
    from ..bench.workload import Workload, workload_of, workloads_of

    measure = measure_backward if options.backward else measure_forward
    num_heads, num_kv_heads = options.heads or HEADS
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim_of(options)}
    slots = options.slots or [SLOTS["backward" if options.backward else "forward"]]
    workloads = [workload_of(one) for one in options.shapes or ()]
    if options.captured:
        workloads += [Workload(length, None, captured=options.captured) for length in options.lengths or [None]]
    elif not workloads:
        workloads = workloads_of(options.lengths or LENGTHS, slots, options.flat_share, shape)
    budget_ms = options.budget_ms or BUDGET_MS
    return [(one.name, partial(measure, one, baselines, device, budget_ms)) for one in workloads]


def decode_cases(
    options: argparse.Namespace, result: dict[str, Any], baselines: dict[str, Any], device: Any
) -> list[Case]:
    """Rows of the decode; the bandwidths that they are held against are measured now."""
    from ..bench.bandwidth import bandwidths
    from ..bench.decode import measure_decode
    from ..bench.decode_workload import DecodeWorkload, decode_workloads

    budget_ms = options.budget_ms or DECODE_BUDGET_MS
    if options.captured:
        lengths = options.lengths or [None]
        workloads = [DecodeWorkload(None, captured=options.captured, context=length) for length in lengths]
    else:
        num_heads, num_kv_heads = options.heads or HEADS
        of_lengths = [f"1,{num_heads},{num_kv_heads},{length}" for length in options.lengths or ()]
        slots = options.slots or [SLOTS["decode"]]
        shapes = options.shapes or of_lengths
        workloads = decode_workloads(shapes, slots, head_dim_of(options), options.flat_share)
    if options.generate:
        check_model(options.generate)  # before minutes of rows, after which it would be looked for
    result["bandwidth"] = bandwidths(device, budget_ms)
    measure = partial(measure_decode, budget_ms=budget_ms, bandwidth=result["bandwidth"])
    return [(one.name, partial(measure, one, baselines, device)) for one in workloads]

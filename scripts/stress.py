# SPDX-License-Identifier: Apache-2.0
"""The same bits again and again while several processes share a GPU: what a race in a kernel would change. JSON, a row a process.

python scripts/stress.py results/stress_h200.json                                   # four processes, 45 seconds
python scripts/stress.py stress.json --seconds 300 --processes 6 --seed 7

Processes take turns on a GPU at moments that no kernel chooses, so warps and copies meet in orders that a kernel alone never sees. Each
process computes its calls once, waits for the others, and repeats them until the time is over: forward by each way of discovery,
without votes (tau = 0) and in programs so short that most are beginning or ending, backward, and decodes of each form. Each result must
have the bits of the first, and processes with the same head_dim the same first bits. Exit code 0 where they do, 1 where one differs, 2
where a process fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from process_ends import exit_on_sigterm
from stored_results import as_text, write_whole
from torch import Tensor

from mala_hf.ops import mala_attn_func, quantize_keys
from mala_hf.workloads import peaked_inputs

Ways = dict[str, Callable[[], list[Tensor]]]
HEADS, KV_HEADS, LINKS = 8, 4, 1.0
# times as many queries as elsewhere, on so few keys that programs end as soon as they have begun
TALL, KEYS_OF_TALL = 32, 64
START_SECONDS = 300.0  # to compile, beside the time that a run is given


def ways_of(head_dim: int, seqlen: int, seed: int, device: str) -> Ways:
    """The calls of one process, by name."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter multiplies bfloat16 wrongly
    x = peaked_inputs(
        seqlen, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=head_dim, links=LINKS, dtype=dtype, device=device, seed=seed
    )  # fmt: skip
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    common: dict[str, Any] = {"causal": True, "impl": "triton", "return_lse": True}
    plane = quantize_keys(x.k, impl="triton")

    def forward(**options) -> list[Tensor]:
        return list(mala_attn_func(x.q, x.k, x.v, **common, **options))

    def trained() -> list[Tensor]:
        out = mala_attn_func(*leaves, causal=True, impl="triton", save_support=True)
        return list(torch.autograd.grad(out.float().square().sum(), leaves))

    def tall() -> list[Tensor]:
        q = x.q.repeat(1, TALL, 1, 1).requires_grad_()  # training saves the retained tiles
        out = mala_attn_func(
            q, x.k[:, :KEYS_OF_TALL], x.v[:, :KEYS_OF_TALL], causal=False, impl="triton", discovery="fused"
        )
        return [out.detach()]

    def step(form: str, **options) -> list[Tensor]:
        return list(mala_attn_func(x.q[:, -1:], x.k, x.v, **common, decode=form, **options))

    return {
        "forward, fused": lambda: forward(discovery="fused"),
        "forward, int8": lambda: forward(discovery="int8"),
        "forward, tau = 0": lambda: forward(discovery="fused", tau=0.0),
        "forward, short programs": tall,
        "backward over its support": trained,
        "decode, two passes": lambda: step("two_pass"),
        "decode, split": lambda: step("split"),
        "decode, INT8 plane": lambda: step("int8_two_pass", key_plane=plane),
    }


def digest(results: dict[str, list[Tensor]]) -> str:
    """Of all bits."""
    found = hashlib.sha256()
    for tensors in results.values():
        for x in tensors:
            found.update(x.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def repeat(ways: Ways, first: dict[str, list[Tensor]], seconds: float) -> dict[str, Any]:
    """Laps over all ways, and how many calls of each gave other bits than at first."""
    different = dict.fromkeys(ways, 0)
    laps, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        found = {name: run() for name, run in ways.items()}
        for name, tensors in found.items():
            # NaN has no equal, but the same bits
            same = all(torch.equal(_bits(x), _bits(y)) for x, y in zip(tensors, first[name], strict=True))
            different[name] += not same
        laps += 1
    return {"laps": laps, "calls": laps * len(ways), "different": sum(different.values()), "by_way": different}


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def work(options: argparse.Namespace) -> None:
    """One process: says when it is ready, begins when it is told, prints its row."""
    head_dim = options.head_dims[options.process % len(options.head_dims)]
    ways = ways_of(head_dim, options.seqlen, options.seed, options.device)
    first = {name: run() for name, run in ways.items()}
    print("ready", digest(first), flush=True)
    if not sys.stdin.readline():
        raise SystemExit("the others are gone")
    found = repeat(ways, first, options.seconds)
    print(json.dumps({"process": options.process, "head_dim": head_dim, "first": digest(first), **found}), flush=True)


def together(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of all processes. RuntimeError where one fails, or hangs: where not all have ended START_SECONDS after their time."""
    command = [sys.executable, __file__, "-", "--seconds", str(options.seconds), "--seqlen", str(options.seqlen)]
    command += ["--seed", str(options.seed), "--device", options.device, "--head-dims", *map(str, options.head_dims)]
    started = [
        subprocess.Popen(
            [*command, "--process", str(i)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        for i in range(options.processes)
    ]

    def kill() -> None:
        for process in started:
            process.kill()

    limit = threading.Timer(options.seconds + START_SECONDS, kill)
    limit.start()
    try:
        for process in started:  # the slowest has compiled, then all begin
            if not process.stdout.readline().startswith("ready"):
                raise RuntimeError("a process failed before it began")
        for process in started:
            process.stdin.write("go\n")
        rows = []
        for process in started:
            line = process.stdout.readline()
            if process.wait() or not line:
                raise RuntimeError("a process failed")
            rows.append(json.loads(line))
        return rows
    finally:
        limit.cancel()
        kill()
        for process in started:
            process.wait()


def main(arguments: list[str] | None = None) -> int:
    """Run all, write the rows, and say whether a bit was another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=45.0, help="from when all processes have compiled")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128], help="one for each process in turn")
    parser.add_argument("--seqlen", type=int, default=32768)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.processes < 1:
        parser.error("--seconds and --processes must be positive: no repetition is no success")
    if options.process is not None:
        work(options)
        return 0
    exit_on_sigterm()
    try:
        rows = together(options)
    except (OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    firsts = {(row["head_dim"], row["first"]) for row in rows}
    totals = {
        "laps": sum(row["laps"] for row in rows),
        "calls": sum(row["calls"] for row in rows),
        "different": sum(row["different"] for row in rows),
        "agree": len(firsts) == len({head_dim for head_dim, _ in firsts}),
    }
    gpu = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    how = {name: getattr(options, name) for name in ("seed", "seqlen", "processes", "seconds")}
    versions = {"torch": torch.__version__.split("+")[0]}
    write_whole(options.output, as_text({**versions, **gpu, **how, **totals, "rows": rows}))
    print(totals)
    return 0 if totals["agree"] and not totals["different"] else 1


if __name__ == "__main__":
    sys.exit(main())

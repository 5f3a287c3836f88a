# SPDX-License-Identifier: Apache-2.0
"""Times launch shapes of the first pass over an INT8 plane, in whole decodes, and each kernel of the shipped one.

For a GPU. No new shape is begun after ``--seconds``.

python scripts/tune_int8_decode.py --output results/int8_decode_tuning.json
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mala_hf.bench.decode_inputs import DecodeShape
from mala_hf.bench.decode_workload import DecodeWorkload
from mala_hf.bench.timing import copies_for_cold_reads, device_times
from mala_hf.ops import KeyPlane, quantize_keys
from mala_hf.ops.decode import launch_decode
from mala_hf.ops.decode_choice import decode_settings
from mala_hf.ops.query_tile import Settings
from mala_hf.ops.tile_config import PlaneLaunch, decode_launch, plane_launch
from mala_hf.ops.visibility import fixed_sequences

SHAPES = ((1, 16, 8, 131072), (8, 16, 8, 131072), (1, 64, 8, 131072))  # batch, query heads, KV heads, context
# step, num_warps, num_stages, programs of a multiprocessor, fewest tiles of a program
LAUNCHES = [
    (256, 4, 3, 3, 8), (256, 4, 3, 2, 8), (256, 4, 4, 2, 8), (128, 2, 3, 5, 8), (128, 2, 4, 4, 8), (128, 4, 3, 5, 8), (256, 8, 3, 2, 8),
    (512, 8, 3, 1, 8), (256, 4, 2, 4, 8), (256, 2, 3, 3, 8),
]  # fmt: skip
BUDGET_MS = 60.0


def decode(q, k, v, plane: KeyPlane | None, launch: PlaneLaunch | None, return_work: bool = False):
    """The decode that is timed; without a plane in two passes over exact keys."""
    block_n = decode_launch(q.shape[-1], v.shape[-1], q.dtype).block_n
    settings = decode_settings(Settings(1.0, q.shape[-1] ** -0.5, (-1, 0), 0.0, (1, block_n)), q, v, k.shape[2], False)
    sequences = fixed_sequences(q.shape[0], 1, k.shape[1], 0)
    form = "two_pass" if plane is None else "int8_two_pass"
    return launch_decode(q, k, v, settings, sequences, None, form, 0, return_work, key_plane=plane, first_launch=launch)


def kernel_times(call: Any) -> dict[str, float]:
    """Microseconds of each kernel of a call, mean over 20."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(20):
            call()
        torch.cuda.synchronize()
    return {one.key: round(one.device_time_total / 20, 2) for one in profile.key_averages()}


def measured(shape: tuple[int, ...], until: float) -> dict[str, Any]:
    """One shape with every launch, and in two passes over exact keys."""
    device = torch.device("cuda")
    inputs = DecodeWorkload(DecodeShape(*shape)).inputs(device)
    q, k, v = inputs.q, inputs.k, inputs.v
    plane = quantize_keys(k)
    caches = [(k, v, plane)]
    for _ in range(copies_for_cold_reads(plane.nbytes, device) - 1):
        caches.append((k.clone(), v.clone(), KeyPlane(*(x.clone() for x in plane.tensors))))
    exact = decode(q, k, v, None, None)[0]

    def timed(launch: PlaneLaunch | None, from_plane: bool = True) -> dict[str, Any]:
        calls = [functools.partial(decode, q, *(x[:2]), x[2] if from_plane else None, launch) for x in caches]
        return {
            "us": round(1e3 * device_times(calls, device, BUDGET_MS)["median_ms"], 2),
            "from_exact": ((calls[0]()[0] - exact).float().norm() / exact.float().norm()).item(),
        }

    row: dict[str, Any] = {"shape": shape, "plane_bytes": plane.nbytes, "two_pass": timed(None, False), "launches": []}
    tiles = [decode(q, k, v, each, None, True)[2] for each in (None, plane)]
    row["retained"] = {
        form: (found == found.max()).float().mean().item()
        for form, found in zip(("two_pass", "int8"), tiles, strict=True)
    }
    shipped = plane_launch(q.shape[-1], torch.cuda.get_device_capability()[0])
    row["kernels_us"] = kernel_times(functools.partial(decode, q, k, v, plane, shipped))
    for launch in [shipped, *(one for numbers in LAUNCHES if (one := PlaneLaunch(*numbers)) != shipped)]:
        if time.monotonic() > until:
            row["stopped"] = "out of time"
            break
        try:
            row["launches"].append({**asdict(launch), **timed(launch)})
        except Exception as error:  # one that does not fit is an answer too
            row["launches"].append({**asdict(launch), "error": f"{type(error).__name__}: {error}"[:300]})
    return row


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=50.0)
    options = parser.parse_args()
    begin = time.monotonic()
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    for index, shape in enumerate(SHAPES):
        found["rows"].append(measured(shape, begin + options.seconds * (index + 1) / len(SHAPES)))
        print(json.dumps(found["rows"][-1]), flush=True)
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

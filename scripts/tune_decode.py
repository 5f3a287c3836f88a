# SPDX-License-Identifier: Apache-2.0
"""Times forms of a decode beside one another and beside torch's: in two passes, and launch shapes of splits without votes (tau = 0).

For a GPU. No new row is begun after ``--seconds``. ``tune_int8_decode.py`` has the launch shapes of the pass over an INT8 plane.

python scripts/tune_decode.py --output results/decode_forms_h200.json
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tuning import run_rows

from mala_hf.bench.baselines import load_baselines
from mala_hf.bench.decode_inputs import DecodeShape
from mala_hf.bench.decode_workload import DecodeWorkload
from mala_hf.bench.gate import relative_error
from mala_hf.bench.timing import copies_for_cold_reads, device_times
from mala_hf.ops import KeyPlane, quantize_keys
from mala_hf.ops.decode import launch_decode
from mala_hf.ops.decode_choice import decode_settings
from mala_hf.ops.query_tile import Settings
from mala_hf.ops.tile_config import DecodeLaunch, decode_launch
from mala_hf.ops.visibility import fixed_sequences

# batch, query heads, KV heads, context, share of flat heads
SHAPES = (
    (1, 16, 8, 131072, 0.0), (1, 16, 8, 8192, 0.0), (1, 16, 8, 131072, 1.0), (8, 16, 8, 131072, 0.0), (1, 16, 8, 32768, 0.0),
    (1, 16, 8, 4096, 0.0), (1, 16, 8, 8192, 1.0), (8, 32, 8, 8192, 0.0), (8, 32, 8, 32768, 0.0),
)  # fmt: skip
# num_stages, programs on a multiprocessor, fewest tiles of a program
WITHOUT_VOTES = ((2, 3, 4), (3, 3, 4), (3, 4, 1), (4, 2, 4), (2, 4, 2))
BUDGET_MS = 40.0
MAX_ERROR = 0.02


def run(q, k, v, plane: KeyPlane | None, form: str, tau: float, launch: DecodeLaunch):
    """A decode, as ``launch_decode`` is asked for it."""
    settings = decode_settings(
        Settings(tau, q.shape[-1] ** -0.5, (-1, 0), 0.0, (1, launch.block_n)), q, v, k.shape[2], False
    )
    sequences = fixed_sequences(q.shape[0], 1, k.shape[1], 0)
    return launch_decode(q, k, v, settings, sequences, None, form, key_plane=plane, launch=launch)[0]


def measured(numbers: tuple) -> dict[str, Any]:
    """One row: device time in us of every form, and of torch's kernels."""
    device = torch.device("cuda")
    *sizes, flat_share = numbers
    inputs = DecodeWorkload(DecodeShape(*sizes), flat_share=flat_share).inputs(device)
    q, k, v = inputs.q, inputs.k, inputs.v
    plane = quantize_keys(k)
    caches = [(k, v, plane)]
    for _ in range(copies_for_cold_reads(plane.nbytes, device) - 1):
        caches.append((k.clone(), v.clone(), KeyPlane(*(x.clone() for x in plane.tensors))))
    launch = decode_launch(q.shape[-1], v.shape[-1], q.dtype)
    forms: dict[str, tuple] = {form: (form, 1.0, launch) for form in ("two_pass", "int8_two_pass")}
    for stages, programs, tiles in WITHOUT_VOTES:
        shape = replace(launch, num_stages=stages, programs_per_sm=programs, min_tiles=tiles)
        forms[f"tau 0, {stages} stages, {programs} programs, {tiles} tiles"] = ("split", 0.0, shape)
    baselines = load_baselines(["sdpa_cudnn", "sdpa_flash"])[0]
    full = baselines["sdpa_cudnn"](q, k, v)
    row: dict[str, Any] = {"shape": numbers}
    calls = {
        name: [
            functools.partial(run, q, x[0], x[1], x[2] if arguments[0] == "int8_two_pass" else None, *arguments)
            for x in caches
        ]
        for name, arguments in forms.items()
    }
    calls |= {name: [functools.partial(one, q, *x[:2]) for x in caches] for name, one in baselines.items()}
    for name, made in calls.items():
        try:
            error = relative_error(made[0](), full)
            if error > MAX_ERROR:
                raise ValueError(f"wrong result, relative error {error:.3g}")
            row[name] = round(1e3 * device_times(made, device, BUDGET_MS)["median_ms"], 2)
        except Exception as error:  # a form that fails is an answer too
            row[name] = f"{type(error).__name__}: {error}"[:300]
    return row


if __name__ == "__main__":
    run_rows(__doc__, SHAPES, 120.0, measured)

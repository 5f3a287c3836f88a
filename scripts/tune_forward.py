# SPDX-License-Identifier: Apache-2.0
"""Times the forms of the forward on Hopper beside one another and beside cuDNN.

Each is checked first: the same bits as the fused form (full attention's values for tau = 0). For a Hopper GPU. No new row is begun
after ``--seconds``. ``results/forward_forms_h200.json`` and ``results/discovery_growth_h200.json`` have the forms that were taken out,
too.

python scripts/tune_forward.py --output forward_forms.json
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tuning import run_rows

from mala_hf.bench.baselines import load_baselines
from mala_hf.bench.gate import relative_error
from mala_hf.bench.timing import copies_for_cold_reads, device_times
from mala_hf.bench.workload import copies_of, measured_slots, workload_of
from mala_hf.ops import mala_attn_func

SHAPES = (
    "16,8,128,32768,400", "16,8,128,32768,1000", "16,8,128,131072,400", "16,8,128,131072,1000", "16,8,128,2048,flat",
    "16,8,128,8192,flat", "16,8,128,32768,flat", "16,8,128,131072,flat", "16,8,128,8192,400", "16,8,128,8192,1000",
    "16,8,64,2048,flat", "16,8,64,8192,flat", "16,8,64,32768,flat", "32,8,128,8192,flat", "16,8,64,32768,400", "32,8,128,32768,400",
)  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {  # what the call is asked for
    "fused": {"discovery": "fused"},
    "tau0": {"discovery": "fused", "tau": 0.0},
    "int8": {"discovery": "int8"},
}
BUDGET_MS = 150.0
MAX_ERROR = 0.02


def attend(form: str, q, k, v):
    """The call in one of FORMS."""
    return mala_attn_func(q, k, v, causal=True, **FORMS[form])


def measured(shape: str) -> dict[str, Any]:
    """One row: device time in ms of every form that covers it, and of cuDNN."""
    device = torch.device("cuda")
    inputs = workload_of(shape).inputs(device)
    calls: dict[str, Callable] = {form: functools.partial(attend, form) for form in FORMS}
    cudnn = load_baselines(["sdpa_cudnn"])[0]["sdpa_cudnn"]
    row: dict[str, Any] = {"shape": shape, "flat_heads": inputs.flat_heads}
    if inputs.flat_heads < inputs.q.shape[2]:
        row["slots"] = measured_slots(inputs)
    else:  # candidates are all tiles
        calls = {form: call for form, call in calls.items() if form != "int8"}
    full, exact = cudnn(inputs.q, inputs.k, inputs.v), attend("fused", inputs.q, inputs.k, inputs.v)
    copies = copies_of(inputs, copies_for_cold_reads(sum(x.nbytes for x in (inputs.q, inputs.k, inputs.v)), device))
    for form, call in (calls | {"sdpa_cudnn": cudnn}).items():
        try:
            out = call(inputs.q, inputs.k, inputs.v)
            is_right = form in ("tau0", "sdpa_cudnn") or torch.equal(out, exact)
            if not is_right or relative_error(out, full) > MAX_ERROR:
                raise ValueError(f"wrong result, relative error {relative_error(out, full):.3g}")
            timed = device_times([functools.partial(call, *(one.q, one.k, one.v)) for one in copies], device, BUDGET_MS)
            row[form] = round(timed["median_ms"], 5)
        except Exception as error:  # a form that fails is an answer too
            row[form] = f"{type(error).__name__}: {error}"[:300]
    return row


if __name__ == "__main__":
    run_rows(__doc__, SHAPES, 240.0, measured)

# SPDX-License-Identifier: Apache-2.0
"""Runs the rows of a benchmark one after another, and writes what there is after each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import check_device
from ..info import checked_out_commit, device_name, versions

Row = dict[str, Any]


def bench_device(name: str | None) -> torch.device:
    """The device of that name, by default a GPU; ``ValueError`` where there is none."""
    if name is None and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU: --device cpu tries the benchmark without one")
    device = check_device(name)
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"the benchmark runs on cuda or cpu, got {device}")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # streams and graphs are made there
    return device


def new_result(device: torch.device, commit: str | None) -> dict[str, Any]:
    """What every file of results begins with: device, commit (default: that of the checkout, if it is one), versions."""
    return {"gpu": device_name(device), "commit": commit or checked_out_commit(), "versions": versions()}


def run_rows(
    result: dict[str, Any],
    cases: Iterable[tuple[str, Callable[[], Row]]],
    *,
    seconds: float | None = None,
    output: Path | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """``result`` with ``rows``, one for each named case, written to ``output`` after each.

    seconds: no case begins later than that. A case that was not run, or for which there is no memory, is in ``not_run`` with its
    reason. Other errors are raised; what was measured until then is written.
    """
    result["rows"], result["not_run"] = [], []
    start = time.monotonic()
    for name, measure in cases:
        if seconds is not None and time.monotonic() - start > seconds:
            result["not_run"].append({"case": name, "reason": f"the {seconds:g} seconds were spent"})
            save(result, output)
            continue
        try:
            row = measure()
        except torch.OutOfMemoryError:
            result["not_run"].append({"case": name, "reason": "out of memory"})
        else:
            result["rows"].append(row)
            on_row(row)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        save(result, output)
    return result


def save(result: dict[str, Any], output: Path | None) -> None:
    """Write the JSON, if it is to be written."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")

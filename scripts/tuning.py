# SPDX-License-Identifier: Apache-2.0
"""What the scripts that time forms beside one another share: rows until the time is over."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton


def run_rows(description: str | None, rows: Sequence[Any], seconds: float, measured: Callable[[Any], dict]) -> None:
    """The command: a row for each of ``rows``, none begun after so many seconds, written to ``--output`` as they come."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=seconds)
    options = parser.parse_args()
    begin = time.monotonic()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "versions": versions, "rows": []}
    for one in rows:
        if time.monotonic() - begin > options.seconds:
            found["stopped"] = f"out of time before {one}"
            break
        found["rows"].append(measured(one))
        print(json.dumps(found["rows"][-1]), flush=True)
        options.output.write_text(json.dumps(found, indent=1) + "\n")

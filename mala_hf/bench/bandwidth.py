# SPDX-License-Identifier: Apache-2.0
"""What the memory of the device gives: the yardstick of everything that is bound by bytes."""

from __future__ import annotations

import torch

from .timing import Call, device_times

BYTES = {"cuda": 2**30, "cpu": 2**26}


def bandwidths(device: torch.device, budget_ms: float) -> dict[str, float]:
    """GB/s of a copy, its reads and its writes counted, and of a sum, which only reads."""
    x = torch.rand(BYTES[device.type] // 4, device=device)
    y = torch.empty_like(x)
    size = x.numel() * x.element_size()

    def rate(call: Call, moved: int) -> float:
        return moved / device_times([call], device, budget_ms)["median_ms"] / 1e6

    return {"copy_gb_s": rate(lambda: y.copy_(x), 2 * size), "read_gb_s": rate(x.sum, size)}

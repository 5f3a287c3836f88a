# SPDX-License-Identifier: Apache-2.0
"""The table of the Hopper forward on inputs where nothing can be skipped, with and without votes."""

from __future__ import annotations

from performance_rows import forward_rows, heads
from stored_results import table

FORMS = ("tau0", "fused_wide")  # those that ship, at tau = 0 and 1


def all_tiles(name: str = "forward_forms_h200") -> str:
    """Times at tau = 0 and tau = 1 on flat inputs, and how fast both are beside cuDNN."""
    header = ("tokens", "heads", "head_dim", "tau = 0, ms", "tau = 1", "cuDNN", "tau = 0 over cuDNN", "tau = 1")
    rows = [
        [
            f"{row['seqlen']:,}",
            heads(row),
            str(row["head_dim"]),
            *(f"{row[key]:.3f}" for key in (*FORMS, "sdpa_cudnn")),
            *(f"{row['sdpa_cudnn'] / row[key]:.2f}x" for key in FORMS),
        ]
        for row in forward_rows(name)
        if row["requested_slots"] is None
    ]
    return table(header, rows)

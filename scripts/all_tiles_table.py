# SPDX-License-Identifier: Apache-2.0
"""The table of the Hopper forward on inputs where nothing can be skipped, with and without votes."""

from __future__ import annotations

from stored_results import results, table


def all_tiles(name: str = "forward_all_tiles_h200") -> str:
    """Times at tau = 0 and tau = 1 on flat inputs, and how fast both are beside cuDNN."""
    header = ("tokens", "heads", "head_dim", "tau = 0, ms", "tau = 1", "cuDNN", "of cuDNN's speed", "tau = 1")
    rows = [
        [
            f"{row['seqlen']:,}",
            f"{row['num_heads']} / {row['num_kv_heads']}",
            str(row["head_dim"]),
            *(f"{row[key]:.3f}" for key in ("mala_tau0_ms", "mala_flat_ms", "sdpa_cudnn_ms")),
            *(f"{100 * row['sdpa_cudnn_ms'] / row[key]:.0f} %" for key in ("mala_tau0_ms", "mala_flat_ms")),
        ]
        for row in results(name)["rows"]
    ]
    return table(header, rows)

# SPDX-License-Identifier: Apache-2.0
"""Tables of the forward and the backward beside the dense kernels."""

from __future__ import annotations

from collections.abc import Iterable

from performance_rows import Row, forward_rows, heads, main_rows
from stored_results import results, table

BACKWARD = "operator_backward_h200"
START = ["tokens", "retained slots per query"]
DENSE = {"sdpa_cudnn": "cuDNN", "sdpa_flash": "FlashAttention-2", "fa4": "FlashAttention-4"}
TIMES = {"fused": "MALA, ms", "int8": "INT8 discovery", "tau0": "tau 0", "sdpa_cudnn": "cuDNN"}


def forward_cells(row: Row) -> list[str]:
    """Retained slots, times, and speedups over cuDNN."""
    return [
        f"{row['slots']:,.0f}",
        *(f"{row[name]:.3f}" for name in TIMES),
        *(f"{row['sdpa_cudnn'] / row[name]:.2f}x" for name in ("fused", "int8")),
    ]


def forward() -> str:
    """Forward times at the main shape: MALA at tau = 1, with discovery in INT8, its own full attention (tau = 0), and cuDNN's."""
    header = [*START, *TIMES.values(), "speedup over cuDNN", "with INT8 discovery"]
    return table(header, [[f"{row['seqlen']:,}", *forward_cells(row)] for row in main_rows()])


def forward_shapes() -> str:
    """The same columns for every shape that was measured."""
    header = ["tokens", "heads", "head_dim", "retained slots", *TIMES.values(), "over cuDNN", "with INT8"]
    rows = [
        [f"{row['seqlen']:,}", heads(row), str(row["head_dim"]), *forward_cells(row)]
        for row in forward_rows("discovery_growth_h200")
    ]
    return table(header, rows)


def forward_peers() -> str:
    """The forward at 131,072 tokens beside the attention packages that can be installed."""
    columns = {
        "mala": "MALA, ms",
        "mala_int8": "INT8 discovery",
        "mala_tau0": "tau 0",
        "sdpa_cudnn": "cuDNN",
        "sdpa_flash": "FlashAttention-2",
        "fa4": "FlashAttention-4",
        "flash_sparse": "flash-sparse-attn",
    }
    ratios = [(over, ours) for ours in ("mala_int8", "mala_tau0") for over in ("sdpa_cudnn", "fa4")]
    header = ["heads", "head_dim", "retained slots", *columns.values(), "INT8 over cuDNN", "over FlashAttention-4"]
    header += ["tau 0 over cuDNN", "over FlashAttention-4", "peak MiB, INT8", "cuDNN"]
    rows = [
        [
            heads(row),
            str(row["head_dim"]),
            f"{row['slots']:,}" if "slots" in row else f"about {row['requested_slots']:,}",
            *(f"{row[f'{name}_ms']:.1f}" for name in columns),
            *(f"{row[f'{over}_ms'] / row[f'{ours}_ms']:.2f}x" for over, ours in ratios),
            *(f"{row[f'{name}_mib']:,.0f}" for name in ("mala_int8", "sdpa_cudnn")),
        ]
        for row in results("forward_peers_h200")["rows"]
    ]
    return table(header, rows)


FORMS = {"mala_auto": "MALA, ms", "mala": "support saved"}  # the default call, and save_support=True


def start(row: Row) -> list[str]:
    """The first two cells of a row of the backward."""
    return [f"{row['seqlen']:,}", f"{row['key_slots_per_query']:,.0f}"]


def speedup_names(second: str) -> list[str]:
    """What the columns of ``speedups`` are called, ``second`` being the second form."""
    return ["over cuDNN", second, "over FlashAttention-4", second]


def speedups(row: Row, forms: Iterable[str], key: str, digits: int) -> list[str]:
    """How many times faster each form is than cuDNN, and then than FlashAttention-4."""
    return [f"{row[over][key] / row[form][key]:.{digits}f}x" for over in ("sdpa_cudnn", "fa4") for form in forms]


def backward() -> str:
    """Backward, device time."""
    forms = {"mala": "MALA, ms", "mala_state_only": "state-only"}
    header = [*START, *forms.values(), *DENSE.values(), *speedup_names("state-only")]
    rows = [
        [
            *start(row),
            *(f"{row[name]['median_ms']:.3f}" for name in (*forms, *DENSE)),
            *speedups(row, forms, "median_ms", 1),
        ]
        for row in results(BACKWARD)["rows"]
    ]
    return table(header, rows)


def backward_eager() -> str:
    """Backward, run eagerly: what short calls cost on the host shows."""
    columns = {**FORMS, "mala_state_only": "state-only", **DENSE}
    header = [*START, *columns.values(), *speedup_names("support saved")]
    rows = [
        [*start(row), *(f"{row[name]['eager_ms']:.3f}" for name in columns), *speedups(row, FORMS, "eager_ms", 1)]
        for row in results(BACKWARD)["rows"]
    ]
    return table(header, rows)


def steps() -> str:
    """One forward and backward, run eagerly: the default call and the one told to save its support, and memory."""
    dense = {name: DENSE[name] for name in ("sdpa_cudnn", "fa4")}
    header = [*START, *FORMS.values(), *dense.values(), *speedup_names("support saved")]
    header += ["peak memory, MiB", *dense.values(), "of it support, KiB"]
    key = "forward_and_backward_ms"
    rows = [
        [
            *start(row),
            *(f"{row[name][key]:.2f}" for name in (*FORMS, *dense)),
            *speedups(row, FORMS, key, 2),
            *(f"{row[name]['step_peak_bytes'] / 2**20:,.0f}" for name in ("mala_auto", *dense)),
            f"{row['support_bytes'] / 2**10:,.0f}",
        ]
        for row in results(BACKWARD)["rows"]
    ]
    return table(header, rows)


PERFORMANCE_TABLES = {
    "forward": forward,
    "forward_shapes": forward_shapes,
    "forward_peers": forward_peers,
    "backward": backward,
    "backward_eager": backward_eager,
    "steps": steps,
}

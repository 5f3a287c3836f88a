# SPDX-License-Identifier: Apache-2.0
"""Tables of the forward and the backward beside the dense kernels."""

from __future__ import annotations

from collections.abc import Iterable

from performance_rows import Row, heads, milliseconds, operator_rows, peer_rows, slots, times_faster
from stored_results import table

BACKWARD = ("operator_backward_h200", "operator_backward_more_h200")
DENSE = {"sdpa_cudnn": "cuDNN", "sdpa_flash": "FlashAttention-2", "fa4": "FlashAttention-4"}
SHAPE = ["tokens", "heads", "head_dim", "retained slots"]
OURS = {"mala_auto": '"auto", ms', "mala": "fused", "mala_int8": "INT8 discovery", "mala_tau0": "tau 0"}


def shape(row: Row) -> list[str]:
    """The cells below SHAPE."""
    return [f"{row['seqlen']:,}", heads(row), str(row["head_dim"]), slots(row)]


def forward() -> str:
    """Forward times of the default call at the main shape, beside the two fastest dense kernels."""
    columns = {"mala_auto": "MALA, ms", "sdpa_cudnn": "cuDNN", "fa4": "FlashAttention-4"}
    header = ["tokens", "retained slots per query", *columns.values(), "over cuDNN", "over FlashAttention-4"]
    rows = [
        [
            f"{row['seqlen']:,}",
            slots(row),
            *(milliseconds(row, name) for name in columns),
            *(times_faster(row, "mala_auto", other) for other in ("sdpa_cudnn", "fa4")),
        ]
        for row in peer_rows()
    ]
    return table(header, rows)


def forward_peers() -> str:
    """Every way of the forward beside the attention packages that can be installed."""
    columns = {**OURS, "sdpa_cudnn": "cuDNN", "fa4": "FlashAttention-4", "flash_sparse": "flash-sparse-attn"}
    header = [*SHAPE, *columns.values(), '"auto" over cuDNN', "over FlashAttention-4", "tau 0 over FlashAttention-4"]
    header += ['peak MiB, "auto"', "cuDNN"]
    ratios = (("mala_auto", "sdpa_cudnn"), ("mala_auto", "fa4"), ("mala_tau0", "fa4"))
    rows = [
        [
            *shape(row),
            *(milliseconds(row, name) for name in columns),
            *(times_faster(row, ours, other) for ours, other in ratios),
            *(f"{row[name]['peak_bytes'] / 2**20:,.0f}" for name in ("mala_auto", "sdpa_cudnn")),
        ]
        for row in operator_rows("operator_peers_h200")
    ]
    return table(header, rows)


def forward_shapes() -> str:
    """Every kind of row beside the kernels that come with torch, on the device and started one by one from the host."""
    columns = {**OURS, "sdpa_cudnn": "cuDNN", "sdpa_flash": "FlashAttention-2", "flex": "FlexAttention"}
    header = [*SHAPE, *columns.values(), '"auto" over the best dense', 'eager: "auto", ms', "best dense", "over it"]
    rows = [
        [
            *shape(row),
            *(milliseconds(row, name) for name in columns),
            times_faster(row, "mala_auto", row["best_dense"]),
            *(milliseconds(row, name, "eager_ms") for name in ("mala_auto", row["best_dense"])),
            times_faster(row, "mala_auto", row["best_dense"], "eager_ms"),
        ]
        for row in operator_rows("operator_h200", "operator_flat_h200")
    ]
    return table(header, rows)


def forward_fa4() -> str:
    """Short and flat rows where flash-attn-4 is installed, so that "auto" may run it."""
    columns = {"mala_auto": '"auto", ms', "mala_tau0": "tau 0", "sdpa_cudnn": "cuDNN", "fa4": "FlashAttention-4"}
    header = [*SHAPE, *columns.values(), '"auto" over FlashAttention-4']
    rows = [
        [*shape(row), *(milliseconds(row, name) for name in columns), times_faster(row, "mala_auto", "fa4")]
        for row in operator_rows("operator_fa4_h200")
    ]
    return table(header, rows)


FORMS = {"mala_auto": "MALA, ms", "mala": "support saved"}  # the default call, and save_support=True
START = ["tokens", "head_dim", "retained slots per query"]


def start(row: Row) -> list[str]:
    """The first cells of a row of the backward."""
    return [f"{row['seqlen']:,}", str(row["head_dim"]), slots(row)]


def speedup_names(second: str) -> list[str]:
    """What the columns of ``speedups`` are called, ``second`` being the second form."""
    return ["over cuDNN", second, "over FlashAttention-4", second]


def speedups(row: Row, forms: Iterable[str], key: str, digits: int) -> list[str]:
    """How many times faster each form is than cuDNN, and then than FlashAttention-4."""
    return [times_faster(row, form, over, key, digits) for over in ("sdpa_cudnn", "fa4") for form in forms]


def backward() -> str:
    """Backward, device time."""
    forms = {"mala": "MALA, ms", "mala_state_only": "state-only"}
    header = [*START, *forms.values(), *DENSE.values(), *speedup_names("state-only")]
    rows = [
        [
            *start(row),
            *(milliseconds(row, name) for name in (*forms, *DENSE)),
            *speedups(row, forms, "median_ms", 1),
        ]
        for row in operator_rows(*BACKWARD)
    ]
    return table(header, rows)


def backward_eager() -> str:
    """Backward, run eagerly: what short calls cost on the host shows."""
    columns = {**FORMS, "mala_state_only": "state-only", **DENSE}
    header = [*START, *columns.values(), *speedup_names("support saved")]
    rows = [
        [*start(row), *(milliseconds(row, name, "eager_ms") for name in columns), *speedups(row, FORMS, "eager_ms", 1)]
        for row in operator_rows(*BACKWARD)
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
            *(milliseconds(row, name, key) for name in (*FORMS, *dense)),
            *speedups(row, FORMS, key, 2),
            *(f"{row[name]['step_peak_bytes'] / 2**20:,.0f}" for name in ("mala_auto", *dense)),
            f"{row['support_bytes'] / 2**10:,.0f}",
        ]
        for row in operator_rows(*BACKWARD)
    ]
    return table(header, rows)


PERFORMANCE_TABLES = {
    "forward": forward,
    "forward_shapes": forward_shapes,
    "forward_peers": forward_peers,
    "forward_fa4": forward_fa4,
    "backward": backward,
    "backward_eager": backward_eager,
    "steps": steps,
}

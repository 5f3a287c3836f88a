# SPDX-License-Identifier: Apache-2.0
"""The table of what the kernels were built to reach, beside the worst that was measured."""

from __future__ import annotations

from performance_rows import Row, operator_rows, share_flat
from performance_tables import BACKWARD
from stored_results import results, table

FORWARD = ("operator_h200", "operator_peers_h200")
CUDNN, FA2, FA4 = "sdpa_cudnn", "sdpa_flash", "fa4"
STEP = "forward_and_backward_ms"
LONG = 131072
NAMES = {LONG: "131,072", 32768: "32,768", 8192: "8,192"}


def ratios(rows: list[Row], ours: str, others: tuple[str, ...], key: str = "median_ms") -> list[float]:
    """How many times faster ``ours`` is than each of the others that were timed, in each row."""
    return [row[other][key] / row[ours][key] for row in rows for other in others if key in row.get(other, {})]


def peaked(rows: list[Row], seqlen: int, requested_slots: int) -> list[Row]:
    """Rows of the main shape for which that many retained slots were asked."""
    wanted = (16, 128, seqlen, requested_slots, 0)
    keys = ("num_heads", "head_dim", "seqlen", "requested_slots", "flat_heads")
    return [row for row in rows if tuple(row[key] for key in keys) == wanted]


def line(what: str, aim: float, measured: list[float]) -> list[str]:
    """The lowest of what was measured, and whether it is enough."""
    return [what, f"{aim:.2f}x", f"{min(measured):.2f}x", "holds" if min(measured) >= aim else "**below**"]


def targets() -> str:
    """Every target of the forward, a step of training, and the decode."""
    rows = operator_rows(*FORWARD)
    steps = operator_rows(*BACKWARD)
    decodes = results("decode_h200")["rows"]
    lines = [
        line(
            f"forward, {NAMES[seqlen]} tokens, about {slots:,} slots, over cuDNN",
            aim,
            ratios(peaked(rows, seqlen, slots), "mala_auto", (CUDNN,)),
        )
        for slots, aims in ((1000, (3.3, 2.3, 1.3)), (400, (4, 3, 1.5)))
        for seqlen, aim in zip(NAMES, aims, strict=True)
    ]
    lines.append(
        line(
            f"forward, {NAMES[LONG]} tokens, about 1,000 slots, over FlashAttention-4",
            2.8,
            ratios(peaked(rows, LONG, 1000), "mala_auto", (FA4,)),
        )
    )
    hard = [row for row in rows if share_flat(row) == 1 or row["seqlen"] < 2048]
    lines += [
        line("forward at tau = 0, over cuDNN", 0.85, ratios(rows, "mala_tau0", (CUDNN,))),
        line(
            "forward, flat or below 2,048 tokens, over torch's kernels",
            0.95,
            ratios(hard, "mala_auto", (CUDNN, FA2, "flex")),
        ),
        line("the same, over FlashAttention-4", 0.95, ratios(hard, "mala_auto", (FA4,))),
    ]
    lines += [
        line(
            f"forward and backward, {NAMES[LONG]} tokens, about {slots:,} slots, over cuDNN",
            aim,
            ratios(peaked(steps, LONG, slots), "mala_auto", (CUDNN,), STEP),
        )
        for slots, aim in ((400, 9), (1000, 7))
    ]
    for form, aim in (("two_pass", 1.7), ("mala_int8", 2.8)):
        for batch in (1, 8):
            some = [row for row in decodes if (row["batch"], row["context"]) == (batch, LONG) and not share_flat(row)]
            name = {"two_pass": "two passes", "mala_int8": "INT8 plane"}[form]
            lines.append(
                line(
                    f"decode, {batch} x {NAMES[LONG]}, {name}, over cuDNN and FlashAttention-2",
                    aim,
                    ratios(some, form, (CUDNN, FA2)),
                )
            )
    short = [row for row in decodes if row["context"] == 8192]
    lines += [
        line('decode at 8,192 tokens, "auto", over both', 0.97, ratios(short, "auto", (CUDNN, FA2))),
        line(
            'decode of flat inputs, "auto", over both',
            0.95,
            ratios([row for row in decodes if share_flat(row) == 1], "auto", (CUDNN, FA2)),
        ),
    ]
    return table(["", "aimed at", "lowest measured", ""], lines)

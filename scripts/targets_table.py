# SPDX-License-Identifier: Apache-2.0
"""The table of what the kernels were built to reach, beside the worst that was measured."""

from __future__ import annotations

from performance_rows import Row, operator_rows, share_flat
from performance_tables import BACKWARD
from stored_results import results, table

FORWARD = ("operator_h200", "operator_flat_h200", "operator_peers_h200")  # without FlashAttention-4 as dense kernel
WITH_FA4 = "operator_fa4_h200"
CUDNN, FA2, FA4 = "sdpa_cudnn", "sdpa_flash", "fa4"
STEP = "forward_and_backward_ms"
LONG, MIDDLE, SHORT = 131072, 32768, 8192


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


def forwards() -> list[list[str]]:
    """Peaked inputs by length and retained slots, then those in which little can be skipped."""
    rows = operator_rows(*FORWARD)
    aims = {1000: {LONG: 3.3, MIDDLE: 2.3, SHORT: 1.3}, 400: {LONG: 4, MIDDLE: 3, SHORT: 1.5}}
    lines = [
        line(
            f"forward, {seqlen:,} tokens, about {slots:,} slots, over cuDNN",
            aim,
            ratios(peaked(rows, seqlen, slots), "mala_auto", (CUDNN,)),
        )
        for slots, by_length in aims.items()
        for seqlen, aim in by_length.items()
    ]
    hard = [row for row in rows if share_flat(row) == 1 or row["seqlen"] < 2048]
    over_fa4 = f"forward, {LONG:,} tokens, about 1,000 slots, over FlashAttention-4"
    return [
        *lines,
        line(over_fa4, 2.8, ratios(peaked(rows, LONG, 1000), "mala_auto", (FA4,))),
        line("forward at tau = 0, over cuDNN", 0.85, ratios(rows, "mala_tau0", (CUDNN,))),
        line(
            "forward, flat or below 2,048 tokens, over torch's kernels",
            0.95,
            ratios(hard, "mala_auto", (CUDNN, FA2, "flex")),
        ),
        line("the same, over FlashAttention-4, which MALA does not use there", 0.95, ratios(hard, "mala_auto", (FA4,))),
        line(
            "forward, flat, 512 to 2,048 tokens, over FlashAttention-4, which MALA uses there",
            0.95,
            ratios(operator_rows(WITH_FA4), "mala_auto", (FA4,)),
        ),
    ]


def steps() -> list[list[str]]:
    """A forward and a backward at length."""
    rows = operator_rows(*BACKWARD)
    return [
        line(
            f"forward and backward, {LONG:,} tokens, about {slots:,} slots, over cuDNN",
            aim,
            ratios(peaked(rows, LONG, slots), "mala_auto", (CUDNN,), STEP),
        )
        for slots, aim in ((400, 9), (1000, 7))
    ]


def decodes() -> list[list[str]]:
    """Both forms at length, then the default where it can gain little."""
    rows = results("decode_h200")["rows"]
    lines = []
    for form, name, aim in (("two_pass", "two passes", 1.7), ("mala_int8", "INT8 plane", 2.8)):
        for batch in (1, 8):
            some = [row for row in rows if (row["batch"], row["context"]) == (batch, LONG) and not share_flat(row)]
            what = f"decode, {batch} x {LONG:,}, {name}, over cuDNN and FlashAttention-2"
            lines.append(line(what, aim, ratios(some, form, (CUDNN, FA2))))
    short = [row for row in rows if row["context"] == SHORT]
    flat = [row for row in rows if share_flat(row) == 1]
    return [
        *lines,
        line(f'decode at {SHORT:,} tokens, "auto", over both', 0.97, ratios(short, "auto", (CUDNN, FA2))),
        line('decode of flat inputs, "auto", over both', 0.95, ratios(flat, "auto", (CUDNN, FA2))),
    ]


def targets() -> str:
    """Every target of the forward, a step of training, and the decode."""
    return table(["", "aimed at", "lowest measured", ""], [*forwards(), *steps(), *decodes()])

# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of the studies that compare methods, associative recall and the operator at 128K; the paper's figures first."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from curves_figure import Axis, curves_svg
from stored_results import table
from study_results import Row, runs

NAMES = {"full": "full attention", "mala": "MALA", "moba": "MoBA", "dsa": "DSA", "nsa": "NSA"}
PAPER_RECALL = {
    "full": 89.97,
    "mala": 89.67,
    "moba": 47.25,
    "dsa": 52.61,
    "nsa": 22.61,
}  # at 8,192 tokens and a width of 512
OPERATOR_NAMES = NAMES | {"nsa_package": "NSA, flash-linear-attention"}
MIB = 2**20
COUNTS = (("key_slots_per_query", 1.0, 0), ("forward_flops", 1e12, 2))


def chosen(rows: Sequence[Row], **values: Any) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def accuracies(rows: Sequence[Row]) -> str:
    """Mean over seeds in per cent, and their range where there are several."""
    found = [100 * row["accuracy"] for row in rows]
    if len(found) < 2:
        return "".join(f"{one:.1f}" for one in found)
    return f"{fmean(found):.1f} ({min(found):.1f} to {max(found):.1f})"


def places(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Lengths and widths that were run."""
    return sorted({(row["seqlen"], row["d_model"]) for row in rows})


def recall() -> str:
    """Study 3: accuracy of every method by length and width, the slots of MALA and the seeds."""
    header = ["", "tokens", "width", *NAMES.values(), "MALA's slots per query", "of visible", "ceiling", "seeds"]
    paper = ["paper", "8,192", "512", *(f"{PAPER_RECALL[name]:.2f}" for name in NAMES), "", "", "1,024", ""]
    lines, titles = [paper], []
    for found in runs("recall").values():
        recipe = found["recipe"]
        titles.append(
            f"{found['gpu']}, torch {found['versions']['torch']}: {recipe['pairs']} pairs, a vocabulary of {recipe['vocab_size']:,}; "
            f"{recipe['short_steps']} steps of {recipe['short_tokens']:,} tokens on shorter tasks, then {recipe['steps']} on "
            f"{recipe['batch']} sequences of the length; tested on {recipe['test_sequences'] * recipe['pairs']:,} queries."
            + "".join(f" Failed: {name} ({why})." for name, why in found.get("failed", {}).items())
        )
        for seqlen, width in places(found["rows"]):
            rows = chosen(found["rows"], seqlen=seqlen, d_model=width)
            slots = [row["key_slots_per_query"] for row in chosen(rows, method="mala")]
            lines.append(
                [
                    found["gpu"],
                    f"{seqlen:,}",
                    str(width),
                    *(accuracies(chosen(rows, method=name)) for name in NAMES),
                    *(
                        [f"{fmean(slots):,.0f}", f"{100 * fmean(slots) / ((seqlen + 1) / 2):.0f} %"]
                        if slots
                        else ["", ""]
                    ),
                    f"{recipe['ceiling']:,}",
                    str(max(len(chosen(rows, method=name)) for name in NAMES)),
                ]
            )
    return "\n".join(["\n\n".join([*titles, table(header, lines)])])


def curves_of(rows: Sequence[Row], by: str, **fixed: int) -> dict[str, list[tuple[float, float]]]:
    """For each method, and for the best and the worst seed where there are several, accuracy in per cent by ``by``."""
    curves = {}
    for name, label in NAMES.items():
        groups: dict[int, list[float]] = {}
        for row in chosen(rows, method=name, **fixed):
            groups.setdefault(row[by], []).append(100 * row["accuracy"])
        if groups:
            curves[label] = [(float(at), fmean(values)) for at, values in groups.items()]
    return curves


def recall_figures() -> dict[str, str]:
    """Accuracy by length for every width and by width for every length, where there are at least two points."""
    figures = {}
    for suffix, found in runs("recall").items():
        rows = found["rows"]
        for by, other, x_axis, title in (
            ("seqlen", "d_model", Axis("tokens", is_log=True), "width {}"),
            ("d_model", "seqlen", Axis("width", is_log=True), "{:,} tokens"),
        ):
            for value in sorted({row[other] for row in rows}):
                curves = curves_of(rows, by, **{other: value})
                if max(len(points) for points in curves.values()) > 1:
                    label = f"accuracy in per cent, mean over seeds, {title.format(value)}"
                    figures[f"recall_{suffix}_{other}_{value}"] = curves_svg(label, x_axis, Axis(), curves)
    return figures


def figure_links() -> str:
    """The figures, as the page shows them."""
    return "\n".join(f"![accuracy by {name.split('_')[-2]}](studies/{name}.svg)" for name in recall_figures())


def recall_and_figures() -> str:
    """The table, and the figures under it."""
    return "\n".join(part for part in (recall(), figure_links()) if part) + "\n"


def speedup(dense: Row, found: Row, part: str) -> str:
    """How many times faster than full attention in the same run."""
    return f"{dense[part]['median_ms'] / found[part]['median_ms']:.2f}x"


def operator() -> str:
    """Study 4: times and memory of every method, and how often MALA's speed that is."""
    parts = ("forward", "backward", "decode")
    header = [
        "", "method", "slots per query", "forward, TFLOP", *(f"{part}, ms" for part in parts), *(f"{part}, speedup" for part in parts),
        "forward, peak MiB", "step, peak MiB", "implementation",
    ]  # fmt: skip
    times = ["", "", "", "2.2x", "3.0x", "1.6x"]
    paper = ["paper, 8 H100, 128K", "MALA", "about 1,024", "", *times, "as full attention", "", ""]
    lines, titles = [paper], []
    for found in runs("operator").values():
        titles.append(
            f"{found['gpu']}, torch {found['versions']['torch']}: {found['seqlen']:,} tokens, {found['num_heads']} query heads on "
            f"{found['num_kv_heads']} KV heads of {found['head_dim']}, DSA with {found['index_heads']} index heads of "
            f"{found['index_dim']}; MALA retains {found['mala_decode_key_slots_per_query']:,.0f} slots in decode."
        )
        for name, label in OPERATOR_NAMES.items():
            one = found.get(name)
            if one is None:
                continue
            memory = (one.get(key) for key in ("forward_peak_bytes", "step_peak_bytes"))
            lines.append(
                [
                    found["gpu"],
                    label,
                    *(f"{one[key] / scale:,.{digits}f}" if key in one else "" for key, scale, digits in COUNTS),
                    *(f"{one[part]['median_ms']:,.3f}" if part in one else "" for part in parts),
                    *(speedup(found["full"], one, part) if part in one else "" for part in parts),
                    *("" if peak is None else f"{peak / MIB:,.0f}" for peak in memory),
                    one.get("failed", one.get("implementation")),
                ]
            )
    return "\n\n".join([*titles, table(header, lines)])


METHOD_STUDY_TABLES = {"study_recall": recall_and_figures, "study_operator": operator}

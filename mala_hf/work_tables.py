# SPDX-License-Identifier: Apache-2.0
"""The results of ``mala-hf work`` as rows of texts and as sentences."""

from __future__ import annotations

import statistics
from typing import Any

Row = dict[str, Any]


def percent(fraction: float, digits: int = 3) -> str:
    """Format a fraction in percent with so many significant digits, without the sign."""
    return f"{100 * fraction:.{digits}g}"


def omitted_measure(result: Row) -> tuple[str, str]:
    """Return the name of the omitted mass that was measured, and what to call it."""
    return ("omitted_mass", "omitted mass") if result["audit"] else ("omitted_mass_bound", "omitted mass, bound")


def gradient_measures(result: Row) -> list[tuple[str, str]]:
    """Return the names of the gradients' errors that were measured, and what to call them."""
    layer = result["runs"][0]["layers"][0]
    return [(f"{name}_error", f"d{name[1].upper()} error") for name in ("dq", "dk", "dv") if f"{name}_error" in layer]


def plain_words(result: Row) -> list[str]:
    """Say what the numbers mean, a sentence or two for each tau."""
    lines = []
    for run in result["runs"][1:]:
        found, name = run["summary"], omitted_measure(result)
        lowest = found["min_head"]
        lines.append(
            f"At tau {run['tau']:g} MALA keeps {percent(found['work_fraction'])} % of the work that follows the scores: "
            f"{found['key_slots_per_query']:.0f} of {found['visible_slots_per_query']:.0f} key slots per query; least in layer "
            f"{lowest['layer']}, head {lowest['head']}: {percent(found['work_fraction_min_head'])} %. Mean {name[1]} "
            f"{percent(found[name[0] + '_mean'])} %, mean output error {percent(found['output_error_mean'])} % "
            f"(rounding alone: {percent(result['runs'][0]['summary']['output_error_mean'])} %)."
        )
    return lines


def break_even_words(result: Row) -> str:
    """Say what the estimate is, and what it is not."""
    share = result["runs"][0]["layers"][0]["break_even"]["post_score_share_of_full"]
    return (
        "* An estimate from counted multiply-adds, no measurement: score discovery is counted in full; softmax, memory traffic and "
        f"launches are not counted. Of full attention's operations {percent(share)} % follow the scores, and no more than those can "
        "be saved. Break-even: how many times as long as the full-attention kernel MALA's may take for an operation until nothing "
        "is gained."
    )


def summary_rows(result: Row) -> tuple[list[str], list[list[str]]]:
    """Return headings and one row of texts for each measure, a column for each tau, 0 first; shares, masses and errors in percent.

    Means over heads, but for those of one head. Rows with a star are the estimate that ``break_even_words`` explains.
    """
    name, label = omitted_measure(result)
    runs = [run["summary"] for run in result["runs"]]

    def row(measure: str, key: str, pattern: str = "") -> list[str]:
        return [measure, *(pattern.format(run[key]) if pattern else percent(run[key]) for run in runs)]

    rows = [
        row("key slots per query", "key_slots_per_query", pattern="{:.0f}"),
        row("  of visible", "visible_slots_per_query", pattern="{:.0f}"),
        row("work", "work_fraction"),
        row("  of the lowest head", "work_fraction_min_head"),
        row("  of the highest head", "work_fraction_max_head"),
        row(label, f"{name}_mean"),
        row("  P95 of the worst head", f"{name}_p95_worst_head"),
        row("output error", "output_error_mean"),
        row("  P95 of the worst head", "output_error_p95_worst_head"),
    ]
    for key, gradient in gradient_measures(result):
        rows += [row(gradient, f"{key}_mean"), row("  of the worst head", f"{key}_worst_head")]
    rows += [
        row("operations after the scores *", "post_score_share"),
        row("operations, MALA / full *", "operations_fraction"),
        row("break-even *", "break_even_overhead", pattern="{:.3f}x"),
    ]
    return ["measure", *(f"tau {run['tau']:g}" for run in result["runs"])], rows


def layer_rows(result: Row) -> tuple[list[str], list[list[str]]]:
    """Return headings and one row of texts for each layer at the first tau but 0: means over heads, errors and masses in percent."""
    name, _ = omitted_measure(result)
    gradients = gradient_measures(result)
    headings = ["layer", "slots", "work", "low (head)", "omitted" if result["audit"] else "bound", "output"]
    headings += [label.split()[0] for _, label in gradients]
    rows = []
    for layer in result["runs"][1]["layers"]:
        work = layer["work_fraction"]
        lowest = f"{percent(min(work))} ({work.index(min(work))})"
        slots, share = statistics.fmean(layer["key_slots_per_query"]), percent(statistics.fmean(work))
        measures = (f"{name}_mean", "output_error_mean", *(key for key, _ in gradients))
        errors = [percent(statistics.fmean(layer[key]), 2) for key in measures]
        rows.append([str(layer["layer"]), f"{slots:.0f}", share, lowest, *errors])
    return headings, rows


def head_rows(result: Row) -> tuple[list[str], list[list[str]]]:
    """Return headings and one row of texts for each tau but 0, layer and head."""
    headings = ["tau", "layer", "head", "slots", "of", "work %", "bound %", "bound P95", "output error %", "P95"]
    measures = [
        "work_fraction",
        "omitted_mass_bound_mean",
        "omitted_mass_bound_p95",
        "output_error_mean",
        "output_error_p95",
    ]
    if result["audit"]:
        headings[6:6] = ["omitted %", "omitted P95"]
        measures[1:1] = ["omitted_mass_mean", "omitted_mass_p95"]
    gradients = gradient_measures(result)
    headings += [f"{label} %" for _, label in gradients]
    rows = []
    for run in result["runs"][1:]:
        for layer in run["layers"]:
            heads = len(layer["work_fraction"])
            for head in range(heads):
                slots, visible = (layer[f"{kind}_slots_per_query"][head] for kind in ("key", "visible"))
                row = [f"{run['tau']:g}", str(layer["layer"]), str(head), f"{slots:.1f}", f"{visible:.1f}"]
                row += [percent(layer[name][head]) for name in measures]
                # dk and dv belong to a group of query heads
                row += [percent(layer[key][head * len(layer[key]) // heads]) for key, _ in gradients]
                rows.append(row)
    return headings, rows

# SPDX-License-Identifier: Apache-2.0
"""Figures of the studies of matched work, operator fidelity and open questions, by the name of their files."""

from __future__ import annotations

from collections.abc import Sequence

from curves_figure import Axis, curves_svg
from study_results import Row, averaged, runs
from study_tables import NAMES, perplexity_change

LOG = Axis(is_log=True)


def allocation_figures() -> dict[str, str]:
    """Study 1, the longest length of each run: omitted mass and output error by work."""
    figures = {}
    for suffix, found in runs("allocation").items():
        longest = max(row["length"] for row in found["rows"])
        rows = averaged([row for row in found["rows"] if row["length"] == longest], ("tau", "allocation"))
        x_axis = Axis(f"key slots per query, {longest:,} tokens")
        for name, label in (("omitted_mass", "mean omitted mass"), ("output_error", "mean output error")):
            curves = {
                NAMES[one]: [
                    (row["key_slots_per_query"], row[f"{name}_mean"]) for row in rows if row["allocation"] == one
                ]
                for one in NAMES
            }
            figures[f"allocation_{suffix}_{name}"] = curves_svg(label, x_axis, LOG, curves)
    return figures


def fidelity_figures() -> dict[str, str]:
    """Study 2, tau 1: slots per query and errors by length."""
    figures = {}
    for suffix, found in runs("fidelity").items():
        rows = averaged([row for row in found["rows"] if row["dtype"] == "float32" and row["tau"] == 1], ("length",))
        x_axis = Axis("tokens", is_log=True)
        slots = {
            "visible": "visible_slots_per_query",
            "forward": "key_slots_per_query",
            "backward": "backward_slots_per_query",
        }
        figures[f"fidelity_{suffix}_work"] = curves_svg(
            "post-score key slots per query, tau 1", x_axis, LOG, by_length(rows, slots)
        )
        means = {
            "omitted mass": "omitted_mass_mean",
            "omitted mass, P95": "omitted_mass_p95",
            "output": "output_error_mean",
        }
        means |= {name: f"{name.lower()}_error_mean" for name in ("dQ", "dK", "dV")}
        figures[f"fidelity_{suffix}_errors"] = curves_svg(
            "omitted mass, errors of output and gradients, float32, tau 1",
            x_axis,
            LOG,
            by_length(rows, means),
        )
    return figures


def by_length(rows: Sequence[Row], names: dict[str, str]) -> dict[str, list[tuple[float, float]]]:
    """A curve for each name."""
    return {label: [(row["length"], row[name]) for row in rows] for label, name in names.items()}


def open_question_figures() -> dict[str, str]:
    """Study 7: by work, omitted mass, output error, KL and the change of perplexity."""
    figures = {}
    for suffix, found in runs("open_questions").items():
        rows = averaged([row for row in found["rows"] if row["variant"] != "decode"], ("variant", "setting"))
        x_axis = Axis(f"share of post-score work, {found['length']:,} tokens")
        for name, label in (
            ("omitted_mass", "mean omitted mass"),
            ("output_error", "mean output error"),
            ("kl", "mean KL divergence from full attention's predictions, nats"),
            ("perplexity", "size of the relative change of perplexity"),
        ):
            curves: dict[str, list[tuple[float, float]]] = {}
            for row in rows:
                value = abs(perplexity_change(row)) if name == "perplexity" else row[f"{name}_mean"]
                curves.setdefault(row["variant"], []).append((row["work_fraction"], value))
            figures[f"open_questions_{suffix}_{name}"] = curves_svg(label, x_axis, LOG, curves)
    return figures


def study_figures() -> dict[str, str]:
    """Every figure."""
    return allocation_figures() | fidelity_figures() | open_question_figures()

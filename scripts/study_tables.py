# SPDX-License-Identifier: Apache-2.0
"""Tables of the studies of matched work, operator fidelity and open questions, the paper's figures first."""

from __future__ import annotations

from stored_results import table
from study_results import Row, averaged, percent, runs, title

NAMES = {
    "position": "position only",
    "layer_head_position": "layer, head, position",
    "oracle": "reference-mass oracle",
    "mala": "MALA",
}
# the paper's, in per cent: mean and P95 of omitted mass, and of the relative L2 distance of outputs; None where it gives none
PAPER_ALLOCATION = {
    "position": (0.6012, 0.9923, 0.6231, 4.237),
    "layer_head_position": (0.1721, 0.6247, 0.2817, 0.9237),
    "oracle": (0.0182, None, 0.0164, None),
    "mala": (0.0188, None, 0.0174, None),
}
ERRORS = ("omitted_mass", "output_error")


def allocation() -> str:
    """Study 1: the same work, allocated in four ways."""
    header = [
        "",
        "tokens",
        "tau",
        "slots per query",
        "work",
        "allocation",
        "omitted mass, %",
        "P95",
        "output error, %",
        "P95",
    ]
    lines = [
        [
            "paper, 14B",
            "8,192",
            "1",
            "about 1,024",
            "",
            NAMES[name],
            *("" if x is None else f"{x:.4f}" for x in numbers),
        ]
        for name, numbers in PAPER_ALLOCATION.items()
    ]
    titles = []
    for found in runs("allocation").values():
        titles.append(title(found))
        for row in averaged(found["rows"], ("length", "tau", "allocation")):
            lines.append(
                [
                    found["model"],
                    f"{row['length']:,}",
                    f"{row['tau']:g}",
                    *work(row),
                    NAMES[row["allocation"]],
                    *errors(row),
                ]
            )
    return table(header, lines) + measured_on(titles) + pictures("allocation", "omitted_mass", "output_error")


def measured_on(titles: list[str]) -> str:
    """Each of them once, as paragraphs."""
    return "".join(f"\n{one}\n" for one in dict.fromkeys(titles))


def pictures(study: str, *names: str) -> str:
    """The figures of every run of a study, as Markdown."""
    return "".join(f"\n![{name}](studies/{study}_{suffix}_{name}.svg)\n" for suffix in runs(study) for name in names)


def work(row: Row) -> list[str]:
    """Slots per query and their share of the visible ones."""
    return [f"{row['key_slots_per_query']:,.0f}", f"{100 * row['work_fraction']:.1f} %"]


def errors(row: Row) -> list[str]:
    """Mean and P95 of omitted mass and output error, in per cent."""
    return [percent(row[f"{name}_{key}"]) for name in ERRORS for key in ("mean", "p95")]


def fidelity() -> str:
    """Study 2: work and errors by length, in each precision."""
    header = [
        "", "tokens", "tau", "forward slots", "work", "backward slots", "omitted mass, %", "P95", "output error, %", "P95",
        "dQ, %", "P95", "dK, %", "P95", "dV, %", "P95", "attention FLOPs", "support saved",
    ]  # fmt: skip
    lines = [
        ["paper, 14B", "1K to 32K", "1", "470 to 1,066", "", "462 to 1,058", "at most 0.0062", "0.032", "at most 0.021", "0.14",
         "0.38", "0.90", "0.35", "0.66", "0.17", "0.23", "", ""]
    ]  # fmt: skip
    titles = []
    for found in runs("fidelity").values():
        titles.append(title(found))
        for row in averaged(found["rows"], ("dtype", "length", "tau")):
            name = f"{found['model']}, {row['dtype']}" + (f", YaRN {row['yarn']:g}" if row["yarn"] else "")
            gradients = [percent(row[f"{one}_error_{key}"], 3) for one in ("dq", "dk", "dv") for key in ("mean", "p95")]
            flops = [f"{100 * row[one]:.1f} %" for one in ("flops_fraction", "flops_fraction_saved")]
            slots = [*work(row), f"{row['backward_slots_per_query']:,.0f}"]
            lines.append([name, f"{row['length']:,}", f"{row['tau']:g}", *slots, *errors(row), *gradients, *flops])
    return table(header, lines) + measured_on(titles) + pictures("fidelity", "work", "errors")


def settings_of(row: Row) -> str:
    """What a variant's number is."""
    if row["variant"] == "certified":
        return f"bound {100 * row['setting']:g} %"
    return f"step {row['setting']:g}" if row["variant"].startswith("tau by") else f"tau {row['setting']:g}"


def variants() -> str:
    """Study 7: every variant at every setting."""
    header = [
        "variant", "setting", "tile", "work", "omitted mass, %", "P95", "certified, %", "P95", "output error, %", "P95", "KL, nats",
        "same top-1", "perplexity, change",
    ]  # fmt: skip
    blocks = []
    for found in runs("open_questions").values():
        rows = [row for row in found["rows"] if row["variant"] != "decode"]
        lines = [
            [
                row["variant"],
                settings_of(row),
                "x".join(map(str, row["tile"])),
                f"{100 * row['work_fraction']:.1f} %",
                *errors_of_variant(row),
                f"{row['kl_mean']:.1e}",
                f"{100 * row['top1_agreement']:.2f} %",
                f"{100 * perplexity_change(row):+.4f} %",
            ]
            for row in averaged(rows, ("variant", "setting"))
        ]
        blocks.append(f"{title(found)} {found['length']:,} tokens.\n\n{table(header, lines)}")
    return "\n".join(blocks) + pictures("open_questions", "omitted_mass", "output_error", "kl", "perplexity")


def errors_of_variant(row: Row) -> list[str]:
    """Omitted mass, its certificate and output error."""
    names = ("omitted_mass", "omitted_mass_bound", "output_error")
    return [percent(row[f"{name}_{key}"]) for name in names for key in ("mean", "p95")]


def perplexity_change(row: Row) -> float:
    """Difference of likelihoods in nats: for small ones the share by which perplexity changes."""
    return row["nll"] - row["nll_full"]


def decode_forms() -> str:
    """Study 7: the forms of a decode's test."""
    header = ["form", "splits", "tau", "work", "omitted mass, %", "P95", "output error, %", "P95"]
    blocks = []
    for found in runs("open_questions").values():
        rows = [row for row in found["rows"] if row["variant"] == "decode"]
        lines = [
            [
                row["form"],
                str(row["splits"] or ""),
                f"{row['tau']:g}",
                f"{100 * row['work_fraction']:.1f} %",
                *errors(row),
            ]
            for row in averaged(rows, ("tau", "form", "splits"))
        ]
        blocks.append(
            f"{title(found)} Contexts of {found['length'] // 2:,} to {found['length']:,} tokens.\n\n{table(header, lines)}"
        )
    return "\n".join(blocks)


STUDY_TABLES = {
    "study_allocation": allocation,
    "study_fidelity": fidelity,
    "study_variants": variants,
    "study_decode_forms": decode_forms,
}

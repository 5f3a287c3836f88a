# SPDX-License-Identifier: Apache-2.0
"""The evidence of a conversion as ``report.json``, ``report.md``, pictures, and a section of the model card; from its numbers alone."""

from __future__ import annotations

import json
from typing import Any

from .heat_map import ERRORS, heat_map
from .work_tables import percent

FOLDER = "mala"  # in the converted checkpoint
BEGIN, END = "<!-- mala-hf: begin -->", "<!-- mala-hf: end -->"
Report = dict[str, Any]
Rows = list[tuple[str, str, str]]


def report_files(report: Report) -> dict[str, str]:
    """Return the report's files by their names in the checkpoint."""
    pictures = pictures_of(report)
    texts = {"report.json": json.dumps(report) + "\n", "report.md": report_page(report, list(pictures))}
    return {f"{FOLDER}/{name}": text for name, text in (texts | pictures).items()}


def pictures_of(report: Report) -> dict[str, str]:
    """Draw, as SVG, the work and the output error of every head, and what the search saw if there was one."""
    layers = report["work"]["layers"]
    names = [layer["layer"] for layer in layers]
    drawn = {
        "work.svg": heat_map(
            [layer["work_fraction"] for layer in layers],
            title="post-score work with the saved settings",
            alt="share of the post-score work that each layer and query head keeps",
            x_label="query head",
            y_label="layer",
            row_names=names,
        ),
        "output_error.svg": heat_map(
            [layer["output_error_mean"] for layer in layers],
            title="output error with the saved settings",
            alt="mean relative output error of each layer and query head",
            x_label="query head",
            y_label="layer",
            row_names=names,
            scale=ERRORS,
        ),
    }
    if report["search"]:
        ladder = report["search"]["ladder"]
        taus = ", ".join(f"{run['tau']:g}" for run in ladder)
        drawn["search.svg"] = heat_map(
            [[run["layers"][row]["work_fraction"] for run in ladder] for row in range(len(ladder[0]["layers"]))],
            title=f"work of each layer at tau {taus}",
            alt=f"share of the post-score work of each layer at tau {taus}",
            x_label="place on the ladder of taus",
            y_label="layer",
            row_names=[layer["layer"] for layer in ladder[0]["layers"]],
        )
    return {name: svg + "\n" for name, svg in drawn.items()}


def before_and_after(report: Report) -> Rows:
    """Return the measures as rows of texts: what is measured, full attention, MALA."""
    before, after = report["perplexity"]
    work, time = report["work"]["summary"], report["time"]
    difference = after["difference"]
    interval = "" if difference["low"] is None else f" [{difference['low']:+.1e}, {difference['high']:+.1e}]"
    rows = [
        ("perplexity", f"{before['ppl']:.4f}", f"{after['ppl']:.4f}"),
        ("increase, nats per token [95 %]", "", f"{difference['mean']:+.1e}{interval}"),
        ("KL divergence, nats: mean / max", "", f"{after['kl_mean']:.1e} / {after['kl_max']:.1e}"),
        ("same most likely token, %", "", f"{100 * after['top1_agreement']:.2f}"),
        ("post-score work, %", "100", percent(work["work_fraction"])),
        ("  of the lowest head, %", "100", percent(work["work_fraction_min_head"])),
        ("key slots per query", f"{work['visible_slots_per_query']:.0f}", f"{work['key_slots_per_query']:.0f}"),
        ("omitted mass, %", "0", percent(work["omitted_mass_mean"])),
        ("  P95 of the worst head, %", "0", percent(work["omitted_mass_p95_worst_head"])),
        ("output error, %", percent(report["work"]["rounding"]), percent(work["output_error_mean"])),
    ]
    for name, label in (("prefill", "prefill, s"), ("generate", f"{time['new_tokens']} new tokens, s")):
        seconds = time[f"{name}_seconds"]
        rows.append((label, f"{seconds['full']:.3g}", f"{seconds['mala']:.3g}"))
    if report["ruler"]:
        rows += _ruler_rows(report["ruler"])
    return rows


def _ruler_rows(ruler: dict[str, Any]) -> Rows:
    tasks: dict[str, list[str]] = {}
    for row in ruler["tasks"]:
        tasks.setdefault(row["task"], []).append(f"{row['score']:.1f}")
    means = [row for row in ruler["lengths"] if row["length"] is None]
    rows = [("RULER, mean score", *(f"{row['score']:.1f}" for row in means))]
    rows += [(f"  {task}", *scores) for task, scores in tasks.items()]
    rows.append(("  same answers, %", "", f"{100 * means[1]['same_answers']:.0f}"))
    return rows  # type: ignore[return-value]


def settings_words(report: Report) -> str:
    """Say what the saved settings are, layers with the same setting together."""
    mala = report["settings"]
    layers: dict[str, list[str]] = {}
    for layer, setting in mala.get("layers", {}).items():
        words = f"tau {setting:g}" if isinstance(setting, (int, float)) else json.dumps(setting).strip('"')
        layers.setdefault(words, []).append(layer)
    others = [f"{words} in {', '.join(names)}" for words, names in layers.items()]
    return f"tau {mala['tau']:g}" + (f", but by layer {'; '.join(others)}" if others else "")


def search_words(report: Report) -> str:
    """Say what the search was allowed, chose and bought; nothing where there was none."""
    search = report["search"]
    if not search:
        return ""
    limits = {
        "nats per token": search["max_ppl_increase"],
        "omitted mass in any layer": search["max_omitted_mass"],
    }
    allowed = " and ".join(f"at most {limit:g} {name}" for name, limit in limits.items() if limit is not None)
    chosen_on, verified_on = (f"{increase:+.1e}" for increase in search["increases"])
    return (
        f"The taus were chosen for {allowed}. On the part of the text that they were chosen on, they keep "
        f"{percent(search['work']['work_fraction'])} % of the post-score work (tau 1 in all layers: "
        f"{percent(search['work_at_tau_1']['work_fraction'])} %) and add {chosen_on} nats per token; on the table's part, to verify "
        f"that, {verified_on}. {len(search['trials'])} measurements of perplexity."
    )


def _table(report: Report) -> str:
    rows = [f"| {name.strip()} | {before} | {after} |" for name, before, after in before_and_after(report)]
    return "\n".join(["| | full attention | MALA |", "|---|---:|---:|", *rows])


def measured_on(report: Report) -> str:
    """Say on what, where and how it was measured."""
    return (
        f"{report['windows']} windows of {report['length']:,} tokens of {report['text']}; {report['dtype']}, {report['device']}, by "
        f"{report['impl']}, tiles of {' x '.join(map(str, report['tile']))}. Work and errors are of the first window, in each layer on "
        "the inputs that full attention gives it; the output error of full attention "
        f"(Transformers' {report['full_attention']}) is rounding."
    )


def report_page(report: Report, pictures: list[str]) -> str:
    """Return ``report.md``."""
    parts = [
        f"# {report['model']}: full attention and MALA",
        f"Settings: {settings_words(report)}.",
        _table(report),
        measured_on(report),
    ]
    if report["ruler"]:
        parts.append(
            "RULER's samples here are few and made of texts that ship with mala-hf: they compare the two attentions, and are not "
            "comparable with published scores."
        )
    parts += [search_words(report)] if report["search"] else []
    parts.append(" ".join(f"![{name.removesuffix('.svg').replace('_', ' ')}]({name})" for name in pictures))
    made = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    return "\n\n".join([*parts, f"Made with {made}. All numbers: [report.json](report.json)."]) + "\n"


def card_with_section(card: str | None, report: Report, argument: str) -> str:
    """Return the model card with one section about MALA at its end, in place of an earlier one; a new card where there is none.

    argument: of ``from_pretrained``, so that it runs MALA.
    """
    imports = [] if argument.startswith("trust") else ['import mala_hf  # pip install mala-hf; registers "mala"']
    code = [
        *imports,
        "from transformers import AutoModelForCausalLM",
        "",
        f"model = AutoModelForCausalLM.from_pretrained(folder_or_name, {argument})",
    ]
    how = "\n".join(["```python", *code, "```"])
    after = report["perplexity"][1]
    section = "\n\n".join(
        [
            BEGIN + "\n## MassAlloc Attention (MALA)",
            f"The weights are those of {report['model']}, unchanged. `config.json` has settings for MALA ({settings_words(report)}):",
            how,
            "Where mala-hf is not used, the checkpoint loads as before and runs full attention.",
            f"At {report['length']:,} tokens MALA keeps {percent(report['work']['summary']['work_fraction'])} % of the work after "
            f"the scores, and perplexity goes from {report['perplexity'][0]['ppl']:.4f} to {after['ppl']:.4f}. Every score is still "
            f"computed. [Before and after, in full]({FOLDER}/report.md).",
            END,
        ]
    )
    if card is None:
        return f"# {report['model']}\n\n{section}\n"
    before, found, rest = card.partition(BEGIN)
    if found and END in rest:
        return before + section + rest.partition(END)[2]
    return f"{card.rstrip()}\n\n{section}\n"

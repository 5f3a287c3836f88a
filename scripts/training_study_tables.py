# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of the studies that train or evaluate whole models: scaling, model level, concentration."""

from __future__ import annotations

import math
from typing import Any

from curves_figure import Axis, curves_svg
from stored_results import table
from study_results import runs

Found = dict[str, Any]
# the paper's: knowledge, reasoning, RULER at 32K, RULER at 128K with YaRN; None where it gives none
PAPER_MODEL = {
    "14B, full attention": (72.32, 64.46, 89.42, 65.84),
    "14B, MALA": (72.48, 64.66, 89.45, 65.75),
    "14B, MoBA": (70.01, 58.07, 86.85, 60.17),
    "14B, DSA": (70.11, 62.04, 87.59, 63.05),
    "32B, full attention": (75.62, 75.67, 92.70, 82.03),
    "32B, MALA": (75.75, 76.10, 92.71, 82.56),
}
PARTS = ("knowledge", "reasoning", "ruler_native", "ruler_yarn")


def where(found: Found) -> str:
    """Device and versions."""
    versions = found["versions"]
    return f"{found['device']}, torch {versions['torch']}, transformers {versions['transformers']}"


def percent(share: float | None) -> str:
    """One digit; nothing for None."""
    return "" if share is None else f"{100 * share:.1f} %"


def scaling() -> str:
    """Study 5: a table for each stored run."""
    return "\n".join(f"{scaling_title(found)}\n\n{scaling_table(found)}" for found in runs("scaling").values())


def scaling_title(found: Found) -> str:
    """What was trained on, and where."""
    stages = ", then ".join(f"{s['steps']} steps of {s['batch']} x {s['seqlen']:,}" for s in found["plan"]["stages"])
    tokens = found["data"]["tokens"]["train"]
    return f"{stages} tokens, out of {tokens / 1e6:.1f} million, {found['plan']['dtype']}; {where(found)}."


def scaling_table(found: Found) -> str:
    """A row for each run: final perplexities by length, on documents of the kind it saw, and its cost against full attention's."""
    lengths = [str(length) for length in found["plan"]["lengths"]]
    header = ["size", "attention", "parameters, M", *(f"perplexity, {int(n):,}" for n in lengths), "novel, longest"]
    header += ["training FLOPs", "of full attention's", "support saved", *(f"work, {int(n):,}" for n in lengths)]
    whole = [run for run in found["runs"] if run["final"] is not None]
    full = {run["size"]: run["training_flops"]["state_only"] for run in whole if run["attention"] == "sdpa"}
    rows = []
    for run in whole:
        final = run["final"]
        nll = [final["nll"][n] for n in lengths]
        flops, base = run["training_flops"], full.get(run["size"])
        shares = [
            None if base is None or name not in flops else flops[name] / base
            for name in ("state_only", "saved_support")
        ]
        rows.append(
            [
                run["size"],
                run["attention"],
                f"{run['parameters'] / 1e6:.1f}",
                *(f"{math.exp(one['held_out'][run['attention']]):.4f}" for one in nll),
                f"{math.exp(nll[-1]['novel'][run['attention']]):.3f}" if "novel" in nll[-1] else "",
                f"{flops['state_only']:.3e}",
                *map(percent, shares),
                *(percent(final["work"]["held_out"][n]["work_fraction"]) for n in lengths),
            ]
        )
    return table(header, rows)


def scaling_figures() -> dict[str, str]:
    """Work over training, and loss by FLOPs."""
    figures = {}
    for suffix, found in runs("scaling").items():
        work = {
            f"{run['size']}, {length:,} tokens": [(step, share) for step, seqlen, share in run["work"] if seqlen == length]
            for run in found["runs"] if run["attention"].startswith("mala")
            for length in dict.fromkeys(seqlen for _, seqlen, _ in run["work"])
        }  # fmt: skip
        if work:
            figures[f"scaling_{suffix}_work"] = curves_svg("share of post-score work, MALA", Axis("step"), Axis(), work)
        loss = {f"{run['size']} {run['attention']}": loss_by_flops(run) for run in found["runs"] if run["stages"]}
        figures[f"scaling_{suffix}_loss"] = curves_svg(
            "training loss, nats per token", Axis("training FLOPs, scores counted in full", True), Axis(), loss
        )
    return figures


def loss_by_flops(run: Found) -> list[tuple[float, float]]:
    """Losses of the measured steps; FLOPs grow by a stage's share with each of its steps."""
    points, done, cost = [], 0, 0.0
    for stage in run["stages"]:
        steps = stage["step"] - done
        each = (stage["training_flops"]["state_only"] - cost) / steps
        points += [
            (cost + each * (step - done + 1), loss) for step, loss in run["loss"] if done <= step < stage["step"]
        ]
        done, cost = stage["step"], stage["training_flops"]["state_only"]
    return points


def model_level() -> str:
    """Study 6: the paper's table, the paper's rows first."""
    header = ["model and attention", "knowledge", "reasoning", "RULER, native length", "RULER, YaRN"]
    rows = [[f"paper, {name}", *(f"{x:.2f}" for x in numbers)] for name, numbers in PAPER_MODEL.items()]
    titles = []
    for found in runs("model").values():
        rows += model_rows(found)
        titles.append(f"{found['model']}: {where(found)}; RULER at {found['native_length']:,} tokens, {found['ruler']['samples']} "
                      f"samples a task, corpora {found['ruler']['corpora']}.")  # fmt: skip
    return table(header, rows) + "".join(f"\n{line}\n" for line in titles)


def model_rows(found: Found) -> list[list[str]]:
    """A row for each attention of a stored run; a part that did not run stays empty."""
    rows = []
    for name, tau in found["implementations"]:
        cells = []
        for part in PARTS:
            scores = [
                r["score"] for r in found["rows"] if (r["part"], r["implementation"], r["tau"]) == (part, name, tau)
            ]
            cells.append(f"{sum(scores) / len(scores):.2f}" if scores else "")
        label = name if tau is None else f"{name}, tau {tau:g}"
        rows.append([f"{found['model']}, {label}", *cells])
    return rows


def concentrate() -> str:
    """Study 8: a table for each stored run."""
    return "\n".join(
        f"{concentrate_title(found)}\n\n{concentrate_table(found)}" for found in runs("concentrate").values()
    )


def concentrate_title(found: Found) -> str:
    """What was trained, and where."""
    plan, sources = found["plan"], found["data"]["sources"]
    return (
        f"{found['model']}, {plan['batch']} x {plan['seqlen']:,} tokens a step, rate {plan['learning_rate']:g}, {plan['dtype']}, on "
        f"{', '.join(sources['train'])}; {where(found)}."
    )


def concentrate_table(found: Found) -> str:
    """A row for each arm, at its last point."""
    texts = [name for name in found["data"]["sources"] if name != "train"]
    lengths = found["plan"]["work_lengths"]
    header = ["arm", "steps"]
    for text in texts:
        header += [f"{text}: perplexity", "read by MALA", *(f"work, {n:,}" for n in lengths)]
    header += ["RULER", "read by MALA"]
    rows = []
    for run in found["arms"]:
        point, cells = run["points"][-1], []
        for text in texts:
            cells += [f"{math.exp(point['nll'][text][name]):.3f}" for name in ("sdpa", "mala")]
            cells += [percent(point["work"][text][str(n)]["work_fraction"]) for n in lengths]
        rows.append([run["label"], str(point["step"]), *cells, *ruler_cells(run)])
    return table(header, rows)


def ruler_cells(run: Found) -> list[str]:
    """Mean score with full attention and with MALA; empty where it did not run."""
    if run["ruler"] is None:
        return ["", ""]
    scores = {row["implementation"]: row["score"] for row in run["ruler"]["lengths"] if row["length"] is not None}
    return [f"{scores[name]:.1f}" for name in ("sdpa", "mala")]


def concentrate_figures() -> dict[str, str]:
    """Of each text: perplexity by work at the longest length, a curve for each arm's training; and RULER by work."""
    figures = {}
    for suffix, found in runs("concentrate").items():
        texts = [name for name in found["data"]["sources"] if name != "train"]
        longest = max(found["plan"]["work_lengths"])
        x_axis = Axis(f"share of post-score work, {longest:,} tokens")
        for text in texts:
            curves = {
                run["label"]: [
                    (point["work"][text][str(longest)]["work_fraction"], math.exp(point["nll"][text]["sdpa"]))
                    for point in run["points"]
                ]
                for run in found["arms"]
            }
            figures[f"concentrate_{suffix}_{text}"] = curves_svg(f"perplexity of the {text}", x_axis, Axis(), curves)
        scores = {
            run["label"]: [
                (run["points"][-1]["work"][texts[0]][str(longest)]["work_fraction"], float(ruler_cells(run)[1]))
            ]
            for run in found["arms"] if run["ruler"] is not None
        }  # fmt: skip
        if scores:
            figures[f"concentrate_{suffix}_ruler"] = curves_svg("RULER, read by MALA", x_axis, Axis(), scores)
    return figures


TRAINING_STUDY_TABLES = {
    "study_scaling": scaling,
    "study_model": model_level,
    "study_concentrate": concentrate,
}


def training_study_figures() -> dict[str, str]:
    """Every figure."""
    return scaling_figures() | concentrate_figures()

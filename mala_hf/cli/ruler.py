# SPDX-License-Identifier: Apache-2.0
"""``mala-hf ruler``."""

from __future__ import annotations

import argparse
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .checks import check_place
from .options import add_command, add_evaluation_options, add_model_options, dtype_of, label, notice

RESULT, PICTURE = "ruler.json", "needles.png"
Rows = list[dict[str, Any]]


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = add_command(commands, "ruler", run, "the 13 tasks of RULER with each attention on the same samples")
    add_model_options(parser)
    add_evaluation_options(parser)
    parser.add_argument("--tasks", nargs="+", default=["all"], metavar="T", help="niah_single_1, ... (default: all)")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[1024, 2048, 4096],
        metavar="N",
        help="tokens of prompt and answer (default: 1024 2048 4096)",
    )
    parser.add_argument("--samples", type=int, default=20, metavar="N", help="of each task and length (default: 20)")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="of the samples (default: 42)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--chat-template", default="auto", metavar="WHEN", help="on, off or auto: where there is one")
    parser.add_argument(
        "--corpora", default="auto", metavar="FROM", help="hub, builtin, a folder or auto: hub if reached"
    )
    parser.add_argument("--prepare", action="store_true", help="only draw the samples and store them")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("ruler_results"),
        metavar="DIR",
        help="samples and answers, resumed (default: ruler_results)",
    )


def run(options: argparse.Namespace) -> None:
    """Evaluate, or go on where a run stopped; store and print scores and comparisons."""
    from tqdm.auto import tqdm

    from ..implementations import implementations_of
    from ..info import versions
    from ..rope_scaling import read_rope_scaling
    from ..ruler import TASKS
    from ..ruler.evaluation import RulerSettings, evaluate, prepare_samples
    from ..ruler.sources import check_corpora
    from ..ruler.summary import summarize

    check_place(options, folder=options.output)
    check_corpora(options.corpora)
    settings = RulerSettings(
        output=options.output,
        tasks=tuple(TASKS) if options.tasks == ["all"] else tuple(options.tasks),
        lengths=tuple(options.lengths),
        implementations=tuple(implementations_of(options.implementations, options.taus)),
        num_samples=options.samples,
        seed=options.seed,
        batch_size=options.batch_size,
        chat_template=options.chat_template,
        corpora=options.corpora,
        model=options.model,
        tokenizer=options.tokenizer,
        rope_scaling=read_rope_scaling(options.rope_scaling),
        dtype=dtype_of(options.dtype),
        device=options.device,
    )

    def make_bar(total: int, unit: str) -> Any:
        return tqdm(total=total, desc=unit, unit="", disable=options.quiet or os.environ.get("RANK", "0") != "0")

    if options.prepare:
        prompts = prepare_samples(settings, make_bar=make_bar, notice=notice)
        drawn = {"samples": len(prompts), "output": str(options.output)}
        print(json.dumps(drawn) if options.json else f"{len(prompts)} samples in {options.output}")
        return
    found = evaluate(settings, make_bar=make_bar, notice=notice)
    if found is None:  # not the first of several processes
        return
    prompts, answers, made_with = found
    result = made_with | {"versions": versions()} | summarize(prompts, answers, settings.implementations)
    (options.output / RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw_picture(result, options.output / PICTURE)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['model']}, {result['dtype']}; scores in percent")
    for length in sorted(set(options.lengths)):
        print("\n" + length_table(result, length))
    if len(options.lengths) > 1:
        print("\n" + summary_table(result, "all lengths", None))


def length_table(result: dict[str, Any], length: int) -> str:
    """Format the scores of a length: a line a task, a column an implementation; then their mean and what follows from it."""
    rows = [row for row in result["tasks"] if row["length"] == length]
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        lines.append(f"{task:<18}" + "".join(f"{row['score']:>22.2f}" for row in of_task))
    samples = max(row["samples"] for row in rows)
    return summary_table(result, f"{length} tokens, {samples} samples a task", length, lines)


def summary_table(result: dict[str, Any], title: str, length: int | None, lines: list[str] | None = None) -> str:
    """Format mean scores under the lines of tasks, and differences from the first implementation."""
    rows = [row for row in result["lengths"] if row["length"] == length]
    mean = f"{'mean':<18}" + "".join(f"{row['score']:>22.2f}" for row in rows)
    found = [title, " " * 18 + "".join(f"{label(row):>22}" for row in rows), *(lines or []), mean]
    if len(rows) > 1:
        found.append(f"{'difference [95 %]':<18}" + "".join(f"{difference(row):>22}" for row in rows))
        same = ("" if "same_answers" not in row else f"{100 * row['same_answers']:.1f}" for row in rows)
        found.append(f"{'same answers, %':<18}" + "".join(f"{cell:>22}" for cell in same))
    return "\n".join(line.rstrip() for line in found)


def difference(row: dict[str, Any]) -> str:
    """Format a difference in points with its interval."""
    found = row.get("difference")
    if found is None:
        return ""
    interval = "" if found["low"] is None else f" [{found['low']:+.2f}, {found['high']:+.2f}]"
    return f"{found['mean']:+.2f}{interval}"


def draw_picture(result: dict[str, Any], path: Path) -> bool:
    """Draw the share of needles found by depth and length, a panel an implementation; False without matplotlib or niah tasks."""
    needles: Rows = result["needles"]
    if not needles or find_spec("matplotlib") is None:
        return False
    import matplotlib

    from ..ruler.summary import DEPTH_BINS

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys(label(row) for row in needles))
    lengths = sorted({row["length"] for row in needles})
    depths = [place / DEPTH_BINS for place in range(DEPTH_BINS)]
    size = (2 + len(panels) * (0.8 + 0.5 * len(lengths)), 4)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for panel, name in zip(axes[0], panels, strict=True):
        shares = {(row["depth"][0], row["length"]): row["found"] for row in needles if label(row) == name}
        grid = [[shares.get((depth, length), float("nan")) for length in lengths] for depth in depths]
        picture = panel.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        panel.set_title(name, fontsize="medium")
        panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
        panel.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
        panel.set_xlabel("tokens")
    axes[0][0].set_ylabel("depth of the needle, from")
    figure.suptitle(f"{result['model']}: needles found", fontsize="medium")
    figure.colorbar(picture, ax=axes, label="share found")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True

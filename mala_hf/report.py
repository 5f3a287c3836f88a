# SPDX-License-Identifier: Apache-2.0
"""The demo's results as tables for people, a JSON file for machines, and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

# columns of the table of layers, each a mean and the 95th percentile over rows and heads
PER_LAYER = tuple(
    f"{measure}_{of}" for measure in ("omitted_mass", "omitted_mass_bound", "output_error") for of in ("mean", "p95")
)


def percent(fraction: float) -> str:
    """Format a fraction as a percentage without its sign: four decimals, more of them where all would be zeros."""
    value = 100 * fraction
    return f"{value:.4f}" if value == 0 or value >= 5e-4 else f"{value:.0e}"


def side_by_side(result: dict[str, Any]) -> Table:
    """Build the main table: one row a measure, one column a run."""
    full, *others = result["runs"]
    title = f"{result['model']}, {result['length']:,} tokens of {result['text']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("measure", no_wrap=True)
    table.add_column("sdpa", justify="right")
    for run in others:
        table.add_column(f"mala, tau {run['tau']:g}", justify="right")

    def add(measure: str, of_full: str, of_mala: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(measure, of_full, *(of_mala(run) for run in others))

    def add_pair(measure: str, of_full: str, mean: str, p95: str) -> None:
        add(measure, of_full, lambda run: f"{percent(run['summary'][mean])} / {percent(run['summary'][p95])}")

    rounding = percent(others[0]["summary"]["rounding_error_mean"])
    add("perplexity", f"{full['ppl']:.4f}", lambda run: f"{run['ppl']:.4f}")
    add("nats per token", f"{full['nll']:.6f}", lambda run: f"{run['nll']:.6f}")
    add("KL in nats: mean / max", "", lambda run: f"{run['kl_mean']:.1e} / {run['kl_max']:.1e}")
    add("same most likely token, %", "", lambda run: f"{100 * run['top1_agreement']:.2f}")
    new_tokens = len(full["continuation_tokens"])
    add("same greedy tokens", "", lambda run: f"{run['same_continuation_tokens']} of {new_tokens}")
    visible = f"{others[0]['summary']['visible_slots_per_query']:.0f}"
    add("key slots per query", visible, lambda run: f"{run['summary']['key_slots_per_query']:.0f}")
    add("work fraction, %", "100.0", lambda run: f"{100 * run['summary']['work_fraction']:.1f}")
    add("  of the lowest head", "100.0", lambda run: f"{100 * run['summary']['work_fraction_min_head']:.1f}")
    add_pair("omitted mass, %", "0", "omitted_mass_mean", "omitted_mass_p95_worst_layer")
    add_pair("  certified bound, %", "", "omitted_mass_bound_mean", "omitted_mass_bound_p95_worst_layer")
    add_pair("output error, %", rounding, "output_error_mean", "output_error_p95_worst_layer")
    add("prefill time, s", f"{full['prefill_seconds']:.2f}", lambda run: f"{run['prefill_seconds']:.2f}")
    add("generation time, s", f"{full['generate_seconds']:.2f}", lambda run: f"{run['generate_seconds']:.2f}")
    return table


def per_layer(run: dict[str, Any]) -> Table:
    """Build the table of layers of one MALA run: work over heads, exact omitted mass, its certified bound, output error."""
    title = f"Per layer, tau {run['tau']:g}, in %"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("layer", "work", "lowest head", "omitted", "P95", "bound", "P95", "output error", "P95"):
        table.add_column(heading, justify="right")
    for layer in run["layers"]:
        work = layer["work_fraction"]
        work_cells = (f"{100 * sum(work) / len(work):.1f}", f"{100 * min(work):.1f}")
        table.add_row(str(layer["layer"]), *work_cells, *(percent(layer[name]) for name in PER_LAYER))
    return table


def plain_words(result: dict[str, Any]) -> str:
    """Say what the numbers mean, and what they do not."""
    first = result["runs"][1]
    tile = " x ".join(map(str, result["tile"]))
    on_cpu = ", least of all on a CPU" if result["device"].startswith("cpu") else ""
    return (
        f"At tau {first['tau']:g} MALA kept {100 * first['summary']['work_fraction']:.1f} % of the work that follows the "
        "scores. An ordinary small model keeps nearly everything at lengths like this one; the kept share falls as the text "
        "grows, and heads differ widely (see the picture). Every score is still computed, so expect no gain in speed "
        f"here{on_cpu}. Pairs are the mean and the worst layer's 95th percentile.\n"
        f"Ran as {result['implementation_that_ran']}, tiles of {tile}, {result['dtype']}, {result['device']}."
    )


def print_report(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the tables, the continuations and the reading of the numbers."""
    console = console or Console(highlight=False)
    console.print(per_layer(result["runs"][1]))
    console.print(side_by_side(result))
    for run in result["runs"]:
        label = run["implementation"] if run["tau"] is None else f"{run['implementation']}, tau {run['tau']:g}"
        console.print(f"{label} continues: {run['continuation']!r}", markup=False)
    console.print("\n" + plain_words(result), markup=False)


def save_json(result: dict[str, Any], folder: Path) -> Path:
    """Write ``demo.json`` into the folder, made if need be, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "demo.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


def save_picture(result: dict[str, Any], folder: Path) -> Path:
    """Draw the work fraction of every layer and head, one panel a tau, as ``work_per_head.png`` in the folder; return its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    runs = result["runs"][1:]
    maps = [[layer["work_fraction"] for layer in run["layers"]] for run in runs]
    layers, heads = len(maps[0]), len(maps[0][0])
    size = (len(runs) * (1 + 0.3 * heads) + 1, 1.5 + 0.18 * layers)
    figure, axes = pyplot.subplots(1, len(runs), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for panel, run, work in zip(axes[0], runs, maps, strict=True):
        picture = panel.imshow(work, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        panel.set_title(f"tau = {run['tau']:g}", fontsize="medium")
        panel.set_xlabel("query head")
        panel.set_xticks(range(0, heads, max(1, heads // 16)))
        panel.set_yticks(range(0, layers, max(1, layers // 15)))
    axes[0][0].set_ylabel("layer")
    tile = " x ".join(map(str, result["tile"]))
    figure.suptitle(f"{result['model']}\n{result['length']:,} tokens, tile {tile}", fontsize="medium")
    figure.colorbar(picture, ax=axes, label="work fraction (retained / visible key slots)")
    path = folder / "work_per_head.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path

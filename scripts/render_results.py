# SPDX-License-Identifier: Apache-2.0
"""Draw the tables and figures of README.md and docs/ from the stored results, between markers <!-- table: NAME --> and <!-- end -->.

python scripts/render_results.py            # rewrite the pages
python scripts/render_results.py --check    # exit code 1 if a page differs from its results
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import evaluation_tables
from decode_table import decode
from evaluation_figures import evaluation_figures
from method_study_tables import METHOD_STUDY_TABLES, recall_figures
from performance_figures import performance_figures
from performance_tables import PERFORMANCE_TABLES
from reliability_tables import RELIABILITY_TABLES
from stored_results import ROOT, results, table
from study_figures import study_figures
from study_tables import STUDY_TABLES
from targets_table import targets
from tensor_parallel_tables import tensor_parallel, tensor_parallel_step
from training_figure import differences, training_svg
from training_study_tables import TRAINING_STUDY_TABLES, training_study_figures

PAGES = (
    "README.md",
    "docs/performance.md",
    "docs/training.md",
    "docs/evaluation.md",
    "docs/studies.md",
    "docs/kernel_hub.md",
    "docs/scaling.md",
    "docs/reliability.md",
    "kernels_hub/mala/CARD.md",
)
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def gradients() -> str:
    """Errors of the gradients against full attention in float32, on captured activations."""
    header = [
        "tokens",
        "group",
        "work by head",
        "output",
        "dQ",
        "dK",
        "dV",
        "bfloat16: dQ",
        "full attention's",
        "dK",
        "full",
        "dV",
        "full",
    ]
    rows = []
    for row in results("gradients_h200")["rows"]:
        exact, rounded = row["float32"], row["bfloat16"]
        work = " ".join(f"{100 * fraction:.0f}" for fraction in exact["work_fraction"])
        errors = [f"{100 * exact[f'{name}_error']:.3f} %" for name in ("output", "dq", "dk", "dv")]
        pairs = [
            f"{100 * rounded[f'{full}{name}_error']:.3f} %" for name in ("dq", "dk", "dv") for full in ("", "full_")
        ]
        rows.append([f"{row['seqlen']:,}", row["group"], f"{work} %", *errors, *pairs])
    return table(header, rows)


def blockwise() -> str:
    """Time of the CPU form and of Transformers' eager attention."""
    found = results("blockwise_cpu")
    cells = [f"{found['eager_ms']:.0f}", f"{found['blockwise_ms']:.0f}", f"{found['blockwise_over_eager']:.2f}"]
    return table(["tokens", "eager, ms", "blockwise, ms", "blockwise / eager"], [[f"{found['seqlen']:,}", *cells]])


def training_names() -> list[str]:
    """Every stored result of ``train_compare.py``."""
    return sorted(path.stem for path in (ROOT / "results").glob("training_*.json"))


def training() -> str:
    """Each training comparison: what it was, a row for each attention, and the figure."""
    header = [
        "",
        "loss, last tenth",
        "difference, mean",
        "largest",
        "held out, before",
        "after",
        "after, read by MALA",
        "work before",
        "after",
        "steps per second",
        "peak memory, GiB",
    ]
    return "\n".join(
        f"{training_title(found)}\n\n{table(header, training_rows(found['runs']))}\n"
        f"![loss of each step, and its difference to {found['runs'][0]['attention']}](training/{name}.svg)\n"
        for name in training_names()
        for found in [results(name)]
    )


def training_title(found: dict[str, Any]) -> str:
    """What was trained, on what, where."""
    settings, data = found["settings"], found["data"]
    return (
        f"{found['model']} on {data['text']}: {settings['steps']} steps of {settings['batch']} x {settings['seqlen']:,} tokens, "
        f"{settings['dtype']}, {found['device']}, torch {found['versions']['torch']}, transformers {found['versions']['transformers']}"
    )


def training_rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each attention; work is counted with its own settings, at tau = 1 for an exact attention."""
    rows = []
    for run in runs:
        apart = [abs(difference) for difference in differences(run, runs[0])]
        last = run["loss"][-max(len(run["loss"]) // 10, 1) :]
        rows.append(
            [
                run["attention"],
                f"{sum(last) / len(last):.4f}",
                f"{sum(apart) / len(apart):.6f}",
                f"{max(apart):.6f}",
                *(f"{run[when]['sdpa']:.4f}" for when in ("held_out_before", "held_out_after")),
                f"{run['held_out_after']['mala']:.4f}",
                *(f"{100 * run[when]['work_fraction']:.1f} %" for when in ("work_before", "work_after")),
                *(["", ""] if run["peak_bytes"] is None else gpu_cells(run)),
            ]
        )
    return rows


def gpu_cells(run: dict[str, Any]) -> list[str]:
    """Speed and memory, which mean something on a GPU that nobody else uses."""
    return [f"{run['steps_per_second']:.2f}", f"{run['peak_bytes'] / 2**30:.2f}"]


TABLES = {
    **PERFORMANCE_TABLES,
    "gradients": gradients,
    "decode": decode,
    "targets": targets,
    "tensor_parallel": tensor_parallel,
    "tensor_parallel_step": tensor_parallel_step,
    "blockwise": blockwise,
    "training": training,
    "perplexity": evaluation_tables.perplexity,
    "perplexity_claim": evaluation_tables.perplexity_claim,
    "evaluation_commands": evaluation_tables.evaluation_commands,
    "perplexity_bfloat16": evaluation_tables.perplexity_bfloat16,
    "ruler": evaluation_tables.ruler,
    "ruler_tasks": evaluation_tables.ruler_tasks,
    "real_model": evaluation_tables.real_model,
    "kernels_benchmark": evaluation_tables.kernels_benchmark,
    **STUDY_TABLES,
    **METHOD_STUDY_TABLES,
    **TRAINING_STUDY_TABLES,
    **RELIABILITY_TABLES,
}


def rendered(text: str) -> str:
    """``text`` with every marked table drawn anew."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def drawn() -> dict[Path, str]:
    """Every page and figure as its results would have it."""
    pages = {ROOT / page: rendered((ROOT / page).read_text("utf-8")) for page in PAGES}
    figures = {f"training/{name}": training_svg(results(name)) for name in training_names()}
    figures |= {f"evaluation/{name}": svg for name, svg in evaluation_figures().items()}
    figures |= {f"performance/{name}": svg for name, svg in performance_figures().items()}
    figures |= {
        f"studies/{name}": svg for name, svg in (study_figures() | recall_figures() | training_study_figures()).items()
    }
    return pages | {ROOT / "docs" / f"{name}.svg": svg for name, svg in figures.items()}


def main() -> None:
    """Rewrite or check the pages and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not up to date")
    options = parser.parse_args()
    for path, text in drawn().items():
        if path.exists() and path.read_text("utf-8") == text:
            continue
        if options.check:
            raise SystemExit(f"{path.relative_to(ROOT)} does not show its results: run scripts/render_results.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()

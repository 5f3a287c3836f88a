# SPDX-License-Identifier: Apache-2.0
"""A checkpoint by the paper's model-level table: knowledge, reasoning, RULER at native length and under YaRN; one JSON.

    python scripts/study_model.py --model MODEL --attn sdpa mala --output results/study_model_NAME.json
    python scripts/study_model.py --model MODEL --knowledge --reasoning --output ...    # no task that needs a data set

Knowledge and reasoning are tasks of lm-evaluation-harness, which read data sets of the hub or of --task-data; RULER's samples are drawn
here. A run that was stopped, or ran out of --budget-seconds, goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from side_by_side import explained
from stored_results import as_text, write_whole
from study_ruler import NATIVE, YARN, OutOfTime, ProgressLines, positions_of, ruler_rows, ruler_settings

from mala_hf.checkpoint import OFFLINE_MODEL, load_model
from mala_hf.extras import how_to_install
from mala_hf.implementations import Implementation, implementations_of, using_implementation
from mala_hf.info import checked_out_commit, device_name, versions
from mala_hf.ruler import TASKS
from mala_hf.studies.row_store import RowStore

# the paper's summary does not name its tasks: these are common ones
KNOWLEDGE = ("mmlu", "arc_challenge", "openbookqa", "sciq")
REASONING = ("hellaswag", "winogrande", "piqa", "gsm8k")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"Hub name or folder (default: {OFFLINE_MODEL} from the package index)")
    parser.add_argument("--tokenizer", help="of another Hub name or folder than the model's")
    parser.add_argument("--name", help="of the model in the results (default: the last part of --model)")
    parser.add_argument("--attn", nargs="+", default=["sdpa", "mala"], metavar="NAME", help="default: sdpa mala")
    parser.add_argument("--taus", type=float, nargs="+", default=[1.0], metavar="TAU", help="of mala (default: 1)")
    parser.add_argument(
        "--knowledge", nargs="*", default=list(KNOWLEDGE), metavar="T", help=f"default: {' '.join(KNOWLEDGE)}"
    )
    parser.add_argument(
        "--reasoning", nargs="*", default=list(REASONING), metavar="T", help=f"default: {' '.join(REASONING)}"
    )
    parser.add_argument("--task-data", type=Path, metavar="FOLDER", help="copies of data sets, as FOLDER/OWNER/NAME")
    parser.add_argument("--include-path", type=Path, metavar="FOLDER", help="tasks of your own, as lm_eval's option")
    parser.add_argument("--limit", type=int, help="examples of each task (default: all)")
    parser.add_argument("--ruler-tasks", nargs="*", default=list(TASKS), metavar="T", help="default: all 13")
    parser.add_argument("--ruler-samples", type=int, default=20, help="of each task (default: 20)")
    parser.add_argument("--native-length", type=int, help="tokens (default: the model's positions)")
    parser.add_argument("--yarn-factor", type=float, default=4.0, help="of the native length; 0: no YaRN (default: 4)")
    parser.add_argument(
        "--corpora", default="builtin", help="RULER's texts: hub, builtin or a folder (default: builtin)"
    )
    parser.add_argument("--chat-template", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16 on a GPU, else float32"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    parser.add_argument(
        "--small", action="store_true", help="RULER of two tasks, one sample, 1,024 tokens and twice as many"
    )
    parser.add_argument("--prepare", action="store_true", help="only draw RULER's samples, into the state folder")
    parser.add_argument("--state", type=Path, metavar="FOLDER", help="default: --output without its ending")
    parser.add_argument(
        "--budget-seconds", type=float, default=float("inf"), help="stop, to go on later, after so long"
    )
    parser.add_argument("--commit", help="commit to record; default: that of this checkout")
    parser.add_argument("--output", type=Path, required=True)
    return parser


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the small sizes where they are asked for."""
    options = build_parser().parse_args(arguments)
    if options.small:
        options.ruler_tasks, options.ruler_samples = ["niah_single_1", "fwe"], 1
        options.native_length, options.yarn_factor = options.native_length or 1024, 2.0
    options.state = options.state or options.output.with_suffix("")
    options.implementations = implementations_of(options.attn, options.taus)
    return options


def task_rows(
    options: argparse.Namespace, part: str, task: str, manager: Any, loaded: tuple[Any, Any]
) -> Iterator[dict[str, Any]]:
    """One row for each implementation: the headline metric of a task or group, in percent."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from task_data import headline, inside

    model, tokenizer = loaded
    for one in options.implementations:
        language_model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size)
        with using_implementation(model, one.name, one.tau), inside(options.task_data):
            found = simple_evaluate(
                language_model, tasks=[task], task_manager=manager, limit=options.limit, log_samples=False,
                bootstrap_iters=0, apply_chat_template=False,
            )  # fmt: skip
        scores = found["results"].get(task) or found.get("groups", {}).get(task) or {}
        metric, value = headline(scores or _mean_of(found["results"]))
        yield {
            "part": part, "implementation": one.name, "tau": one.tau, "task": task, "metric": metric, "score": 100 * value,
            "examples": sum(count["effective"] for count in found["n-samples"].values()),
        }  # fmt: skip


def _mean_of(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """A tag has no score of its own: the mean over its tasks."""
    from task_data import headline

    values = [headline(scores) for scores in results.values()]
    return {values[0][0]: fmean(value for _, value in values)}


def run(options: argparse.Namespace) -> list[str]:
    """Measure what is not there yet, write the file, and return the parts that are still open."""
    began = time.monotonic()
    settings = {
        "model": options.name or (Path(options.model).name if options.model else OFFLINE_MODEL),
        "implementations": [[one.name, one.tau] for one in options.implementations],
        "knowledge": options.knowledge, "reasoning": options.reasoning, "limit": options.limit, "dtype": options.dtype,
        "ruler": {"tasks": options.ruler_tasks, "samples": options.ruler_samples, "corpora": options.corpora},
        "native_length": positions_of(options), "yarn_factor": options.yarn_factor, "chat_template": options.chat_template,
    }  # fmt: skip
    store = RowStore(options.state / "rows.jsonl", json.loads(json.dumps(settings)))
    tasks = [("knowledge", task) for task in options.knowledge] + [("reasoning", task) for task in options.reasoning]
    rulers = [NATIVE, *([YARN] if options.yarn_factor else [])] if options.ruler_tasks else []
    manager = task_manager(options, [task for _, task in tasks]) if tasks else None
    loaded: tuple[Any, Any] | None = None
    end = began + options.budget_seconds
    for part in rulers:
        if not store.has(part=part) and time.monotonic() <= end:
            try:
                store.append(list(ruler_rows(options, part, end)))
            except OutOfTime:
                break
            write(options, settings, store, rulers, tasks)
    for part, task in tasks:
        if not store.has(part=part, task=task) and time.monotonic() <= end:
            loaded = loaded or load_model(
                options.model, tokenizer=options.tokenizer, device=options.device,
                dtype=None if options.dtype is None else getattr(torch, options.dtype),
            )  # fmt: skip
            store.append(list(task_rows(options, part, task, manager, loaded)))
            print(f"{part}, {task}: done after {time.monotonic() - began:.0f} s", flush=True)
            write(options, settings, store, rulers, tasks)
    left = write(options, settings, store, rulers, tasks)
    print(shown(store.rows, options.implementations))
    return left


def write(
    options: argparse.Namespace,
    settings: dict[str, Any],
    store: RowStore,
    rulers: list[str],
    tasks: list[tuple[str, str]],
) -> list[str]:
    """Write the rows that are there, and return the parts that are still open, which the file names too."""
    left = [part for part in rulers if not store.has(part=part)]
    left += [task for part, task in tasks if not store.has(part=part, task=task)]
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    facts = {"device": device_name(device), "commit": options.commit or checked_out_commit(), "versions": versions()}
    write_whole(options.output, as_text(facts | settings | {"not_run": left, "rows": store.rows}))
    return left


def task_manager(options: argparse.Namespace, tasks: list[str]) -> Any:
    """lm_eval's tasks and those of --include-path; what it raises without the package or the data says what is missing."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ImportError(f"knowledge and reasoning need lm-evaluation-harness: {how_to_install('eval')}") from error
    from task_data import check_data

    options.task_data = None if options.task_data is None else options.task_data.resolve()
    options.model = (
        str(Path(options.model).resolve()) if options.model and Path(options.model).is_dir() else options.model
    )
    manager = TaskManager(include_path=None if options.include_path is None else str(options.include_path))
    check_data(manager, tasks, options.task_data)
    return manager


def mean_score(rows: list[dict[str, Any]], part: str, implementation: Implementation) -> float | None:
    """The unweighted mean over a part's tasks; RULER's rows are such means. None for a part that has no row."""
    own = [
        row["score"] for row in rows
        if (row["part"], row["implementation"], row["tau"]) == (part, implementation.name, implementation.tau)
    ]  # fmt: skip
    return fmean(own) if own else None


def shown(rows: list[dict[str, Any]], implementations: Sequence[Implementation]) -> str:
    """The paper's table: a row for each attention, a column for each part."""
    parts = ("knowledge", "reasoning", NATIVE, YARN)
    lines = [" " * 14 + "".join(f"{part:>14}" for part in parts)]
    for one in implementations:
        scores = [mean_score(rows, part, one) for part in parts]
        lines.append(f"{one.label:<14}" + "".join(f"{'' if x is None else f'{x:.2f}':>14}" for x in scores))
    return "\n".join(line.rstrip() for line in lines)


def prepare(options: argparse.Namespace) -> None:
    """Draw RULER's samples of both lengths into the state folder."""
    from mala_hf.ruler.evaluation import prepare_samples

    for part in [NATIVE, *([YARN] if options.yarn_factor else [])]:
        prompts = prepare_samples(ruler_settings(options, part), make_bar=ProgressLines(part), notice=print)
        print(f"{len(prompts)} samples in {options.state / part}")


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        options = parsed(arguments)
        if options.prepare:
            prepare(options)
            return
        left = run(options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"study_model.py: {explained(error)}") from error
    if left:
        print(f"out of time; the same command goes on with {', '.join(left)}")


if __name__ == "__main__":
    main()

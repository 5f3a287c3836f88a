# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-evaluation-harness without a hub: which data sets they read, and a folder that holds copies of them.

``datasets`` reads a folder as it would read the hub's repository of that name, so a copy of ``allenai/ai2_arc`` under
``FOLDER/allenai/ai2_arc`` serves while FOLDER is the working directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Kind

from mala_hf.model_place import hub_answers

BUILDERS = ("json", "csv", "parquet", "text")  # read files that the task itself names


def data_sets_of(manager: TaskManager, name: str) -> set[str]:
    """The data sets of the hub that a task, or every task of a group or tag, reads; ``ValueError`` for a task that is not known."""
    entry = manager.task_index.get(name)
    if entry is None:
        raise ValueError(f"lm-evaluation-harness has no task {name!r}: mala-hf lm-eval ls tasks lists them")
    if entry.kind in (Kind.GROUP, Kind.TAG):
        children = [child if isinstance(child, str) else child["task"] for child in (entry.cfg or {}).get("task", [])]
        children += [other.name for other in manager.task_index.values() if name in other.tags and other.name != name]
        return set().union(*(data_sets_of(manager, child) for child in children))
    path = (entry.cfg or {}).get("dataset_path")
    return set() if path is None or path in BUILDERS else {str(path)}


def check_data(manager: TaskManager, tasks: Sequence[str], folder: Path | None) -> None:
    """Raise ``ValueError`` naming every data set that is neither in the folder nor to be had from a hub that answers."""
    wanted = {task: sorted(data_sets_of(manager, task)) for task in tasks}
    here = {name for names in wanted.values() for name in names if folder is not None and (folder / name).is_dir()}
    lacking = {task: [name for name in names if name not in here] for task, names in wanted.items()}
    lacking = {task: names for task, names in lacking.items() if names}
    if not lacking or os.environ.get("HF_DATASETS_OFFLINE") or hub_answers():
        return
    listed = "; ".join(f"{task}: {', '.join(names)}" for task, names in lacking.items())
    raise ValueError(
        f"the hub does not answer, and these tasks read data sets that are not in {folder or 'a folder (--task-data)'}: {listed}. "
        "Where there is a network: hf download --repo-type dataset NAME --local-dir FOLDER/NAME, then --task-data FOLDER; "
        "HF_DATASETS_OFFLINE=1 reads what was downloaded before. Without --knowledge and --reasoning no such task runs"
    )


@contextmanager
def inside(folder: Path | None) -> Iterator[None]:
    """Work in the folder for a while, so that its copies are found first."""
    before = Path.cwd()
    if folder is not None:
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def headline(scores: dict[str, Any]) -> tuple[str, float]:
    """Name and value of the metric that stands for a task: the first of METRICS that it has, by any filter."""
    for metric in METRICS:
        for key, value in scores.items():
            if key.partition(",")[0] == metric and isinstance(value, (int, float)):
                return metric, float(value)
    raise ValueError(f"no metric of {', '.join(METRICS)} among {', '.join(scores)}")


METRICS = ("acc_norm", "acc", "exact_match", "em", "f1", "score")

# SPDX-License-Identifier: Apache-2.0
"""Can fine-tuning make a checkpoint concentrate, so that MALA leaves more out? Retained work against perplexity and RULER, as JSON.

    python scripts/study_concentrate.py --prepare --data study8 --novel emma.txt.gz
    python scripts/study_concentrate.py --data study8 --model MODEL --state STATE --output results/study_concentrate_h200.json

An arm is start (no training), mala (fine-tuning with MALA alone), or mala:KEY=NUMBER,... with weight (of the concentration term),
temperature (of its sigmoid, nats) and base (of length-scaled scores). Arms run side by side on one GPU. A run that is out of
time stores what it has and goes on when started again with the same --state.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from concentrate_plan import Arm, Plan
from concentrate_runs import RESULT, line_of, no_bar, run_arm
from side_by_side import end_of, on_gpu, run_side_by_side, run_study
from stored_results import as_text, write_whole
from study_data import read_data, write_data
from study_texts import DJANGO_DOCS, SQLALCHEMY_DOCS, read_sources

from mala_hf.checkpoint import OFFLINE_MODEL, load_model, load_tokenizer
from mala_hf.info import checked_out_commit, versions
from mala_hf.perplexity import check_positions
from mala_hf.ruler.evaluation import RulerSettings, prepare_samples
from mala_hf.text import DEFAULT_TEXT, default_text, read_text

ARMS = ("start", "mala", "mala:weight=0.1", "mala:weight=0.5", "mala:weight=2", "mala:base=512")
RULER_TASKS = (
    "niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multivalue", "niah_multiquery", "cwe", "fwe",
)  # fmt: skip
PLAN = "plan.json"
JOBS = 3  # by estimate 20 GB each: logits of 2 x 4,096 tokens with their gradient, and the activations of 30 layers


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="prepared tokens and samples")
    parser.add_argument("--model", help=f"Hub name or folder (default: {OFFLINE_MODEL} from the package index)")
    parser.add_argument("--name", help="of the model in the results (default: the last part of --model)")
    parser.add_argument("--prepare", action="store_true", help="make the folder instead of running; needs no GPU")
    parser.add_argument(
        "--novel", metavar="FILE", help="UTF-8 text, plain or .gz, to train on besides the manual of Django"
    )
    parser.add_argument("--train-text", nargs="+", metavar="FILE", help="with --prepare: train on these only")
    parser.add_argument("--held-out-text", nargs="+", metavar="FILE", help="with --prepare: evaluate on these")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="ARM", help=f"default: {' '.join(ARMS)}")
    parser.add_argument(
        "--only", metavar="ARM", help="run this one in this process and store it; others are left alone"
    )
    parser.add_argument("--jobs", type=int, help=f"arms at a time (default: {JOBS} on a GPU, else 1)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2, help="sequences a step (default: 2)")
    parser.add_argument("--seqlen", type=int, default=4096, help="tokens a sequence (default: 4096)")
    parser.add_argument("--every", type=int, default=50, help="steps between points of the curve (default: 50)")
    parser.add_argument("--windows", type=int, default=8, help="held-out windows of each text (default: 8)")
    parser.add_argument("--work-lengths", type=int, nargs="+", default=[4096, 8192], metavar="N")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--tile", type=int, nargs=2, metavar=("M", "N"), help="default: the kernels' own")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--ruler-tasks", nargs="*", default=list(RULER_TASKS), metavar="T")
    parser.add_argument("--ruler-length", type=int, default=4096)
    parser.add_argument("--ruler-samples", type=int, default=10, help="of each task (default: 10)")
    parser.add_argument(
        "--budget-seconds", type=float, default=float("inf"), help="stop, to go on later, after so long"
    )
    parser.add_argument("--ruler-seconds", type=float, default=40.0, help="of them, left for RULER (default: 40)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    parser.add_argument("--state", type=Path, metavar="FOLDER", help="points, answers and checkpoints of the arms")
    parser.add_argument("--commit", help="commit to record; default: that of this checkout")
    parser.add_argument("--output", type=Path, help="the results, JSON")
    return parser


def plan_of(options: argparse.Namespace) -> Plan:
    """What all arms share."""
    return Plan(
        steps=options.steps,
        batch=options.batch,
        seqlen=options.seqlen,
        every=options.every,
        work_lengths=tuple(options.work_lengths),
        windows=options.windows,
        learning_rate=options.learning_rate,
        dtype=options.dtype or ("bfloat16" if on_gpu(options.device) else "float32"),
        tile=None if options.tile is None else tuple(options.tile),
        ruler_tasks=tuple(options.ruler_tasks),
        ruler_length=options.ruler_length,
        ruler_samples=options.ruler_samples,
    )


def prepare(options: argparse.Namespace) -> None:
    """Write the folder: tokens to train and evaluate on, RULER's samples, the tokenizer."""
    tokenizer = load_tokenizer(options.model)
    novel = [] if options.novel is None else [read_text(options.novel)]
    if options.train_text:
        train = [*novel, *(read_text(path) for path in options.train_text)]
    else:
        train = [*novel, *((text, DJANGO_DOCS.name) for text in DJANGO_DOCS.documents())]
    if options.held_out_text:
        held_out = {Path(path).name.partition(".")[0]: read_text(path) for path in options.held_out_text}
    else:
        held_out = {
            "novel": (default_text(), DEFAULT_TEXT),
            "manual": ("\n\n".join(read_sources([SQLALCHEMY_DOCS])), SQLALCHEMY_DOCS.name),
        }
    sources = {
        "train": list(dict.fromkeys(name for _, name in train)),
        **{key: name for key, (_, name) in held_out.items()},
    }
    about = write_data(
        options.data,
        tokenizer,
        [text for text, _ in train],
        {key: text for key, (text, _) in held_out.items()},
        sources,
    )
    if options.ruler_tasks:
        settings = RulerSettings(
            output=options.data, tasks=tuple(options.ruler_tasks), lengths=(options.ruler_length,), implementations=(),
            num_samples=options.ruler_samples, corpora="builtin",
        )  # fmt: skip
        prepare_samples(settings, tokenizer, make_bar=no_bar, notice=print)
    print(json.dumps(about["tokens"]), f"in {options.data}")


def run_one(options: argparse.Namespace, label: str) -> None:
    """One arm, here; its result goes into its folder."""
    began = time.monotonic()
    plan, arm = plan_of(options), Arm.parse(label)
    parts, tokenizer, _ = read_data(options.data)
    folder = options.state / arm.folder
    check_plan(plan, folder / PLAN)
    deadline = began + options.budget_seconds - (options.ruler_seconds if plan.ruler_tasks else 0.0)
    model, _ = load_model(
        options.model, device=options.device, dtype=torch.float32, tokenizer=str(options.data / "tokenizer")
    )
    check_positions(model, max(plan.seqlen, *plan.work_lengths))
    run_arm(model, tokenizer, arm, parts, plan, options.data, folder, deadline)


def check_plan(plan: Plan, path: Path) -> None:
    """Raise ``ValueError`` when the folder holds an arm of another plan; more steps are no other plan."""
    now = json.loads(json.dumps(asdict(plan)))
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        differing = [key for key in now if key != "steps" and before.get(key) != now[key]]
        if differing:
            raise ValueError(f"{path.parent} is of a plan with other {', '.join(differing)}: choose another --state")
    write_whole(path, json.dumps(now))


def run_all(options: argparse.Namespace) -> None:
    """Every arm in a process of its own, and all results in one file, which is written whenever an arm ends."""
    arms = [Arm.parse(label) for label in options.arms]
    if len({arm.folder for arm in arms}) < len(arms):
        raise ValueError(f"each arm once, got {' '.join(options.arms)}")
    plan = plan_of(options)
    _, _, about = read_data(options.data)
    jobs = options.jobs or (min(JOBS, len(arms)) if on_gpu(options.device) else 1)
    labels = [arm.label for arm in arms]

    def on_end(label: str) -> None:
        for run in write_results(options, plan, about, arms):
            if run["label"] == label:
                print(line_of(run), flush=True)

    write_results(options, plan, about, arms)
    end_of(run_side_by_side(__file__, sys.argv[1:], labels, jobs, options.budget_seconds, on_end))


def write_results(options: argparse.Namespace, plan: Plan, about: dict, arms: list[Arm]) -> list[dict[str, Any]]:
    """Write what every arm has stored so far, and return it; ``not_run`` names those that are not complete."""
    paths = [options.state / arm.folder / RESULT for arm in arms]
    runs = [json.loads(path.read_text("utf-8")) for path in paths if path.exists()]
    devices = {run.pop("device") for run in runs}
    done = {run["label"] for run in runs if run["complete"]}
    result: dict[str, Any] = {
        "command": "scripts/study_concentrate.py",
        "device": ", ".join(sorted(devices)),
        "commit": options.commit or checked_out_commit(),
        "versions": versions(),
        "model": options.name or (Path(options.model).name if options.model else OFFLINE_MODEL),
        "data": about,
        "plan": asdict(plan),
        "not_run": [arm.label for arm in arms if arm.label not in done],
        "arms": runs,
    }
    write_whole(options.output, as_text(result))
    return runs


def main() -> None:
    run_study(build_parser().parse_args(), prepare, run_one, run_all)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Scaling in small: models of several sizes trained from nothing on real text, full attention against MALA and MoBA; JSON.

    python scripts/study_scaling.py --prepare --data study5 --novel emma.txt.gz
    python scripts/study_scaling.py --data study5 --sizes 5m 20m --attn sdpa mala --state STATE --output results/study_scaling_h200.json

An attention is sdpa, mala, moba, or one of the latter two with settings: mala:tau=1, moba:block=128,topk=8. Runs share a GPU side by
side. A run that is out of time stores what it has and goes on when started again with the same --state.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scaling_models import SIZES, Size, Trained
from scaling_plan import Plan, Stage
from scaling_runs import RESULT, Run, run_one
from side_by_side import end_of, on_gpu, run_side_by_side, run_study
from stored_results import as_text, write_whole
from study_data import read_data, write_data
from study_texts import (
    DJANGO_CODE,
    DJANGO_DOCS,
    DJANGO_TESTS,
    SQLALCHEMY_CHANGELOGS,
    SQLALCHEMY_CODE,
    SQLALCHEMY_DOCS,
    read_sources,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mala_hf.info import checked_out_commit, device_name, versions
from mala_hf.text import DEFAULT_TEXT, default_text, read_text

SOURCES = (DJANGO_DOCS, SQLALCHEMY_DOCS, SQLALCHEMY_CHANGELOGS, DJANGO_CODE, SQLALCHEMY_CODE, DJANGO_TESTS)
END = "<|end|>"  # after every document
VOCABULARY, HELD_OUT_EVERY = 8192, 25  # one document in so many is held out
STAGES = ("1024x32x600", "4096x8x200")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="prepared tokens and tokenizer")
    parser.add_argument("--prepare", action="store_true", help="make the folder instead of running; needs no GPU")
    parser.add_argument(
        "--novel", metavar="FILE", help="with --prepare: a text, plain or .gz, to train on besides the rest"
    )
    parser.add_argument("--train-text", nargs="+", metavar="FILE", help="with --prepare: train on these only")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"with --prepare (default: {VOCABULARY})")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="SIZE", help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--attn", nargs="+", default=["sdpa", "mala"], metavar="ATTENTION", help="default: sdpa mala")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), metavar="SEQLENxBATCHxSTEPS")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192], help="of the final evaluation")
    parser.add_argument("--every", type=int, default=25, help="steps between measurements (default: 25)")
    parser.add_argument("--held-out-tokens", type=int, default=65536, help="of each text (default: 65536)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at a width of 256 (default: 2e-3)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="SIZE/ATTENTION", help="run this one in this process; others are left alone")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: all on a GPU, else 1)")
    parser.add_argument(
        "--budget-seconds", type=float, default=float("inf"), help="stop, to go on later, after so long"
    )
    parser.add_argument(
        "--evaluation-seconds", type=float, default=25.0, help="of them, left for the end (default: 25)"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    parser.add_argument("--state", type=Path, metavar="FOLDER", help="checkpoints of the runs")
    parser.add_argument(
        "--keep", metavar="SIZE/ATTENTION", help="write this run's trained model, bfloat16, to --keep-folder"
    )
    parser.add_argument("--keep-folder", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", help="commit to record; default: that of this checkout")
    parser.add_argument("--output", type=Path, help="the results, JSON")
    return parser


def train_tokenizer(documents: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of these documents, token 0 the end of a document; the same documents always give the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def prepare(options: argparse.Namespace) -> None:
    """Write the folder: a tokenizer of the texts, tokens to train on, one document in 25 and a novel to evaluate on."""
    novel = [] if options.novel is None else [read_text(options.novel)]
    if options.train_text:
        texts = [read_text(path) for path in options.train_text]
        documents, names = [text for text, _ in texts], [name for _, name in texts]
        documents = [piece for text in documents for piece in text.split("\n\n") if piece]
    else:
        documents, names = read_sources(SOURCES), [source.name for source in SOURCES]
    held_out = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [text for text, _ in novel] + [text for number, text in enumerate(documents, 1) if number % HELD_OUT_EVERY]
    tokenizer = train_tokenizer(train, options.vocabulary)
    sources = {
        "train": [*(name for _, name in novel), *names],
        "novel": DEFAULT_TEXT,
        "held_out": f"one document in {HELD_OUT_EVERY} of the same",
    }
    texts_held = {"novel": default_text() + END, "held_out": "".join(text + END for text in held_out)}
    about = write_data(options.data, tokenizer, [text + END for text in train], texts_held, sources)
    print(json.dumps(about["tokens"]), f"in {options.data}")


def plan_of(options: argparse.Namespace) -> Plan:
    """What all runs share; ``ValueError`` for stages or numbers that are none."""
    if min(options.every, options.held_out_tokens, *options.lengths) < 1:
        raise ValueError("--every, --held-out-tokens and --lengths must be at least 1")
    return Plan(
        stages=tuple(Stage.parse(text) for text in options.stages),
        lengths=tuple(options.lengths),
        every=options.every,
        held_out_tokens=options.held_out_tokens,
        learning_rate=options.learning_rate,
        dtype=options.dtype or ("bfloat16" if on_gpu(options.device) else "float32"),
        seed=options.seed,
    )


def runs_of(options: argparse.Namespace) -> list[str]:
    """``SIZE/ATTENTION`` of every run; ``ValueError`` for what is none."""
    for size in options.sizes:
        Size.parse(size)
    for label in options.attn:
        Trained.parse(label)
    found = [f"{size}/{label}" for size in options.sizes for label in options.attn]
    if len(set(found)) < len(found):
        raise ValueError(f"each size and attention once, got {' '.join(found)}")
    if options.keep is not None and (options.keep not in found or options.keep_folder is None):
        raise ValueError(f"--keep takes one of {' '.join(found)}, and --keep-folder where to, got {options.keep}")
    return found


def folder_of(state: Path, label: str) -> Path:
    """Where a run keeps its checkpoint and result."""
    return state / label.replace("/", "_").replace(":", "-").replace(",", "-")


def run_here(options: argparse.Namespace, label: str) -> None:
    """One run, in this process."""
    began = time.monotonic()
    runs_of(options)
    plan = plan_of(options)
    parts, tokenizer, _ = read_data(options.data)
    folder = folder_of(options.state, label)
    check_plan(plan, folder / "plan.json")
    device = torch.device("cuda" if on_gpu(options.device) else "cpu")
    size, _, attention = label.partition("/")
    deadline = began + options.budget_seconds - options.evaluation_seconds
    found, run = run_one(size, attention, plan, parts, len(tokenizer), device, folder, deadline)
    if label == options.keep and found["complete"]:
        keep(run, tokenizer, options.keep_folder)


def check_plan(plan: Plan, path: Path) -> None:
    """Raise ``ValueError`` when the folder holds a run of another plan."""
    now = json.loads(json.dumps(asdict(plan)))
    if path.exists() and (before := json.loads(path.read_text("utf-8"))) != now:
        differing = [key for key in now if before.get(key) != now[key]]
        raise ValueError(f"{path.parent} is of a plan with other {', '.join(differing)}: choose another --state")
    write_whole(path, json.dumps(now))


def keep(run: Run, tokenizer: Any, folder: Path) -> None:
    """Write model and tokenizer as ``from_pretrained`` reads them, in bfloat16; a model trained with MALA runs it by its config."""
    if run.attention.name == "mala":
        run.model.config.mala = {"tau": 1.0} | run.attention.settings
    run.model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.model_max_length = run.plan.positions
    tokenizer.save_pretrained(folder)


def run_all(options: argparse.Namespace) -> None:
    """Every run in a process of its own, and all results in one file, which is written whenever a run ends."""
    labels, plan = runs_of(options), plan_of(options)
    _, _, about = read_data(options.data)
    jobs = options.jobs or (len(labels) if on_gpu(options.device) else 1)

    def on_end(label: str) -> None:
        runs = write_results(options, plan, about, labels)
        for run in runs:
            if f"{run['size']}/{run['attention']}" == label:
                print(line_of(run), flush=True)

    write_results(options, plan, about, labels)
    end_of(run_side_by_side(__file__, sys.argv[1:], labels, jobs, options.budget_seconds, on_end))


def write_results(options: argparse.Namespace, plan: Plan, about: dict, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Write what every run has stored so far, and return it; ``not_run`` names those that are not complete."""
    paths = {label: folder_of(options.state, label) / RESULT for label in labels}
    runs = {label: json.loads(path.read_text("utf-8")) for label, path in paths.items() if path.exists()}
    device = torch.device("cuda" if on_gpu(options.device) else "cpu")
    result = {
        "command": "scripts/study_scaling.py",
        "device": device_name(device),
        "commit": options.commit or checked_out_commit(),
        "versions": versions(),
        "data": about,
        "plan": asdict(plan),
        "not_run": [label for label in labels if label not in runs or not runs[label]["complete"]],
        "runs": list(runs.values()),
    }
    write_whole(options.output, as_text(result))
    return list(runs.values())


def line_of(run: dict[str, Any]) -> str:
    """One run in a line."""
    flops = ", ".join(f"{name} {value:.3e}" for name, value in run["training_flops"].items())
    line = f"{run['size']:>4} {run['attention']:<10} step {run['step']}"
    if not run["loss"]:
        return line + " (unfinished)"
    line += f" loss {run['loss'][-1][1]:.4f} FLOPs {flops}"
    work = f" work {run['work'][-1][2]:.1%} {run['seconds']:.0f} s"
    if run["final"] is None:
        return line + work + " (unfinished)"
    own = {
        length: {text: nll[run["attention"]] for text, nll in texts.items()}
        for length, texts in run["final"]["nll"].items()
    }
    return (
        line + work + " nll " + json.dumps({n: {t: round(x, 4) for t, x in texts.items()} for n, texts in own.items()})
    )


def main(arguments: Sequence[str] | None = None) -> None:
    run_study(build_parser().parse_args(arguments), prepare, run_here, run_all)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Make a file of results/ from what a command wrote: with a name for the model that others know, and no text of any sample.

mala-hf ppl ... --json > ppl.json
python scripts/store_results.py ppl ppl.json results/perplexity.json --model NAME --command "mala-hf ppl ..."

mala-hf ruler ... --output FOLDER
python scripts/store_results.py ruler FOLDER results/ruler.json --model NAME --command "mala-hf ruler ..."

kernels benchmark ./kernels_hub/mala --output benchmark.json
python scripts/store_results.py kernels benchmark.json results/kernels_benchmark.json --gpu NAME --command "kernels benchmark ..."
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stored_results import as_text

from mala_hf.implementations import Implementation
from mala_hf.ruler.sample_file import NAME, read_samples
from mala_hf.ruler.summary import summarize


def ppl(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that ``mala-hf ppl --json`` printed: the likelihoods of each window give the intervals again."""
    return json.loads(path.read_text("utf-8")) | {"model": options.model}


def kernels(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The times of ``kernels benchmark``; its description of the machine, which says CPU on a GPU (0.17.2), is replaced."""
    found = json.loads(path.read_text("utf-8"))
    rows = [
        {"workload": row["workload"].removeprefix("Mala."), "verified": row["verified"]} | row["timingResults"]
        for row in found["results"]
    ]
    return {
        "gpu": options.gpu,
        "torch": found["machineInfo"]["pytorchVersion"],
        "build": found["kernelCommitSha"],
        "benchmark_sha256": found["benchmarkScriptSha"],
        "rows": rows,
    }


def ruler(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The summary of a folder of ``mala-hf ruler``, with the digest of each prompt and the score of each answer.

    Samples that not every implementation has answered are left out; so are answers to another prompt than a sample has now.
    """
    facts = json.loads((folder / "ruler.json").read_text("utf-8"))
    _, groups = read_samples(folder / NAME)
    samples = {(one.length, one.task, one.index): one for group in groups.values() for one in group}
    answers: dict[Implementation, dict[Any, dict[str, Any]]] = {
        Implementation(row["implementation"], row["tau"]): {} for row in facts["lengths"]
    }
    for line in (folder / "answers.jsonl").read_text("utf-8").splitlines()[1:]:
        answer = json.loads(line)
        key = answer["length"], answer["task"], answer["index"]
        if key in samples and samples[key].digest == answer["prompt"]:
            answers[Implementation(answer["implementation"], answer["tau"])][key] = answer
    finished = [key for key in sorted(samples) if all(key in some for some in answers.values())]
    summary = summarize(
        [samples[key] for key in finished], [some[key] for some in answers.values() for key in finished], list(answers)
    )
    for row in summary["tasks"]:
        some = answers[Implementation(row["implementation"], row["tau"])]
        row["sample_scores"] = [some[key]["score"] for key in finished if key[:2] == (row["length"], row["task"])]
    digests: dict[tuple[int, str], list[str]] = defaultdict(list)
    for key in finished:
        digests[key[:2]].append(samples[key].digest)
    prompts = [{"length": length, "task": task, "digests": some} for (length, task), some in digests.items()]
    return facts | {"model": options.model, "samples": len(finished)} | summary | {"prompts": prompts}


KINDS = {"ppl": ppl, "ruler": ruler, "kernels": kernels}


def main() -> None:
    """Read what the command wrote, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("source", type=Path, help="file, or the folder of mala-hf ruler")
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="its name, in place of a path")
    parser.add_argument("--weights", help="what they were made from")
    parser.add_argument("--gpu", help="where kernels benchmark ran")
    parser.add_argument("--command", required=True, help="what was run, without paths of the machine")
    options = parser.parse_args()
    needed = "gpu" if options.kind == "kernels" else "model"
    if getattr(options, needed) is None:
        parser.error(f"{options.kind} needs --{needed}")
    run = {"command": options.command} | ({"weights": options.weights} if options.weights else {})
    options.output.write_text(as_text(run | KINDS[options.kind](options.source, options)), "utf-8")


if __name__ == "__main__":
    main()

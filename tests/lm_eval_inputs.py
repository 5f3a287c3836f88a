# SPDX-License-Identifier: Apache-2.0
"""What the tests of lm-evaluation-harness run on: a tiny checkpoint that it can load and a tiny task."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_model import byte_tokenizer, tiny_llama

TASK = """\
task: tiny_{kind}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
"""
KINDS = {
    "answer": """\
output_type: generate_until
generation_kwargs: {until: ["~"], max_gen_toks: 8, do_sample: false}
metric_list:
  - metric: !function tiny_metric.same_start
    aggregation: mean
    higher_is_better: true
""",
    "choice": """\
output_type: multiple_choice
doc_to_choice: ["a", "b"]
""",
}
# the length of the common start, so that a change of any answer moves the score
METRIC = """\
import os.path

def same_start(references, predictions, **kwargs):
    return len(os.path.commonprefix([references[0], predictions[0]]))
"""


def save_checkpoint(folder: Path) -> Path:
    """Write the tiny Llama, with a tokenizer that has the end and padding tokens that lm_eval asks for.

    Its attention weighs more than its residual stream, so that answers depend on the whole prompt.
    """
    model = tiny_llama(positions=4096)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(16)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = "~"
    tokenizer.save_pretrained(folder)
    return folder


def write_task(folder: Path, answers: list[str]) -> Path:
    """Write ``tiny_answer`` and ``tiny_choice``: a question for each answer, of different lengths."""
    data = folder / "questions.jsonl"
    lines = [
        {"question": "".join(letter * 24 for letter in "persuasion"[: 4 + number]), "answer": answer}
        for number, answer in enumerate(answers)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    (folder / "tiny_metric.py").write_text(METRIC, "utf-8")
    for kind, rest in KINDS.items():
        (folder / f"tiny_{kind}.yaml").write_text(TASK.format(kind=kind, data=data) + rest, "utf-8")
    return folder

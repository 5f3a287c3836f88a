# SPDX-License-Identifier: Apache-2.0
"""Generate with a model too large for one GPU, all GPUs at work at once: each has a share of every layer's heads.

torchrun --nproc-per-node 2 scripts/generate_tensor_parallel.py --model NAME --seqlen 131072
"""

from __future__ import annotations

import argparse

import parallel_runs as runs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

from mala_hf import MalaConfig, patch_model, record_work


def build_parser() -> argparse.ArgumentParser:
    parser = runs.build_parser(__doc__)
    parser.add_argument("--new-tokens", type=int, default=32)
    return parser


@torch.inference_mode()
def run(options: argparse.Namespace) -> None:
    device = runs.device_of_process()
    runs.start_processes(device)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = runs.text_windows(tokenizer, options.text, options.seqlen)[:1].to(device)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=runs.dtype_on(device), distributed_config=DistributedConfig(tp_plan="auto")
    )
    patch_model(model, MalaConfig(tau=options.tau))
    with record_work(model) as work:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.new_tokens, do_sample=False
        )
    runs.say(repr(tokenizer.decode(out[0, ids.shape[1] :])))
    runs.say(work.gathered())


if __name__ == "__main__":
    runs.main(run, build_parser())

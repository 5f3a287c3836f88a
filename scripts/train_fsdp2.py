# SPDX-License-Identifier: Apache-2.0
"""Train a model too large for one GPU: weights, gradients and optimizer states are shared out (FSDP2), each process has its own text.

torchrun --nproc-per-node 2 scripts/train_fsdp2.py --model NAME --seqlen 8192 --steps 20
"""

from __future__ import annotations

import argparse

import parallel_runs as runs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import mala_hf
from mala_hf import MalaConfig, patch_model, record_work


def build_parser() -> argparse.ArgumentParser:
    parser = runs.build_parser(__doc__)
    runs.add_training(parser)
    return parser


def run(options: argparse.Namespace) -> None:
    device = runs.device_of_process()
    runs.start_processes(device)
    rank, size = dist.get_rank(), dist.get_world_size()
    windows = runs.text_windows(AutoTokenizer.from_pretrained(options.model), options.text, options.seqlen)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    patch_model(model, MalaConfig(tau=options.tau)).train()
    # the recomputed forward takes the retained tiles of the first one
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": mala_hf.reuse_support})
    mesh = init_device_mesh(device.type, (size,))
    precision = MixedPrecisionPolicy(param_dtype=runs.dtype_on(device), reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    for step in range(options.steps):
        ids = windows[(step * size + rank) % len(windows)][None].to(device)
        with record_work(model) as work:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        runs.say(f"step {step}  loss {mean.item():.6f}  work {work.gathered().work_fraction:.1%}")


if __name__ == "__main__":
    runs.main(run, build_parser())

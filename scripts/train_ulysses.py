# SPDX-License-Identifier: Apache-2.0
"""Train on sequences too long for one GPU: every process holds a part of each (Ulysses, through accelerate and DeepSpeed).

    torchrun --nproc-per-node 2 scripts/train_ulysses.py --model NAME --seqlen 131072 --steps 20

For attention the processes exchange: each sees the whole sequence for its share of the heads.
"""

from __future__ import annotations

import argparse
import time

import parallel_runs as runs
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForCausalLM, AutoTokenizer

from mala_hf import MalaConfig, patch_model, record_work
from mala_hf.sequence_parallel import place_and_size, ulysses

ZERO_STAGE = 2  # gradients and optimizer states are shared out too


def build_parser() -> argparse.ArgumentParser:
    parser = runs.build_parser(__doc__)
    runs.add_training(parser)
    return parser


def run(options: argparse.Namespace) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    device = runs.device_of_process()
    engine = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # none; DeepSpeed's default is 1
        "zero_optimization": {"stage": ZERO_STAGE},
        "zero_allow_untested_optimizer": True,
    }
    if device.type == "cuda":
        engine["bf16"] = {"enabled": True}  # weights stay in bfloat16, what the optimizer adds up in is float32
    plugin = DeepSpeedPlugin(hf_ds_config=engine)
    parallelism = ulysses(runs.world_size())
    precision = "bf16" if device.type == "cuda" else "no"
    accelerator = Accelerator(mixed_precision=precision, parallelism_config=parallelism, deepspeed_plugin=plugin)

    windows = runs.text_windows(AutoTokenizer.from_pretrained(options.model), options.text, options.seqlen)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=runs.dtype_on(device))
    patch_model(model, MalaConfig(tau=options.tau)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=options.learning_rate))
    place, size = place_and_size()
    seconds = []
    for step in range(options.steps):
        start = time.perf_counter()
        ids = windows[step % len(windows)][None].to(accelerator.device)
        labels = pad(ids[:, 1:], (0, 1), value=-100)
        positions = torch.arange(options.seqlen, device=ids.device)[None]
        own_ids, own_labels, own_positions = (x.chunk(size, 1)[place] for x in (ids, labels, positions))
        with record_work(model) as work:
            logits = model(input_ids=own_ids, position_ids=own_positions, use_cache=False).logits
        loss = cross_entropy(logits[0].float(), own_labels[0], reduction="sum") / (options.seqlen - 1)
        accelerator.backward(loss)  # the engine adds up the gradients of processes that share a sequence
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        total = total.item()
        seconds.append(time.perf_counter() - start)
        runs.say(f"step {step}  loss {total:.6f}  work {work.gathered().work_fraction:.1%}")
    runs.say("seconds a step: " + " ".join(f"{x:.2f}" for x in seconds))
    if device.type == "cuda":
        runs.say(f"peak memory of the first GPU: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    runs.main(run, build_parser())

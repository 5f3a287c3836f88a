# SPDX-License-Identifier: Apache-2.0
"""A few training steps of a tiny Llama with "mala": in one process, or in one of several that ``torchrun`` started.

torchrun --nproc-per-node 2 tests/distributed_steps.py {ddp,fsdp2,trainer} FOLDER    # writes FOLDER/RANK.pt
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from tiny_model import runs_of_tokens, tiny_llama
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from mala_hf import MalaConfig, patch_model, record_work

STEPS, BATCH, LENGTH = 3, 4, 256
MAX_NORM = 1.0


def batches() -> Tensor:
    """Token ids (STEPS, BATCH, LENGTH), the same in every process."""
    return runs_of_tokens(STEPS * BATCH * LENGTH, run=12).view(STEPS, BATCH, LENGTH)


def model_and_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    """The tiny Llama, the same in every process, and an optimizer in which rounding errors stay small."""
    model = patch_model(tiny_llama(positions=LENGTH), MalaConfig(tile=(16, 16))).train()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def whole(tensors: Any) -> dict[str, Tensor]:
    """Copies of (name, tensor) pairs without wrappers' prefixes, shards put together."""
    return {
        name.removeprefix("module."): (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
        for name, x in tensors
    }


def gradients(model: Any) -> dict[str, Tensor]:
    return whole((name, weight.grad) for name, weight in model.named_parameters())


def steps_in_one_process(parts: int = 1) -> dict[str, Any]:
    """Plain PyTorch; each batch in ``parts`` whose gradients are accumulated. Losses are those of whole batches."""
    model, optimizer = model_and_optimizer()
    losses, first = [], {}
    for batch in batches():
        loss = 0.0
        for ids in batch.chunk(parts):
            part = model(input_ids=ids, labels=ids).loss / parts
            part.backward()
            loss += part.item()
        losses.append(loss)
        first = first or gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradients": first, "parameters": whole(model.named_parameters())}


def use_fsdp_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Accelerate's own FSDP2, which its state (1.15: ``AcceleratorState.__init__``) gives every device type but CPUs."""
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin


def steps_with_accelerate(kind: str) -> dict[str, Any]:
    """The same steps, each process with its share of every batch, through ``accelerator.prepare``."""
    if kind == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        use_fsdp_on_cpu(accelerator, plugin)
    else:
        accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*model_and_optimizer())
    losses, first = [], {}
    with record_work(model) as work:
        for batch in batches():
            ids = batch.chunk(accelerator.num_processes)[accelerator.process_index]
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            first = first or gradients(model)
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    local = [getattr(weight, "_local_tensor", weight) for weight in model.parameters()]
    return {
        "wrapper": type(model).__name__,
        "processes": accelerator.num_processes,
        "own_share": sum(x.numel() for x in local) / sum(weight.numel() for weight in model.parameters()),
        "work_fraction": work.work_fraction,
        "gathered": work.gathered().to_dict(),
        "losses": losses,
        "gradients": first,
        "parameters": whole(model.named_parameters()),
    }


class Batches(torch.utils.data.IterableDataset):
    """The sequences one by one, in order."""

    def __iter__(self):
        return ({"input_ids": ids, "labels": ids} for ids in batches().flatten(0, 1))


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args, state, control, logs=None, **_) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def steps_with_trainer() -> dict[str, Any]:
    """The same steps through Trainer."""
    model, optimizer = model_and_optimizer()
    curves = Losses()
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with tempfile.TemporaryDirectory() as folder, record_work(model) as work:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH // torch.distributed.get_world_size(),
            max_grad_norm=MAX_NORM,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model, arguments, train_dataset=Batches(), callbacks=[curves], optimizers=(optimizer, constant)
        )
        trainer.train()
    return {
        "wrapper": type(trainer.model_wrapped).__name__,
        "processes": arguments.world_size,
        "own_share": 1.0,
        "work_fraction": work.work_fraction,
        "gathered": work.gathered().to_dict(),
        "losses": curves.losses,
        "parameters": whole(model.named_parameters()),
    }


def main() -> None:
    torch.set_num_threads(1)
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "trainer":
        torch.distributed.init_process_group("gloo")
    found = steps_with_trainer() if kind == "trainer" else steps_with_accelerate(kind)
    torch.save(found, folder / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

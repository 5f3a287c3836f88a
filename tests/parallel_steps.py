# SPDX-License-Identifier: Apache-2.0
"""One model over several processes that share its heads or its sequences, started by ``torchrun``.

torchrun --nproc-per-node 2 tests/parallel_steps.py {tensor,ulysses,trainer,context} CHECKPOINT FOLDER    # writes FOLDER/RANK.pt
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_model import runs_of_tokens
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from mala_hf import MalaConfig, patch_model, record_work

LENGTH, NEW = 256, 6
LEARNING_RATE = 0.1  # of plain gradient descent, so that a wrong scale of the gradients shows
# of all layers tau = 1, of the last by head; four heads, so that each process has two
SETTINGS = MalaConfig(tile=(16, 16), layers={-1: {"heads": {0: 0.1, 2: "sdpa", "3": {"window": 100}}}})


def sequence() -> Tensor:
    """Token ids (1, LENGTH)."""
    return runs_of_tokens(LENGTH, run=12)


def packed_positions() -> Tensor:
    return torch.cat([torch.arange(100), torch.arange(LENGTH - 100)])[None]


def left_padding() -> Tensor:
    mask = torch.ones(1, LENGTH, dtype=torch.long)
    mask[:, :40] = 0
    return mask


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def results_of(model: Any) -> dict[str, Any]:
    """Forward, backward, a padded batch and generation; the report is this process's."""
    ids = sequence()
    with torch.no_grad(), record_work(model) as work:
        logits = model(ids, use_cache=False).logits
        padded = model(ids, attention_mask=left_padding(), use_cache=False).logits
    tokens = model.generate(ids[:, :60], attention_mask=torch.ones(1, 60), max_new_tokens=NEW, do_sample=False)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: whole(weight.grad).clone() for name, weight in model.named_parameters()}
    return {"logits": logits, "padded": padded, "tokens": tokens, "gradients": gradients, "work": work}


def with_tensor_parallelism(checkpoint: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, distributed_config=DistributedConfig(tp_plan="auto"))
    found = results_of(patch_model(model, SETTINGS))
    work = found.pop("work")
    return {**found, "report": str(work), "gathered": work.gathered().to_dict()}


def with_ulysses(checkpoint: Path) -> dict[str, Any]:
    """Each process returns its part of the sequence."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    from mala_hf.sequence_parallel import place_and_size, ulysses

    engine = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 0}}
    plugin = DeepSpeedPlugin(hf_ds_config=engine)
    accelerator = Accelerator(parallelism_config=ulysses(2), deepspeed_plugin=plugin)
    model = patch_model(AutoModelForCausalLM.from_pretrained(checkpoint), SETTINGS).train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    place, size = place_and_size()
    labels = pad(sequence()[:, 1:], (0, 1), value=-100)
    wholes = (sequence(), torch.arange(LENGTH)[None], packed_positions(), labels)
    ids, positions, packed, labels = (x.chunk(size, 1)[place] for x in wholes)
    parts = {"input_ids": ids, "position_ids": positions}
    with torch.no_grad(), record_work(model) as work:
        logits = model(**parts, use_cache=False).logits
    with torch.no_grad():
        of_packed = model(input_ids=ids, position_ids=packed, use_cache=False).logits
    try:
        model(**parts, attention_mask=left_padding()[:, : LENGTH // size], use_cache=False)
    except ValueError as error:
        refused = str(error)
    loss = cross_entropy(model(**parts, use_cache=False).logits[0], labels[0], reduction="sum") / (LENGTH - 1)
    accelerator.backward(loss)
    optimizer.step()
    with torch.no_grad():
        after = model(**parts, use_cache=False).logits
    gathered = work.gathered().to_dict()
    return {"logits": logits, "packed": of_packed, "after": after, "refused": refused, "gathered": gathered}


def with_trainer(checkpoint: Path) -> dict[str, Any]:
    """Trainer over Ulysses; every sample is the same sequence."""
    from mala_hf.sequence_parallel import ulysses

    parallelism = ulysses(2)
    model = patch_model(AutoModelForCausalLM.from_pretrained(checkpoint), SETTINGS)
    sample = {"input_ids": sequence()[0], "labels": sequence()[0], "position_ids": torch.arange(LENGTH)}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=1, parallelism_config=parallelism, report_to="none",
            deepspeed={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}},
            save_strategy="no", logging_steps=1, learning_rate=1e-3, optim="adamw_torch",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=[sample] * 4)
        trainer.train()
    return {"losses": [each["loss"] for each in trainer.state.log_history if "loss" in each]}


def with_context_parallelism(checkpoint: Path) -> dict[str, Any]:
    """Only an error comes back."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    dist.init_process_group("gloo")
    model = patch_model(AutoModelForCausalLM.from_pretrained(checkpoint))
    ids, positions = sequence(), torch.arange(LENGTH)[None]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    messages = []
    for settings in (MalaConfig(), MalaConfig(layers={"*": "sdpa"})):
        patch_model(model, settings)
        with context_parallel(mesh, buffers=[ids, positions], buffer_seq_dims=[1, 1]):
            try:
                model(ids, position_ids=positions, use_cache=False)
            except ValueError as error:
                messages.append(str(error))
    outside = model(ids, use_cache=False).logits
    return {"messages": messages, "outside": outside.detach()}


def main() -> None:
    torch.set_num_threads(1)
    kind, checkpoint, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    kinds = {
        "tensor": with_tensor_parallelism,
        "ulysses": with_ulysses,
        "trainer": with_trainer,
        "context": with_context_parallelism,
    }
    torch.save(kinds[kind](checkpoint), folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama in bfloat16, tensor parallel over the GPUs that torchrun gave, with each attention; on CPUs in float32.

torchrun --nproc-per-node 2 tests/two_gpu_steps.py CHECKPOINT FOLDER    # writes FOLDER/RANK.pt
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_model import runs_of_tokens
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import mala_hf

LENGTH, PROMPT, NEW = 2048, 1500, 16
ATTENTIONS = ("mala", "sdpa")
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def placed(checkpoint: Path, device: torch.device, **options: Any) -> Any:
    """The model of the folder, one part of it where options say so."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, **options).to(device)


def results_of(model: Any, name: str) -> dict[str, Tensor]:
    """Logits and a weight's gradient, float32; greedy tokens after a prompt, and the logits that chose them."""
    model.set_attn_implementation(name)
    model.config.mala = {"discovery": "fused"}  # a prompt this short would go to SDPA
    ids = runs_of_tokens(LENGTH, run=50).to(model.device)
    prompt = ids[:, :PROMPT]
    chosen = model.eval().generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    out = model.train()(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    gradient = dict(model.named_parameters())[WEIGHT].grad
    if hasattr(gradient, "full_tensor"):
        gradient = gradient.full_tensor()
    found = {
        "logits": out.logits.detach().float(),
        "gradient": gradient.float(),
        "steps": torch.stack(chosen.logits, 1).float(),
        "tokens": chosen.sequences[:, PROMPT:],
    }
    model.zero_grad()
    return {key: x.cpu().clone() for key, x in found.items()}


def main() -> None:
    checkpoint, folder = map(Path, sys.argv[1:])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = placed(checkpoint, device, distributed_config=DistributedConfig(tp_plan="auto"))
    found: dict[str, Any] = {name: results_of(model, name) for name in ATTENTIONS}
    with torch.no_grad(), mala_hf.record_work(mala_hf.patch_model(model)) as work:
        model(runs_of_tokens(LENGTH, run=50).to(device), use_cache=False)
    found["heads"] = {name: sorted(layer.taus) for name, layer in work.layers.items()}
    found["gathered"] = work.gathered().to_dict()
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

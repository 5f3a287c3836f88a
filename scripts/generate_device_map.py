# SPDX-License-Identifier: Apache-2.0
"""Generate with a model too large for one GPU, in one process: its layers lie on several GPUs, or wait on the CPU, one after another.

python scripts/generate_device_map.py --model NAME --seqlen 32768 --max-memory 0=40GiB 1=40GiB cpu=100GiB
"""

from __future__ import annotations

import argparse

import parallel_runs as runs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mala_hf import MalaConfig, patch_model, record_work


def build_parser() -> argparse.ArgumentParser:
    parser = runs.build_parser(__doc__)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--max-memory", nargs="*", default=[], metavar="DEVICE=SIZE", help="default: what is free")
    parser.add_argument("--offload-folder", help="for layers that fit in no memory")
    return parser


def memory(limits: list[str]) -> dict[int | str, str] | None:
    """{device: size} of ``DEVICE=SIZE``; a device is a GPU's number or "cpu"."""
    pairs = [limit.partition("=") for limit in limits]
    if not all(device and size for device, _, size in pairs):
        raise ValueError(f"--max-memory takes DEVICE=SIZE, such as 0=40GiB or cpu=100GiB, got {' '.join(limits)}")
    return {int(device) if device.isdecimal() else device: size for device, _, size in pairs} or None


@torch.inference_mode()
def run(options: argparse.Namespace) -> None:
    limits, device = memory(options.max_memory), runs.device_of_process()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = runs.text_windows(tokenizer, options.text, options.seqlen)[:1].to(device)
    model = AutoModelForCausalLM.from_pretrained(
        options.model,
        dtype=runs.dtype_on(device),
        device_map="auto",
        max_memory=limits,
        offload_folder=options.offload_folder,
    )
    patch_model(model, MalaConfig(tau=options.tau))
    with record_work(model) as work:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.new_tokens, do_sample=False
        )
    places = getattr(model, "hf_device_map", {"": model.device})  # without it the whole model is in one place
    runs.say(f"layers on {', '.join(sorted({str(place) for place in places.values()}))}")
    runs.say(repr(tokenizer.decode(out[0, ids.shape[1] :])))
    runs.say(work)


if __name__ == "__main__":
    runs.main(run, build_parser())

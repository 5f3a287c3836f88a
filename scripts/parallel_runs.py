# SPDX-License-Identifier: Apache-2.0
"""What the examples over several processes share: their options, the processes that torchrun started, and text in windows."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mala_hf.text import read_text
from mala_hf.windows import tokenize


def build_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hub name or folder")
    parser.add_argument("--text", help="UTF-8 text, plain or .gz (default: the novel Persuasion)")
    parser.add_argument("--seqlen", type=int, default=8192, help="tokens a sequence (default: 8192)")
    parser.add_argument("--tau", type=float, default=1.0)
    return parser


def add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-5)


def device_of_process() -> torch.device:
    """The GPU of this process; the CPU where torch sees none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def world_size() -> int:
    """How many processes torchrun started.

    Raises:
        ValueError: without torchrun.
    """
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("start it with torchrun --nproc-per-node N")
    return int(os.environ["WORLD_SIZE"])


def start_processes(device: torch.device) -> None:
    """Join the processes that torchrun started, through NCCL or gloo."""
    world_size()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def text_windows(tokenizer: Any, path: str | None, seqlen: int) -> Tensor:
    """Whole windows of the text, ids (n, seqlen)."""
    ids = tokenize(tokenizer, read_text(path)[0])
    if len(ids) < seqlen:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than the {seqlen} of a sequence")
    return ids[: len(ids) // seqlen * seqlen].view(-1, seqlen)


def say(line: object) -> None:
    """Print in the first process."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


def main(run: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    try:
        run(parser.parse_args())
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

# SPDX-License-Identifier: Apache-2.0
"""Workers that attend: what tests/test_workers.py starts in a process of its own. Prints one line of JSON: what each worker found.

python tests/worker_steps.py fork|spawn cpu|cuda
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import zlib

import torch

import mala_hf
from mala_hf.ops import mala_attn_func

WORKERS, ROUNDS = 2, 4


def digest(device: str) -> list[int]:
    """Checksums of outputs and gradients of a few calls."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for seqlen in (70, 130, 1, 33)[:ROUNDS]:
        q, k, v = (
            torch.randn(1, seqlen, heads, 32, generator=generator).to(device).requires_grad_() for heads in (4, 2, 2)
        )
        out = mala_attn_func(q, k, v, causal=True)
        for x in (out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))):
            found.append(zlib.crc32(x.cpu().numpy().tobytes()))
    return found


def work(device: str, queue) -> None:
    """One worker."""
    torch.set_num_threads(1)
    queue.put(digest(device))


class Rows(torch.utils.data.Dataset):
    """Attention inside a data loader, as where a teacher's outputs are prepared there."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> list[int]:
        return digest("cpu")


def main(start: str, device: str) -> None:
    """Start workers while this process has used nothing yet, then use it here too, then in a data loader."""
    assert not torch.cuda.is_initialized(), f"importing {mala_hf.__name__} initialised CUDA: no fork could use it"
    torch.set_num_threads(1)
    context = multiprocessing.get_context(start)
    queue = context.SimpleQueue()
    processes = [context.Process(target=work, args=(device, queue)) for _ in range(WORKERS)]
    for process in processes:
        process.start()
    found = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    own = digest(device)
    # after this process has used it (and CUDA): workers on the CPU
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=None, num_workers=1, multiprocessing_context=context, timeout=120
    )
    loaded = [list(map(int, row)) for row in loader]
    print(json.dumps({"workers": found, "own": own, "loaded": loaded, "cpu": digest("cpu")}))


if __name__ == "__main__":
    main(*sys.argv[1:])

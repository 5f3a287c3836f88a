# SPDX-License-Identifier: Apache-2.0
"""Two small kernels for Triton's concurrency sanitizer: one that waits for its copy, and one that reads before it must have arrived.

python scripts/consan_control.py waits    # ends with 0
python scripts/consan_control.py races    # must not, where the sanitizer watches
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SIZE = 64


@gluon.jit
def copy_kernel(x_desc, out_ptr, SIZE: gl.constexpr, WAITS: gl.constexpr):
    """One tile (SIZE, SIZE) by the tensor-memory accelerator to shared memory, and from there to ``out_ptr``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [0, 0], ready, tile)
    if WAITS:
        mbarrier.wait(ready, 0)
    x = tile.load(layout)
    if not WAITS:
        mbarrier.wait(ready, 0)
    mbarrier.invalidate(ready)
    rows = gl.arange(0, SIZE, gl.SliceLayout(1, layout))
    columns = gl.arange(0, SIZE, gl.SliceLayout(0, layout))
    gl.store(out_ptr + rows[:, None] * SIZE + columns[None, :], x)


def main(waits: bool) -> None:
    """Run it."""
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    x = torch.randn(SIZE, SIZE, device="cuda").half()
    out = torch.empty_like(x)
    layout = gl.NVMMASharedLayout.get_default_for([SIZE, SIZE], gl.float16)
    copy_kernel[(1,)](TensorDescriptor.from_tensor(x, [SIZE, SIZE], layout), out, SIZE, waits, num_warps=4)
    torch.cuda.synchronize()
    if waits and not torch.equal(out, x):
        raise SystemExit("the copy is wrong")


if __name__ == "__main__":
    main({"waits": True, "races": False}[sys.argv[1]])

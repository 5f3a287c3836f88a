# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4, the package flash-attn-4, for dense calls on Hopper, where it is installed.

It is offered to ``ops/dense.py`` and takes the calls that it was measured on (results/operator_peers_h200.json and
operator_fa4_h200.json), in float16 too; all others stay as they are, and so do those whose gradient is taken
(``ops/cudnn_plans.py`` says why). It is imported at the first call that it covers. It compiles kernels at the first call of a kind,
so a CUDA graph records it only for a call that has run before. Started one by one, its calls take the host longer than cuDNN's and
less than those of MALA's own kernel (``eager_ms`` there).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec

import torch
from torch import Tensor

from .ops.choice_memory import remembers
from .ops.cudnn_plans import is_capturing
from .ops.discover_choice import is_measured

HEAD_DIMS = (64, 128)
ALIGNMENT = 16  # bytes, of addresses and strides that Hopper's tensor-memory accelerator reads
MAX_CALLS = 1024


class FlashAttention4:
    """The kernel as ``ops.dense.DenseKernel`` has it, and what is known of it in this process.

    Attributes:
        is_used: False where it was switched off, or has failed.
    """

    name = "FlashAttention-4"

    def __init__(self) -> None:
        self.is_used = True
        self._ran: OrderedDict[tuple, None] = OrderedDict()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float
    ) -> tuple[Tensor, Tensor] | None:
        """out and lse, as ``ops.dense.dense_attention_with_lse`` returns them; None where another kernel has to run.

        A failure is warned about, and then it is left alone.
        """
        if not (self.is_used and is_installed() and causal and covers(q, k, v)):
            return None
        # lengths too: they may decide what is compiled
        call = (softmax_scale, *((x.shape, x.stride(), x.dtype, x.device) for x in (q, k, v)))
        if is_capturing() and call not in self._ran:
            return None
        try:
            out, lse = _attention(q, k, v, softmax_scale)
        except torch.OutOfMemoryError:  # no other kernel needs less
            raise
        except Exception as error:  # a package that is there but broken may raise anything
            self.is_used = False
            what = next(iter(str(error).strip().splitlines()), "")
            warnings.warn(
                f"FlashAttention-4 is installed and failed, so dense calls leave it alone from now on ({type(error).__name__}: "
                f"{what}). mala_hf.use_flash_attn_4() tries again, mala_hf.use_flash_attn_4(False) never asks for it.",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        self._ran[call] = None
        self._ran.move_to_end(call)
        if len(self._ran) > MAX_CALLS:
            self._ran.popitem(last=False)
        return out, lse


kernel = FlashAttention4()


def use_flash_attn_4(use: bool = True) -> None:
    """Whether dense calls of this process may run by FlashAttention-4 where it is installed, as they do by default.

    True also tries again what has failed. ``Work.choices`` says of each call which kernel it was.
    """
    kernel.is_used = use


@cache
def is_installed() -> bool:
    """Whether there is a flash_attn.cute; imports nothing, also not the flash_attn around it, which may be another package's."""
    try:
        package = find_spec("flash_attn")
    except ValueError:  # something in sys.modules that was not imported
        return False
    places = None if package is None else package.submodule_search_locations
    return places is not None and PathFinder.find_spec("flash_attn.cute", places) is not None


def covers(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether causal attention of these was measured, and no gradient is taken. Reads no content."""
    return (
        q.shape[1] == k.shape[1] > 1
        and q.shape[3] == v.shape[3]
        and q.shape[3] in HEAD_DIMS
        and q.dtype in (torch.bfloat16, torch.float16)
        and is_measured(q.device)
        and all(is_aligned(x) for x in (q, k, v))
        and remembers(q, k, v)
        and not torch.compiler.is_compiling()
    )


def is_aligned(x: Tensor) -> bool:
    """Whether the tensor-memory accelerator can read x (batch, seqlen, heads, head_dim)."""
    strides = [stride * x.element_size() for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
    return (
        x.stride(3) == 1
        and x.data_ptr() % ALIGNMENT == 0
        and all(stride > 0 and stride % ALIGNMENT == 0 for stride in strides)
    )


def _attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    run = import_module("flash_attn.cute").flash_attn_func
    with torch.cuda.device_of(q):  # some releases launch on the current device
        out, lse = run(q, k, v, softmax_scale=softmax_scale, causal=True, return_lse=True)
    if out.shape != q.shape or lse is None or lse.shape != (q.shape[0], q.shape[2], q.shape[1]):
        raise TypeError("this release returns another out or lse than the one that mala_hf was written for")
    return out.contiguous(), lse.float().contiguous()

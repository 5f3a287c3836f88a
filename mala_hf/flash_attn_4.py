# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4, the package flash-attn-4, for dense calls on Hopper, where it is installed.

It is offered to ``ops/dense.py`` and takes calls of the kind that was measured: causal attention of head_dim 64 or 128 on Hopper.
Results are of bfloat16 and 16 heads (results/operator_peers_h200.json, operator_fa4_h200.json); float16 and other numbers of heads
count as the same kind. All others stay as they are, and so do those whose gradient is taken (``ops/cudnn_plans.py`` says why). It is
imported at the first call that it covers. It compiles kernels at the first call of a kind, so a CUDA graph records it only for a call
that has run before.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from threading import Lock

import torch
from torch import Tensor

from .ops.choice_memory import remembers
from .ops.cudnn_plans import is_capturing
from .ops.discover_choice import is_measured

PACKAGE = "flash-attn-4"
HEAD_DIMS = (64, 128)
ALIGNMENT = 16  # bytes, of addresses and strides that Hopper's tensor-memory accelerator reads
MAX_CALLS = 1024


class FlashAttention4:
    """The kernel as ``ops.dense.DenseKernel`` has it, and what is known of it in this process.

    Attributes:
        is_used: False where it was switched off, or could not be imported.
    """

    name, impl = "FlashAttention-4", "flash_attn_4"

    def __init__(self) -> None:
        self._ran: OrderedDict[tuple, None] = OrderedDict()
        self._lock = Lock()
        self.use(True)

    def use(self, use: bool) -> None:
        """Switch it on or off; on, what has failed is tried again."""
        self.is_used = use
        self._failed: set[tuple] = set()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float
    ) -> tuple[Tensor, Tensor] | None:
        """out and lse, as ``ops.dense.dense_attention_with_lse`` returns them; None where another kernel has to run.

        A failure is warned about, and calls of its kind are left alone then; all calls where the package does not import.
        """
        if not (self.is_used and is_installed() and causal and covers(q, k, v)):
            return None
        kind = (q.dtype, q.device, q.shape[3], q.shape[2] // k.shape[2])
        # lengths too: they may decide what is compiled
        call = (softmax_scale, *((x.shape, x.stride(), x.dtype, x.device) for x in (q, k, v)))
        if kind in self._failed or (is_capturing() and call not in self._ran):
            return None
        function = None
        try:
            function = import_module("flash_attn.cute").flash_attn_func
            out, lse = _attention(function, q, k, v, softmax_scale)
        except torch.OutOfMemoryError:  # no other kernel needs less
            raise
        except Exception as error:  # a package that is there but broken may raise anything
            self.is_used = function is not None
            self._failed.add(kind)
            what = next(iter(str(error).strip().splitlines()), "")
            calls = (
                f"dense calls of {q.dtype}, head_dim {q.shape[3]} and {kind[3]} query heads to a KV head"
                if function
                else "dense calls"
            )
            warnings.warn(
                f"FlashAttention-4 is installed and failed, so {calls} leave it alone from now on ({type(error).__name__}: {what}). "
                "mala_hf.use_flash_attn_4() tries again, mala_hf.use_flash_attn_4(False) never asks for it.",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        with self._lock:
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
    kernel.use(use)


@cache
def is_installed() -> bool:
    """Whether the package is there, and not FlashAttention-2 alone, which has a folder of that name; imports nothing of either."""
    try:
        version(PACKAGE)
        package = find_spec("flash_attn")
    except (PackageNotFoundError, ValueError):  # ValueError: something in sys.modules that was not imported
        return False
    places = None if package is None else package.submodule_search_locations
    return places is not None and PathFinder.find_spec("flash_attn.cute", places) is not None


def covers(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these are inputs of the kind that was measured, and no gradient is taken. Reads no content."""
    return (
        q.numel() > 0
        and q.shape[1] == k.shape[1] > 1
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


def _attention(function: Callable, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(q):  # some releases launch on the current device
        out, lse = function(q, k, v, softmax_scale=softmax_scale, causal=True, return_lse=True)
    if out.shape != q.shape or lse is None or lse.shape != (q.shape[0], q.shape[2], q.shape[1]):
        raise TypeError("this release returns another out or lse than the one that mala_hf was written for")
    return out.contiguous(), lse.float().contiguous()

# SPDX-License-Identifier: Apache-2.0
"""Starts Triton kernels with less work for the host: their compiled form is found by a key of the caller's.

Triton looks at every argument of every call to find it, which for a kernel of fifty takes longer than starting it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

INT32_END = 2**31
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


class CachedKernel:
    """A ``triton.jit`` function that specialises on no number.

    A call's ``key`` stands for the types of its tensors and numbers, whether they are there, and alignment; constants and options are
    read.
    """

    __slots__ = ("compiled", "constants", "kernel", "names")  # so that a method is replaced for all kernels or none

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.names = kernel.arg_names
        self.compiled: dict[tuple, CompiledKernel] = {}
        # the interpreter's kernels do not say which of their parameters are constants, and are not compiled
        self.constants = [parameter.name for parameter in getattr(kernel, "params", []) if parameter.is_constexpr]

    def launch(self, grid: tuple[int, ...], key: tuple, arguments: dict[str, Any]) -> None:
        """Run over ``grid``; ``arguments`` by name, launch options among them."""
        values = [arguments[name] for name in self.names]
        constants = tuple([arguments[name] for name in self.constants])
        whole = (key, constants, *[arguments.get(option) for option in OPTIONS])
        compiled = self.compiled.get(whole)
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*values)
            return
        compiled = self.kernel[grid](**arguments)
        if isinstance(compiled, CompiledKernel):  # the interpreter has none
            self.compiled[whole] = compiled


def key_of(*tensors: Tensor | None) -> tuple:
    """Of each tensor what compilation depends on: type, device, whether it begins at a multiple of 16 bytes, strides beyond 32 bits."""
    return tuple(
        [None if x is None else (x.dtype, x.device.index, x.data_ptr() % 16, _wide_strides(x)) for x in tensors]
    )


def _wide_strides(x: Tensor) -> tuple[int, ...] | None:
    strides = x.stride()
    return strides if max(strides, default=0) >= INT32_END else None  # numbers of another type

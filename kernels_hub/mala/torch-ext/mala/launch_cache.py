# SPDX-License-Identifier: Apache-2.0
"""Starts Triton kernels with less work for the host: their compiled form is found by a key of the caller's.

Triton looks at every argument of every call to find it, which for a kernel of fifty takes longer than starting it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

INT32_END = 2**31
OPTIONS = ("num_warps", "num_stages", "launch_pdl")


class CachedKernel:
    """A ``triton.jit`` function that specialises on no number.

    A call's ``key`` stands for the types of its tensors, whether they are there, and their alignment; constants and options are read.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.names = kernel.arg_names
        self.compiled: dict[tuple, CompiledKernel] = {}
        # the interpreter's kernels do not say which of their parameters are constants, and are not compiled
        self.constants = [parameter.name for parameter in getattr(kernel, "params", []) if parameter.is_constexpr]

    def launch(self, grid: tuple[int, int], key: tuple, arguments: dict[str, Any]) -> None:
        """Run over ``grid``; ``arguments`` by name, launch options among them."""
        kernel = self.kernel
        values = [arguments[name] for name in self.names]
        if any(type(value) is int and value >= INT32_END for value in values):  # another type
            kernel[grid](**arguments)
            return
        constants = tuple([arguments[name] for name in self.constants])
        whole = (key, constants, *[arguments.get(option) for option in OPTIONS])
        compiled = self.compiled.get(whole)
        if compiled is not None:
            compiled[(*grid, 1)](*values)
            return
        compiled = kernel[grid](**arguments)
        if isinstance(compiled, CompiledKernel):  # the interpreter has none
            self.compiled[whole] = compiled


def key_of(*tensors: Tensor | None) -> tuple:
    """Of each tensor what compilation depends on: its type, device, and whether it begins at a multiple of 16 bytes."""
    return tuple([None if x is None else (x.dtype, x.device.index, x.data_ptr() % 16 == 0) for x in tensors])

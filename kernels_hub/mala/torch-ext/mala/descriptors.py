# SPDX-License-Identifier: Apache-2.0
"""Descriptors by which a portable kernel reads tiles through the tensor-memory accelerator."""

from __future__ import annotations

from torch import Tensor

from .tma import by_head_view


def descriptor(x: Tensor, rows: int, width: int):
    """For tiles (rows, width) of x (batch, seqlen, heads, head_dim)."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # absent before triton 3.4

    shape, strides = by_head_view(x)
    return TensorDescriptor(x, shape, strides, [1, 1, rows, width])

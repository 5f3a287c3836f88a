# SPDX-License-Identifier: Apache-2.0
"""What the tensor-memory accelerator of Hopper and later can read, and how a tensor is described to it."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
HAS_DESCRIPTORS = TRITON_VERSION >= (3, 4)
HAS_GLUON_FOR_HOPPER = TRITON_VERSION >= (3, 6)  # older ones are untried


@cache
def nvidia_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) for every other device."""
    if device.type != "cuda" or torch.version.hip:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def nvidia_major(device: torch.device) -> int:
    """Major compute capability of an NVIDIA GPU; 0 for every other device."""
    return nvidia_capability(device)[0]


def has_tma(x: Tensor) -> bool:
    """Should the accelerator read x (batch, seqlen, heads, head_dim)? Its address and strides must be multiples of 16 bytes.

    float32 is read through pointers: its products run without tensor cores, and shared-memory operands make them spill.
    """
    if not HAS_DESCRIPTORS or nvidia_major(x.device) < 9 or x.numel() == 0 or x.element_size() > 2:
        return False
    strides = [stride * x.element_size() for stride, size in zip(x.stride()[:-1], x.shape) if size > 1]
    return x.data_ptr() % 16 == 0 and all(stride > 0 and stride % 16 == 0 for stride in strides)


def by_head_view(x: Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of x (batch, seqlen, heads, head_dim) as (batch, heads, seqlen, head_dim), for a descriptor."""
    by_head = x.transpose(1, 2)
    unused = by_head.shape[-1] * 16  # a dimension of size 1 needs a valid stride, whatever its own
    strides = [stride if size > 1 else unused for stride, size in zip(by_head.stride()[:-1], by_head.shape)]
    return list(by_head.shape), [*strides, 1]

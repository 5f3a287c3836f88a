# SPDX-License-Identifier: Apache-2.0
"""New keys into the INT8 plane, in place and in one launch; ``key_plane.quantized`` in Triton."""

from __future__ import annotations

import contextlib
from typing import Union

import torch
import triton
import triton.language as tl
from torch import Tensor

from .key_plane import (
    LARGEST,
    LARGEST_COVERED,
    LOST_SQUARES,
    MORE_TERMS,
    NORM_ROUNDING,
    PRODUCT_ROUNDING,
    SMALLEST_KEY,
    KeyPlane,
)
from .tile_config import padded_head_dim

RUNTIME_VALUES = [
    "stride_kb", "stride_ks", "stride_kh", "stride_pb", "stride_ph", "stride_ps", "stride_nb", "stride_nh", "start", "num_new",
    "num_kv_heads",
]  # fmt: skip
FEW, MANY = 16, 32  # keys of a program
LARGEST_INT8 = tl.constexpr(LARGEST)
SMALLEST, COVERED = tl.constexpr(SMALLEST_KEY), tl.constexpr(LARGEST_COVERED)
TERM, MORE = tl.constexpr(PRODUCT_ROUNDING), tl.constexpr(MORE_TERMS)
NORM, SQUARES = tl.constexpr(NORM_ROUNDING), tl.constexpr(LOST_SQUARES)


@triton.jit(do_not_specialize=RUNTIME_VALUES)
def write_plane_kernel(
    k_ptr, quantized_ptr, scales_ptr, residuals_ptr, starts_ptr,
    stride_kb, stride_ks, stride_kh, stride_pb, stride_ph, stride_ps, stride_nb, stride_nh, start, num_new, num_kv_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STRIDE_UNIT: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """BLOCK_N new keys of one KV head of one sequence."""
    new = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1) % num_kv_heads
    batch = tl.program_id(1) // num_kv_heads
    head, batch64 = head.to(tl.int64), batch.to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    exists = new < num_new
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (
        batch64 * (stride_kb * STRIDE_UNIT)
        + head * (stride_kh * STRIDE_UNIT)
        + new.to(tl.int64) * (stride_ks * STRIDE_UNIT)
    )
    k = tl.load(k_ptr + rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    # a maximum passes over a NaN
    covered = tl.max((~(tl.abs(k) <= COVERED)).to(tl.int32), 1) == 0
    k = tl.where(covered[:, None], k, 0.0)
    largest = tl.max(tl.abs(k), 1)
    scale = largest * (1 / LARGEST_INT8)
    is_zero = largest <= SMALLEST
    inverse = tl.where(is_zero, 0.0, LARGEST_INT8 / tl.where(is_zero, 1.0, largest))
    rounded = tl.floor(k * inverse[:, None] + 0.5)
    lost = k - rounded * scale[:, None]
    lost_norm, norm = tl.sqrt(tl.sum(lost * lost, 1)), tl.sqrt(tl.sum(k * k, 1))
    residual = (lost_norm + norm * ((HEAD_DIM + MORE) * TERM) + HEAD_DIM**0.5 * SQUARES) * (1 + NORM)
    first = start
    if HAS_STARTS:
        first = tl.load(starts_ptr + batch)
    places = (first + new).to(tl.int64)
    of_plane = batch64 * stride_pb + head * stride_ph + places * stride_ps
    tl.store(quantized_ptr + of_plane[:, None] + dims[None, :], rounded.to(tl.int8), mask=mask)
    of_numbers = batch64 * stride_nb + head * stride_nh + places
    tl.store(scales_ptr + of_numbers, scale, mask=exists)
    tl.store(residuals_ptr + of_numbers, tl.where(covered, residual, float("inf")), mask=exists)


def launch_write_plane(k: Tensor, plane: KeyPlane, start: Union[int, Tensor]) -> None:
    """k (batch, new, num_kv_heads, head_dim), any strides, last dimension contiguous; ``start`` one, or (batch,)."""
    batch, new, num_kv_heads, head_dim = k.shape
    if not k.numel():
        return
    unit = 8 if all(stride % 8 == 0 for stride in k.stride()[:3]) else 1
    stride_kb, stride_ks, stride_kh = (stride // unit for stride in k.stride()[:3])
    block_n = FEW if new <= FEW else MANY
    each = isinstance(start, Tensor)
    with torch.cuda.device(k.device) if k.is_cuda else contextlib.nullcontext():
        write_plane_kernel[(triton.cdiv(new, block_n), batch * num_kv_heads)](
            k, *plane.tensors, start if each else None, stride_kb, stride_ks, stride_kh, *plane.quantized.stride()[:3],
            *plane.scales.stride()[:2], 0 if each else start, new, num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim),
            BLOCK_N=block_n, STRIDE_UNIT=unit, HAS_STARTS=each, num_warps=4,
        )  # fmt: skip

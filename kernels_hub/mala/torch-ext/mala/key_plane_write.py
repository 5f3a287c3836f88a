# SPDX-License-Identifier: Apache-2.0
"""The public function that keeps an INT8 plane beside a cache, and the operator behind it."""

from typing import Optional, Union

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix
from .call_options import implementation_of
from .checks import check_lengths
from .key_plane import KeyPlane, check_key_plane, quantized
from .operators import needs_operator


def quantize_keys(
    k: Tensor, plane: Optional[KeyPlane] = None, start: Union[int, Tensor] = 0, *, impl: str = "auto"
) -> KeyPlane:
    """Write keys into an INT8 plane, in place.

    Args:
        k: (batch, new, num_kv_heads, head_dim), float32, float16 or bfloat16; any strides, last dimension contiguous.
        plane: where to; keys ``start`` to ``start + new - 1`` of it. None: a new plane of these keys alone.
        start: for all sequences, or int (batch,) for each.
        impl: "triton", "blockwise" (PyTorch), or "auto": the kernel on a GPU. There a number halfway between two of INT8, and the last
            bits of a residual, may come out otherwise than on the CPU: the bound holds for each.

    Returns:
        ``plane``, for ``key_plane`` of :func:`mala_attn_func` and :func:`mala_attn_with_kvcache_func`.

    Raises:
        ValueError: for keys that do not fit.
    """
    if not isinstance(k, Tensor) or k.ndim != 4 or not k.is_floating_point():
        got = f"{k.dtype} {tuple(k.shape)}" if isinstance(k, Tensor) else type(k).__name__
        raise ValueError(f"k must be floating-point (batch, new, num_kv_heads, head_dim), got {got}")
    if k.numel() and k.shape[-1] > 1 and k.stride(-1) != 1:
        raise ValueError(f"k's last dimension must be contiguous, got strides {k.stride()}: call .contiguous()")
    batch, new, num_kv_heads, head_dim = k.shape
    impl = implementation_of(impl, k)
    if impl == "reference":
        raise ValueError("impl must be 'auto', 'triton' or 'blockwise': the definition is what 'blockwise' computes")
    if plane is None:
        plane = KeyPlane.empty(batch, num_kv_heads, new, head_dim, k.device)
    check_key_plane(plane, batch, num_kv_heads, None, head_dim, k.device)
    room = plane.quantized.shape[2]
    if isinstance(start, Tensor):
        readable = None if torch.compiler.is_compiling() else room - new
        check_lengths(batch, k.device, readable, start=start)
    elif isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= room - new:
        raise ValueError(f"start must be between 0 and {room - new}, where {new} keys fit into {room}, got {start!r}")
    starts, start = (start, 0) if isinstance(start, Tensor) else (None, start)
    write = write_plane if needs_operator([k]) else write_plane._init_fn
    write(k.detach(), *plane.tensors, starts, start, impl)
    return plane


@torch.library.custom_op(add_op_namespace_prefix("write_plane"), mutates_args=("values", "scales", "residuals"))
def write_plane(
    k: Tensor, values: Tensor, scales: Tensor, residuals: Tensor, starts: Optional[Tensor], start: int, impl: str
) -> None:
    """k (batch, new, num_kv_heads, head_dim) into a plane's tensors, at ``starts`` (batch,) or for all at ``start``."""
    plane = KeyPlane(values, scales, residuals)
    if impl == "triton":
        from .key_plane_kernel import launch_write_plane  # triton is needed only here

        launch_write_plane(k, plane, start if starts is None else starts)
        return
    found = quantized(k.transpose(1, 2))  # (batch, num_kv_heads, new, ...)
    new = k.shape[1]
    for x, part in zip(plane.tensors, found):
        if starts is None:
            x[:, :, start : start + new] = part
        else:
            places = starts.long()[:, None] + torch.arange(new, device=k.device)
            x.transpose(1, 2)[torch.arange(len(k), device=k.device)[:, None], places] = part.transpose(1, 2)


@write_plane.register_fake
def _(k, values, scales, residuals, starts, start, impl) -> None:
    return None

# SPDX-License-Identifier: Apache-2.0
"""What the public functions accept; each refusal says what was got and what to use instead."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
LARGEST_NUMBER = 1e308  # that a float holds
MAX_SOFTCAP = 1000  # the kernels' tanh loses a digit for each further power of ten


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor], ndim: int, shares_batch: bool = True
) -> None:
    """q, k, v share dtype, device, batch (but for caches in pages), and head counts that divide; ``ndim``: 4 (fixed) or 3 (packed)."""
    layout = "(batch, seqlen, heads, head_dim)" if ndim == 4 else "(total, heads, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor {layout}, got {type(x).__name__}")
        if x.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions {layout}, got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be float16, bfloat16, float32 (or float64 without Triton), got {x.dtype}")
        if x.dtype != q.dtype:
            raise ValueError(f"q, k and v must share a dtype, got q {q.dtype} and {name} {x.dtype}: cast them to one")
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device, got q on {q.device} and {name} on {x.device}")
        if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"{name}'s last dimension must be contiguous, got strides {x.stride()}: call .contiguous()"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v must agree in all but head_dim, got {tuple(k.shape)} and {tuple(v.shape)}")
    if ndim == 4 and shares_batch and q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must share the batch size, got {q.shape[0]} and {k.shape[0]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must share head_dim, got {q.shape[-1]} and {k.shape[-1]}")
    num_heads, num_kv_heads = q.shape[-2], k.shape[-2]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"the number of key-value heads must divide that of query heads, got {num_heads} and {num_kv_heads}"
        )
    for name, dim in (("head_dim", q.shape[-1]), ("value head_dim", v.shape[-1])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name} must be 1 to {MAX_HEAD_DIM}, got {dim}")
    if sinks is not None:
        if not isinstance(sinks, Tensor):
            raise ValueError(f"sinks must be a tensor ({num_heads},), got {type(sinks).__name__}")
        if sinks.shape != (num_heads,) or not sinks.is_floating_point():
            raise ValueError(f"sinks must be floating-point ({num_heads},), got {sinks.dtype} {tuple(sinks.shape)}")
        if sinks.device != q.device:
            raise ValueError(f"sinks must be on q's device {q.device}, got {sinks.device}")


def check_flags(**flags: bool) -> None:
    """Each is True or False, not something that happens to count as one."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")


def is_number(x) -> bool:
    """A Python number that is finite as a float."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < LARGEST_NUMBER


def _are_integers(x, least: int) -> bool:
    return (
        isinstance(x, (tuple, list))
        and len(x) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= least for n in x)
    )


def refused_number(name: str, wanted: str, x) -> str:
    """The message that refuses x; what is no Python number is called so, and integers beyond all floats are not written out."""
    if not isinstance(x, (int, float)) or isinstance(x, bool):
        got = " ".join(repr(x).split())[:60]
        return f"{name} must be {wanted}, and a Python number (int or float), got {got} of type {type(x).__name__}"
    got = repr(x) if isinstance(x, float) or abs(x) < LARGEST_NUMBER else "an integer beyond the range of floats"
    return f"{name} must be {wanted}, got {got}"


def check_numbers(*, tau: float, softmax_scale: float, softcap: float, window, tile) -> None:
    """tau >= 0, finite positive scale, softcap 0 to MAX_SOFTCAP, a window of two ints >= -1, a tile of two powers of two."""
    if not is_number(tau) or not tau >= 0:
        raise ValueError(refused_number("tau", "a finite number >= 0 (0 is full attention, 1 canonical)", tau))
    if not is_number(softmax_scale) or not softmax_scale > 0:
        raise ValueError(refused_number("softmax_scale", "finite and > 0", softmax_scale))
    if not is_number(softcap) or not 0 <= softcap <= MAX_SOFTCAP:
        wanted = f"0 (none) to {MAX_SOFTCAP}, beyond which it caps nothing"
        raise ValueError(refused_number("softcap", wanted, softcap))
    if not _are_integers(window, -1):
        raise ValueError(f"window must be two integers (left, right) >= -1 (-1: unlimited), got {window!r}")
    if tile is not None and not (_are_integers(tile, 1) and all(n & (n - 1) == 0 for n in tile)):
        raise ValueError(f"tile must be two powers of two (BLOCK_M, BLOCK_N), got {tile!r}")


def check_lengths(count: int, device: torch.device, longest: Optional[int] = None, **lengths: Optional[Tensor]) -> None:
    """Each given length tensor is integer, (count,), on ``device``, and where it can be read without waiting, 0 to ``longest``."""
    for name, x in lengths.items():
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64) or x.shape != (count,):
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
            raise ValueError(f"{name} must be an int32 or int64 tensor ({count},), got {got}")
        if x.device != device:
            raise ValueError(f"{name} must be on q's device {device}, got {x.device}")
        if longest is not None and x.device.type == "cpu" and not bool(((x >= 0) & (x <= longest)).all()):
            raise ValueError(f"{name} must be between 0 and {longest}, got {x.tolist()}")


def check_boundaries(total: int, name: str, cu_seqlens: Tensor, max_seqlen: Optional[int]) -> int:
    """The longest packed sequence. Where the boundaries can be read without waiting for a device, or must be, they are checked."""
    if max_seqlen is not None and cu_seqlens.device.type != "cpu":
        return max_seqlen
    boundaries = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(boundaries, boundaries[1:])]
    if not boundaries or boundaries[0] != 0 or boundaries[-1] > total or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens_{name} must start at 0, never fall, and end within {total} rows, got {boundaries}"
        )
    longest = max(lengths, default=0)
    if max_seqlen is not None and max_seqlen < longest:
        raise ValueError(f"max_seqlen_{name} is {max_seqlen}, but a sequence has length {longest}")
    return longest if max_seqlen is None else max_seqlen


def check_cache(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor) -> None:
    """New keys and values fit the caches they are written into; on a GPU a full cache shows as an index error of the device."""
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if cache.requires_grad or (torch.is_grad_enabled() and getattr(new, "requires_grad", False)):
            raise ValueError(f"{name}_cache is written in place: it and {name} cannot require a gradient")
        if not isinstance(new, Tensor) or new.ndim != 4 or new.dtype != cache.dtype or new.device != cache.device:
            got = f"{new.dtype} {tuple(new.shape)} on {new.device}" if isinstance(new, Tensor) else type(new).__name__
            raise ValueError(f"{name} must have 4 dimensions and {name}_cache's dtype and device, got {got}")
        if (new.shape[0], *new.shape[2:]) != (cache.shape[0], *cache.shape[2:]):
            raise ValueError(
                f"{name} must fit {name}_cache {tuple(cache.shape)} but for its length, got {tuple(new.shape)}"
            )
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k and v must have one length, got {k.shape[1]} and {v.shape[1]}")
    if not torch.compiler.is_compiling() and cache_seqlens.device.type == "cpu" and cache_seqlens.numel():
        longest = int(cache_seqlens.max()) + k.shape[1]
        if longest > k_cache.shape[1] or int(cache_seqlens.min()) < 0:
            raise ValueError(f"the cache has room for {k_cache.shape[1]} keys, needed are {longest}")


def normalized_mask(mask: Optional[Tensor], q: Tensor, k: Tensor, has_lengths: bool) -> Optional[Tensor]:
    """``mask`` as bool (batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k), checked against q and k."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask must be a bool tensor, got {type(mask).__name__}")
    target = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool (True: may attend), got {mask.dtype}; additive biases are not supported")
    if has_lengths:
        raise ValueError("mask and seqused_q / seqused_k / leftpad_k cannot be combined: put the lengths into the mask")
    if mask.device != q.device:
        raise ValueError(f"mask must be on q's device {q.device}, got {mask.device}")
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if mask.ndim > 4 or any(have not in (1, want) for have, want in zip(shape, target)):
        raise ValueError(
            f"mask must be broadcastable to (batch, num_heads, seqlen_q, seqlen_k) = {target}, got {tuple(mask.shape)}"
        )
    mask = mask.reshape(shape)
    return mask.expand(-1, -1, -1, target[3])

# SPDX-License-Identifier: Apache-2.0
"""A cache in pages: (num_pages, page_size, num_kv_heads, dim), and a table (batch, pages) of each sequence's pages in order."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_lengths


def check_pages(q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, new: int) -> None:
    """Raise ``ValueError`` unless the table and the caches fit, with room for ``new`` tokens behind ``cache_seqlens``.

    The pages themselves are looked at where that waits for no device.
    """
    is_table = isinstance(block_table, Tensor) and block_table.dtype in (torch.int32, torch.int64)
    if not is_table or block_table.ndim != 2 or block_table.shape[0] != q.shape[0]:
        got = (
            f"{block_table.dtype} {tuple(block_table.shape)}" if isinstance(block_table, Tensor) else repr(block_table)
        )
        raise ValueError(f"block_table must be an int32 or int64 tensor (batch = {q.shape[0]}, pages), got {got}")
    if block_table.device != q.device:
        raise ValueError(f"block_table must be on q's device {q.device}, got {block_table.device}")
    if k_cache.ndim != 4:
        raise ValueError(
            f"with a block_table the caches are (num_pages, page_size, num_kv_heads, head_dim), got {tuple(k_cache.shape)}"
        )
    room = block_table.shape[1] * k_cache.shape[1]
    readable = None if torch.compiler.is_compiling() else room - new
    check_lengths(q.shape[0], q.device, readable, cache_seqlens=cache_seqlens)
    if cache_seqlens is None:
        raise ValueError("a cache in pages needs cache_seqlens, the filled length of each sequence")
    if block_table.device.type == "cpu" and not torch.compiler.is_compiling():
        filled = torch.arange(block_table.shape[1]) * k_cache.shape[1] < (cache_seqlens + new)[:, None]
        wrong = filled & ((block_table < 0) | (block_table >= len(k_cache)))
        if wrong.any():
            raise ValueError(
                f"block_table names pages {block_table[wrong].tolist()[:3]} for filled keys; there are pages 0 to {len(k_cache) - 1}"
            )


def write_pages(k_cache, v_cache, k: Tensor, v: Tensor, block_table: Tensor, cache_seqlens: Tensor) -> None:
    """Put k and v (batch, new, num_kv_heads, ...) behind the cached tokens of their sequences."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, k_cache, v_cache)):
        raise ValueError("the caches are written in place: they, k and v cannot require a gradient")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        fits = len(block_table), k.shape[1], *cache.shape[2:]
        if tuple(new.shape) != fits or new.dtype != cache.dtype:
            raise ValueError(
                f"{name} must be {cache.dtype} {fits} to fit the cache, got {new.dtype} {tuple(new.shape)}"
            )
    page_size = k_cache.shape[1]
    position = cache_seqlens.long()[:, None] + torch.arange(k.shape[1], device=k.device)  # (batch, new)
    page = block_table.long().gather(1, position // page_size)
    k_cache[page, position % page_size] = k
    v_cache[page, position % page_size] = v


def gathered(cache: Tensor, block_table: Tensor) -> Tensor:
    """The pages of each sequence in one piece, (batch, pages * page_size, num_kv_heads, dim): a copy."""
    # tables are filled up with -1, the last page: whatever it holds lies behind the filled keys
    return cache[block_table.long()].flatten(1, 2)

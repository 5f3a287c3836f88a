# SPDX-License-Identifier: Apache-2.0
"""The public function over caches, in one piece or in pages."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .attend import Call, attend
from .call_options import (
    check_call_flags,
    discovery_of,
    if_readable,
    implementation_of,
    may_keep_all,
    returned,
    settings_of,
)
from .checks import check_cache, check_lengths, check_tensors
from .decode_choice import decode_call
from .key_plane import KeyPlane
from .key_plane_write import quantize_keys
from .paged import check_pages, gathered, write_pages
from .visibility import fixed_sequences


def mala_attn_with_kvcache_func(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    *,
    cache_seqlens: Tensor,
    leftpad_k: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    tau: float = 1.0,
    causal: bool = True,
    softmax_scale: Optional[float] = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Optional[Tensor] = None,
    tile: Optional[tuple[int, int]] = None,
    impl: str = "auto",
    discovery: str = "auto",
    decode: str = "auto",
    num_splits: int = 0,
    key_plane: Optional[KeyPlane] = None,
    save_support: Optional[bool] = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_work: bool = False,
):
    """Attention of new tokens over a cache that is longer than its content.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), the newest tokens.
        k_cache, v_cache: (batch, cache_len, num_kv_heads, head_dim / v_head_dim); with a ``block_table`` (num_pages, page_size,
            num_kv_heads, ...).
        k, v: optional (batch, new, num_kv_heads, ...), written into the caches at cache_seqlens[b] before attending.
        cache_seqlens: int (batch,), filled length of each cache before ``k`` and ``v`` are written.
        leftpad_k: int (batch,), first key that counts.
        block_table: int (batch, pages), each sequence's pages in order; those behind the filled ones are not read. A decode on a GPU
            reads through the table; any other call copies the pages into one piece first.
        key_plane: the INT8 plane of k_cache, (batch, num_kv_heads, cache_len, ...); ``k`` is written into it too. Not for pages.
        Others and returned values as in :func:`mala_attn_func`.

    >>> import torch
    >>> k_cache, v_cache = torch.randn(2, 2, 512, 2, 64)  # of two sequences, with room for 512 tokens
    >>> q, k, v = (torch.randn(2, 1, heads, 64) for heads in (8, 2, 2))  # one new token of each
    >>> filled = torch.tensor([500, 200], dtype=torch.int32)
    >>> mala_attn_with_kvcache_func(q, k_cache, v_cache, k, v, cache_seqlens=filled, causal=True).shape
    torch.Size([2, 1, 8, 64])
    """
    if (k is None) != (v is None):
        raise ValueError("k and v are written into the cache together: give both or neither")
    for name, x in (("k", k), ("v", v)):
        if x is not None and (not isinstance(x, Tensor) or x.ndim != 4):
            raise ValueError(
                f"{name} must be a tensor (batch, new, num_kv_heads, head_dim), got {getattr(x, 'shape', x)!r}"
            )
    new = 0 if k is None else k.shape[1]
    if block_table is not None:
        check_pages(q, k_cache, block_table, cache_seqlens, new)
    check_tensors(q, k_cache, v_cache, sinks, ndim=4, shares_batch=block_table is None)
    cache_len = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    check_lengths(q.shape[0], q.device, if_readable(cache_len), cache_seqlens=cache_seqlens, leftpad_k=leftpad_k)
    if k is not None and v is not None and block_table is None:
        check_cache(k_cache, v_cache, k, v, cache_seqlens)
    # before anything is written
    check_call_flags(causal, save_support, deterministic, return_lse, return_work)
    settings = settings_of(q, v_cache, tau, causal, softmax_scale, window, softcap, tile, q.shape[1], cache_len)
    sequences = fixed_sequences(
        q.shape[0], q.shape[1], cache_len, settings.window[1], seqused_k=cache_seqlens + new, leftpad_k=leftpad_k
    )
    keeps_all = may_keep_all(discovery, impl, q, tile, deterministic)
    impl = implementation_of(impl, q)
    discovery = discovery_of(discovery, impl, q, settings, sequences, None)
    call = Call(settings, sequences, impl, return_work, save_support, discovery)
    if block_table is not None and key_plane is not None:
        raise ValueError("key_plane is that of a cache in one piece: a cache in pages (block_table) has none")
    call = decode_call(
        call, decode, num_splits, q, k_cache, v_cache, sinks, None, tile is not None, key_plane, keeps_all
    )
    if k is not None and v is not None:
        if block_table is not None:
            write_pages(k_cache, v_cache, k, v, block_table, cache_seqlens)
        else:
            position = cache_seqlens.long()[:, None] + torch.arange(new, device=q.device)
            sequence = torch.arange(q.shape[0], device=q.device)[:, None]
            k_cache[sequence, position] = k
            v_cache[sequence, position] = v
            if key_plane is not None:
                quantize_keys(k, key_plane, cache_seqlens)
    if block_table is not None and (call.form == "single" or call.impl != "triton"):
        k_cache, v_cache = gathered(k_cache, block_table), gathered(v_cache, block_table)
        block_table = None
    out, lse, work = attend(q, k_cache, v_cache, sinks, None, call, block_table, key_plane)
    return returned(out, lse, work, return_lse, return_work)

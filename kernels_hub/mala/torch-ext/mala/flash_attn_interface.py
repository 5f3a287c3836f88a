# SPDX-License-Identifier: Apache-2.0
"""The three functions that Transformers' FlashAttention wrapper looks for in a Hub kernel, with MALA inside.

The wrapper passes what a signature names and drops the rest without a word, so all that it knows is named here, and done or refused.
It knows no tau: that is what :func:`set_default_tau` was told, else the environment variable MALA_TAU, else 1.
"""

from __future__ import annotations

import math
import os
from typing import Optional

import torch
from torch import Tensor

from .checks import check_lengths, check_numbers
from .interface import mala_attn_func, mala_attn_varlen_func, mala_attn_with_kvcache_func

TAU_VARIABLE = "MALA_TAU"


def _tau_of_environment() -> float:
    text = os.environ.get(TAU_VARIABLE, "1")
    try:
        tau = float(text)
    except ValueError:
        tau = math.nan
    if not 0 <= tau < math.inf:
        raise ValueError(
            f"the environment variable {TAU_VARIABLE} must be a finite number >= 0 (0 is full attention), got {text!r}"
        )
    return tau


_default_tau = _tau_of_environment()


def default_tau() -> float:
    """The tau of calls that name none."""
    return _default_tau


def set_default_tau(tau: float) -> None:
    """Set the tau of all later calls of this build that name none, those of Transformers among them.

    Raises:
        ValueError: if ``tau`` is not a finite number >= 0.
    """
    global _default_tau
    check_numbers(tau=tau, softmax_scale=1.0, softcap=0.0, window=(-1, -1), tile=None)
    _default_tau = float(tau)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    deterministic: bool = False,
    tau: Optional[float] = None,
) -> Tensor:
    """:func:`mala_attn_func` with FlashAttention's names; options by keyword, as FlashAttention 2 and 3 disagree on their order.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim); k, v (batch, seqlen_k, num_kv_heads, head_dim or v_head_dim).
        dropout_p: must be 0.
        window_size: keys visible to the (left, right) of the aligned key; -1 for unlimited, 0 on the right where causal.
        s_aux: (num_heads,) attention sinks.
        deterministic: gradients repeat bit for bit with either value.
        tau: None for :func:`default_tau`.

    Returns:
        out (batch, seqlen_q, num_heads, v_head_dim).

    Raises:
        ValueError: for what MALA does not have; the message says what was got.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, s_aux, deterministic, tau)
    return mala_attn_func(q, k, v, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    deterministic: bool = False,
    block_table: Optional[Tensor] = None,
    cache_seqlens: Optional[Tensor] = None,
    tau: Optional[float] = None,
) -> Tensor:
    """:func:`mala_attn_varlen_func` with FlashAttention's names: packed sequences, causal ones aligned at their ends.

    Args:
        q: (total_q, num_heads, head_dim); k, v (total_k, num_kv_heads, head_dim or v_head_dim).
        cu_seqlens_q, cu_seqlens_k: int32 (num_sequences + 1,) boundaries.
        max_seqlen_q, max_seqlen_k: longest sequence, an integer or a tensor of one; read from the boundaries when not given.
        block_table, cache_seqlens: must be None; :func:`flash_attn_with_kvcache` reads pages.
        Others as in :func:`flash_attn_func`.

    Returns:
        out (total_q, num_heads, v_head_dim).
    """
    for name, given in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if given is not None:
            raise ValueError(f"flash_attn_varlen_func reads no cache, got {name}: use flash_attn_with_kvcache")
    longest_q, longest_k = (int(x) if isinstance(x, Tensor) else x for x in (max_seqlen_q, max_seqlen_k))
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, s_aux, deterministic, tau)
    return mala_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k, **options
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    *,
    cache_seqlens: Tensor,
    block_table: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    deterministic: bool = False,
    tau: Optional[float] = None,
) -> Tensor:
    """:func:`mala_attn_with_kvcache_func` with FlashAttention's names, for caches in one piece and in pages.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), the newest tokens.
        k_cache, v_cache: (batch, cache_len, num_kv_heads, ...), or with a block_table (num_pages, page_size, num_kv_heads, ...).
        k, v: (batch, new, num_kv_heads, ...), written into the caches behind what they hold.
        cache_seqlens: int (batch,), filled length of each cache before ``k`` and ``v`` are written.
        block_table: int (batch, pages of a sequence), the pages in order; those behind the filled ones are not read. Each
            call copies the pages that the table names into one piece.
        max_seqlen_q, max_seqlen_k: bounds, which nothing here needs.
        Others as in :func:`flash_attn_func`.

    Returns:
        out (batch, seqlen_q, num_heads, v_head_dim).
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, s_aux, deterministic, tau)
    if block_table is None:
        return mala_attn_with_kvcache_func(q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, **options)
    if (k is None) != (v is None):
        raise ValueError("k and v are written into the cache together: give both or neither")
    _check_pages(q, k_cache, block_table, cache_seqlens, 0 if k is None else k.shape[1])
    filled = cache_seqlens
    if k is not None and v is not None:
        _write_pages(k_cache, v_cache, k, v, block_table, cache_seqlens)
        filled = cache_seqlens + k.shape[1]
    # tables are filled up with -1, the last page: whatever it holds lies behind the filled keys
    k_cache, v_cache = (cache[block_table.long()].flatten(1, 2) for cache in (k_cache, v_cache))
    return mala_attn_with_kvcache_func(q, k_cache, v_cache, cache_seqlens=filled, **options)


def _options(dropout_p, softmax_scale, causal, window_size, softcap, s_aux, deterministic, tau) -> dict:
    """The options of the functions of ``interface``."""
    if dropout_p:
        raise ValueError(
            f"MALA has no attention dropout, got dropout_p={dropout_p}: set the config's attention dropout to 0, or call model.eval()"
        )
    return {
        "tau": default_tau() if tau is None else tau,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": tuple(window_size),
        "softcap": 0.0 if softcap is None else softcap,
        "sinks": s_aux,
        "deterministic": deterministic,
    }


def _check_pages(q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, new: int) -> None:
    if not isinstance(block_table, Tensor) or block_table.ndim != 2 or block_table.shape[0] != q.shape[0]:
        got = tuple(block_table.shape) if isinstance(block_table, Tensor) else repr(block_table)
        raise ValueError(f"block_table must be an integer tensor (batch = {q.shape[0]}, pages), got {got}")
    if k_cache.ndim != 4:
        raise ValueError(
            f"with a block_table the caches are (num_pages, page_size, num_kv_heads, head_dim), got {tuple(k_cache.shape)}"
        )
    room = block_table.shape[1] * k_cache.shape[1]
    readable = None if torch.compiler.is_compiling() else room - new
    check_lengths(q.shape[0], q.device, readable, cache_seqlens=cache_seqlens)


def _write_pages(k_cache, v_cache, k: Tensor, v: Tensor, block_table: Tensor, cache_seqlens: Tensor) -> None:
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

# SPDX-License-Identifier: Apache-2.0
"""The three functions that Transformers' FlashAttention wrapper looks for in a Hub kernel, with MALA inside.

The wrapper passes what a signature names and drops the rest without a word, so all that it knows is named here, and done or refused.
It knows no tau: that is what :func:`set_default_tau` was told, else the environment variable MALA_TAU, else 1.
"""

from __future__ import annotations

import math
import os
from typing import Optional

from torch import Tensor

from .checks import check_numbers
from .interface import mala_attn_func
from .kvcache import mala_attn_with_kvcache_func
from .packed_steps import attend_packed

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

    Where every sequence has one row, max_seqlen_q is 1 and max_seqlen_k is given, they are computed as a decode.

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
    return attend_packed(
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
        block_table: int (batch, pages of a sequence), the pages in order; those behind the filled ones are not read.
        max_seqlen_q, max_seqlen_k: bounds, which nothing here needs.
        Others as in :func:`flash_attn_func`.

    Returns:
        out (batch, seqlen_q, num_heads, v_head_dim).
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, s_aux, deterministic, tau)
    return mala_attn_with_kvcache_func(
        q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, block_table=block_table, **options
    )


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

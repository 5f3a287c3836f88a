# SPDX-License-Identifier: Apache-2.0
"""The public functions: checks and choice of implementation."""

from __future__ import annotations

import os
from typing import Optional

import torch
from torch import Tensor

from .attend import Call, attend
from .checks import (
    check_boundaries,
    check_cache,
    check_flags,
    check_lengths,
    check_numbers,
    check_tensors,
    normalized_mask,
)
from .query_tile import Settings
from .tile_config import tile_config
from .visibility import Sequences, fixed_sequences, packed_sequences


def mala_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tau: float = 1.0,
    causal: bool = False,
    softmax_scale: Optional[float] = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
    tile: Optional[tuple[int, int]] = None,
    impl: str = "auto",
    discovery: str = "auto",
    save_support: Optional[bool] = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_work: bool = False,
):
    """MassAlloc Attention: full score discovery, post-score work only where a tile can matter.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), float32, float16 or bfloat16; any strides, last dimension contiguous.
        k: (batch, seqlen_k, num_kv_heads, head_dim); num_kv_heads divides num_heads.
        v: (batch, seqlen_k, num_kv_heads, v_head_dim).
        tau: dimensionless tolerance >= 0. A tile is skipped if for each of its rows its largest contribution is below
            tau / (visible keys) of the mass retained so far. 1 is canonical, 0 is full attention.
        causal: bottom-right aligned: the last query row sees the last key, also where seqlen_q < seqlen_k.
        softmax_scale: multiplies the scores; default head_dim ** -0.5.
        window: keys visible to the (left, right) of the aligned key; -1 for unlimited. ``causal`` sets right to 0.
        softcap: scores become softcap * tanh(scores / softcap); 0 for none.
        sinks: (num_heads,) learned logits that join each row's normalizer and carry no value.
        mask: bool, broadcastable to (batch, num_heads, seqlen_q, seqlen_k), True where attention is allowed; applied on top of
            ``causal`` and ``window``. Not together with the lengths below.
        seqused_q, seqused_k, leftpad_k: int (batch,). Sequence b has query rows i < seqused_q[b] and keys
            leftpad_k[b] <= j < seqused_k[b]; alignment is at the end of both.
        tile: (BLOCK_M, BLOCK_N), part of the rule's definition; default: the shipped table's.
        impl: "auto" (Triton on a GPU, else blockwise), "triton", "blockwise" or "reference".
        discovery: how the tiles to retain are found. "fused": every tile is scored exactly by the kernel that also attends. "int8":
            first in INT8 with certified bounds, then exactly among the candidates; the same bits, faster where long sequences keep
            little, slower where they keep much; not for padded or packed batches, masks, softcap, float32 or tau = 0. A call that
            returns its work scores all tiles exactly either way. "auto": fused, for now.
        save_support: keep the retained tiles for backward, 1 bit each, so that it scores no others; gradients are the same without.
            None: where a gradient is needed and the bits take at most 1/8 of out's memory. ``Work.support_bytes`` reports it.
        deterministic: demand gradients that repeat bit for bit. All implementations give them anyway.
        return_lse: also return lse, float32 (float64 for float64 inputs), (batch, num_heads, seqlen_q): natural log of the
            retained normalizer, sink included. It carries no gradient.
        return_work: also return the :class:`Work` done.

    Returns:
        out (batch, seqlen_q, num_heads, v_head_dim), or a tuple (out, lse), (out, work), (out, lse, work).
        Rows that see no key give zeros, with lse -inf (or the sink).

    Raises:
        ValueError: for inputs the rule does not cover; the message says what was got.
    """
    check_tensors(q, k, v, sinks, ndim=4)
    _check_flags(causal, save_support, deterministic, return_lse, return_work)
    settings = _settings(q, v, tau, causal, softmax_scale, window, softcap, tile, q.shape[1], k.shape[1])
    check_lengths(q.shape[0], q.device, _if_readable(q.shape[1]), seqused_q=seqused_q)
    check_lengths(q.shape[0], q.device, _if_readable(k.shape[1]), seqused_k=seqused_k, leftpad_k=leftpad_k)
    has_lengths = any(lengths is not None for lengths in (seqused_q, seqused_k, leftpad_k))
    mask = normalized_mask(mask, q, k, has_lengths)
    sequences = fixed_sequences(
        q.shape[0],
        q.shape[1],
        k.shape[1],
        settings.window[1],
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
    )
    impl = _implementation(impl, q)
    discovery = _discovery(discovery, impl, q, settings, sequences, mask)
    call = Call(settings, sequences, impl, return_work, save_support, discovery)
    out, lse, work = attend(q, k, v, sinks, mask, call)
    return _returned(out, lse, work, return_lse, return_work)


def mala_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    tau: float = 1.0,
    causal: bool = False,
    softmax_scale: Optional[float] = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Optional[Tensor] = None,
    tile: Optional[tuple[int, int]] = None,
    impl: str = "auto",
    discovery: str = "auto",
    save_support: Optional[bool] = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_work: bool = False,
):
    """MassAlloc Attention over packed sequences that do not see one another.

    Args:
        q: (total_q, num_heads, head_dim); k (total_k, num_kv_heads, head_dim); v (total_k, num_kv_heads, v_head_dim).
        cu_seqlens_q, cu_seqlens_k: int32 (num_sequences + 1,), first 0, never falling; sequence s is rows
            cu_seqlens_q[s] to cu_seqlens_q[s + 1] and likewise for keys. Empty sequences are allowed.
        max_seqlen_q, max_seqlen_k: longest sequence; read from cu_seqlens (a device synchronisation) when not given, which
            a compiled call cannot do.
        Others as in :func:`mala_attn_func`.

    Memory: backward, and a forward that keeps its support, hold one bit per (longest query tiles) x (longest key tiles) for every
    sequence and head; one long sequence among very many short ones is better run apart.

    Returns:
        out (total_q, num_heads, v_head_dim); lse and certificate are (num_heads, total_q); the work's maps are per sequence.
    """
    check_tensors(q, k, v, sinks, ndim=3)
    _check_flags(causal, save_support, deterministic, return_lse, return_work)
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu_seqlens, Tensor):
            raise ValueError(f"{name} must be an int32 or int64 tensor, got {type(cu_seqlens).__name__}")
    check_lengths(cu_seqlens_q.numel(), q.device, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    longest_q = _longest(q.shape[0], "q", cu_seqlens_q, max_seqlen_q)
    longest_k = _longest(k.shape[0], "k", cu_seqlens_k, max_seqlen_k)
    settings = _settings(q, v, tau, causal, softmax_scale, window, softcap, tile, longest_q, longest_k)
    sequences = packed_sequences(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, settings.window[1])
    impl = _implementation(impl, q)
    discovery = _discovery(discovery, impl, q, settings, sequences, None)
    call = Call(settings, sequences, impl, return_work, save_support, discovery)
    out, lse, work = attend(q[None], k[None], v[None], sinks, None, call)
    return _returned(out[0], lse[0], work, return_lse, return_work)


def mala_attn_with_kvcache_func(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    *,
    cache_seqlens: Tensor,
    leftpad_k: Optional[Tensor] = None,
    tau: float = 1.0,
    causal: bool = True,
    softmax_scale: Optional[float] = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Optional[Tensor] = None,
    tile: Optional[tuple[int, int]] = None,
    impl: str = "auto",
    discovery: str = "auto",
    save_support: Optional[bool] = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_work: bool = False,
):
    """Attention of new tokens over a cache that is longer than its content.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), the newest tokens.
        k_cache, v_cache: (batch, cache_len, num_kv_heads, head_dim / v_head_dim).
        k, v: optional (batch, new, num_kv_heads, ...), written into the caches at cache_seqlens[b] before attending.
        cache_seqlens: int (batch,), filled length of each cache before ``k`` and ``v`` are written.
        leftpad_k: int (batch,), first key that counts.
        Others and returned values as in :func:`mala_attn_func`.
    """
    check_tensors(q, k_cache, v_cache, sinks, ndim=4)
    check_lengths(
        q.shape[0], q.device, _if_readable(k_cache.shape[1]), cache_seqlens=cache_seqlens, leftpad_k=leftpad_k
    )
    if (k is None) != (v is None):
        raise ValueError("k and v are written into the cache together: give both or neither")
    # before anything is written
    _check_flags(causal, save_support, deterministic, return_lse, return_work)
    settings = _settings(q, v_cache, tau, causal, softmax_scale, window, softcap, tile, q.shape[1], k_cache.shape[1])
    sequences = fixed_sequences(q.shape[0], q.shape[1], k_cache.shape[1], settings.window[1], seqused_k=cache_seqlens)
    _discovery(discovery, _implementation(impl, q), q, settings, sequences, None)
    seqused_k = cache_seqlens
    if k is not None and v is not None:
        check_cache(k_cache, v_cache, k, v, cache_seqlens)
        new = k.shape[1]
        position = cache_seqlens.long()[:, None] + torch.arange(new, device=q.device)
        sequence = torch.arange(q.shape[0], device=q.device)[:, None]
        k_cache[sequence, position] = k
        v_cache[sequence, position] = v
        seqused_k = cache_seqlens + new
    return mala_attn_func(
        q, k_cache, v_cache,
        tau=tau, causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap, sinks=sinks,
        seqused_k=seqused_k, leftpad_k=leftpad_k, tile=tile, impl=impl, discovery=discovery, save_support=save_support,
        deterministic=deterministic, return_lse=return_lse, return_work=return_work,
    )  # fmt: skip


def _settings(q, v, tau, causal, softmax_scale, window, softcap, tile, seqlen_q, seqlen_k) -> Settings:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    check_numbers(tau=tau, softmax_scale=scale, softcap=softcap, window=window, tile=tile)
    # a side that reaches beyond both sequences is unlimited
    left, right = (-1 if side >= max(seqlen_q, seqlen_k) else side for side in window)
    tile = tile_config(q.shape[-1], v.shape[-1], q.dtype, seqlen_q).tile if tile is None else tile
    return Settings(float(tau), float(scale), (left, 0 if causal else right), float(softcap), tile)


def _if_readable(limit: int) -> Optional[int]:
    """``limit`` where values can be checked against it; a compiler has none yet."""
    return None if torch.compiler.is_compiling() else limit


def _longest(total: int, name: str, cu_seqlens: Tensor, max_seqlen: Optional[int]) -> int:
    if not torch.compiler.is_compiling():
        return check_boundaries(total, name, cu_seqlens, max_seqlen)
    if max_seqlen is None:
        raise ValueError(
            f"a compiled call cannot read the longest sequence from cu_seqlens_{name}: pass max_seqlen_{name}"
        )
    return max_seqlen


def _check_flags(causal, save_support, deterministic, return_lse, return_work) -> None:
    check_flags(causal=causal, deterministic=deterministic, return_lse=return_lse, return_work=return_work)
    if save_support is not None:
        check_flags(save_support=save_support)


def _discovery(discovery: str, impl: str, q: Tensor, settings: Settings, sequences: Sequences, mask) -> str:
    if discovery not in ("auto", "fused", "int8"):
        raise ValueError(f"discovery must be 'auto', 'fused' or 'int8', got {discovery!r}")
    if discovery != "int8":
        return "fused"
    uncovered = {
        f"impl={impl!r}": impl != "triton",
        f"{q.dtype} inputs": q.dtype not in (torch.float16, torch.bfloat16),
        "padded or packed sequences": sequences.bounds is not None,
        "a mask": mask is not None,
        "softcap": settings.softcap > 0,
        "tau = 0": settings.tau == 0,
    }
    found = [name for name, is_there in uncovered.items() if is_there]
    if found:
        raise ValueError(f"discovery='int8' does not cover {', '.join(found)}: use discovery='auto'")
    return discovery


def _implementation(impl: str, q: Tensor) -> str:
    if impl == "auto":
        return "triton" if q.is_cuda and q.dtype != torch.float64 else "blockwise"
    if impl not in ("triton", "blockwise", "reference"):
        raise ValueError(f"impl must be 'auto', 'triton', 'blockwise' or 'reference', got {impl!r}")
    if impl == "triton" and q.dtype == torch.float64:
        raise ValueError("the Triton kernels compute in float32 at most: use impl='blockwise' for float64")
    if impl == "triton" and not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"impl='triton' needs tensors on a GPU, got {q.device}; on the CPU use impl='blockwise' or 'auto'"
        )
    if impl == "triton" and not q.is_cuda and q.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter multiplies bfloat16 wrongly: use float16 or float32 there")
    return impl


def _returned(out, lse, work, return_lse: bool, return_work: bool):
    extra = ([lse] if return_lse else []) + ([work] if return_work else [])
    return (out, *extra) if extra else out

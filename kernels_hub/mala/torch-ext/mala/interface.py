# SPDX-License-Identifier: Apache-2.0
"""The public functions on whole sequences: checks and choice of implementation. ``kvcache.py`` has the one over caches."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from .attend import Call, attend
from .call_options import (
    check_call_flags,
    check_dense,
    discovery_of,
    if_readable,
    implementation_of,
    longest_of,
    may_be_dense,
    may_keep_all,
    returned,
    settings_of,
)
from .checks import check_lengths, check_tensors, normalized_mask
from .decode_choice import decode_call
from .dense import uncovered_by_dense
from .key_plane import KeyPlane
from .visibility import fixed_sequences, packed_sequences


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
    decode: str = "auto",
    num_splits: int = 0,
    key_plane: Optional[KeyPlane] = None,
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
            returns its work scores all tiles exactly either way. "dense": torch's own attention (cuDNN, else FlashAttention), which
            satisfies the rule trivially, every tile retained and nothing omitted; its bits, and those of its gradients, are full
            attention's. "auto" decides, and ``Work.choices`` says what and why: on a GPU, dense below 2,048 keys and at tau = 0; above,
            on Hopper, what a sample of the rows asks for, which waits for the device: fused, dense, from 16,384 tokens on int8, from
            32,768 on each KV head for itself. Below that one call in 61 of a layer and length is looked at and the others go its way
            (so there bits depend on earlier calls); where a gradient is taken, or a layer in training mode calls through
            Transformers, nothing is remembered, and below 16,384 it is fused.
            A CUDA graph goes the way that was remembered when it was recorded; under a compiler lengths alone decide.
            Dense is then FlashAttention-4 where mala_hf finds it (Hopper, causal, head_dim 64 or 128, no gradient), else cuDNN where a
            shape has earned the plan that cuDNN builds for it, else MALA's own kernel with tau = 0.
            It is chosen only where nothing else was asked for: impl="auto", no tile, no save_support=True, no deterministic=True
            (nor torch.use_deterministic_algorithms), no window, softcap, sinks, masks or padding.
        decode: form of the test where up to 64 new tokens meet a longer context. "single": from the diagonal to earlier keys against
            the mass retained so far, as everywhere else. "two_pass": all scores first, then every tile against the full normalizer; a
            skipped key has less than tau / (visible keys) of full attention, however the keys are split. "split": each of
            ``num_splits`` parts of the keys against its own normalizer. In both, the query heads of a KV head share their tiles,
            and ``tile`` counts the tokens of one. Not for masks, packed sequences or gradients. "int8_two_pass": two passes of which
            the first reads ``key_plane`` instead of k. "auto": two passes where they cover the call, from the plane if there is one
            and tau > 0. On a GPU, where discovery and impl are "auto" and no tile is given, a short decode is dense: below 32 MiB of
            keys (of all sequences and heads, the whole cache or what ``window`` shows) and at tau = 0, in splits that retain every
            tile; one new token over less than 2,048 keys, started eagerly, by torch. ``Work.choices`` says so. Under a compiler only
            lengths that do not vary count.
        num_splits: parts of the keys in a decode; 0: as many as fill the GPU. What two passes note takes memory with its square:
            4 bytes for each pair of parts, sequence and KV head.
        key_plane: k in INT8 with a certified bound of what that loses, (batch, num_kv_heads, seqlen_k, ...), as :func:`quantize_keys`
            wrote it: then exact k and v are read only in tiles that can matter. A call that is no decode in two passes leaves it
            alone; ``Work.form`` says which it was.
        save_support: keep the retained tiles for backward, 1 bit each, so that it scores no others; gradients are the same without.
            None: where a gradient is needed and the bits take at most 1/8 of out's memory. ``Work.support_bytes`` reports it.
        deterministic: demand gradients that repeat bit for bit. All implementations give them anyway, but for discovery="dense".
        return_lse: also return lse, float32 (float64 for float64 inputs), (batch, num_heads, seqlen_q): natural log of the
            retained normalizer, sink included. It carries no gradient.
        return_work: also return the :class:`Work` done.

    Returns:
        out (batch, seqlen_q, num_heads, v_head_dim), or a tuple (out, lse), (out, work), (out, lse, work).
        Rows that see no key give zeros, with lse -inf (or the sink).

    Raises:
        ValueError: for inputs the rule does not cover; the message says what was got.

    >>> import torch
    >>> q, k, v = (torch.randn(1, 300, heads, 64) for heads in (8, 2, 2))
    >>> out, work = mala_attn_func(q, k, v, causal=True, return_work=True)
    >>> out.shape, work.work_fraction.shape
    (torch.Size([1, 300, 8, 64]), torch.Size([1, 8]))
    """
    check_tensors(q, k, v, sinks, ndim=4)
    check_call_flags(causal, save_support, deterministic, return_lse, return_work)
    settings = settings_of(q, v, tau, causal, softmax_scale, window, softcap, tile, q.shape[1], k.shape[1])
    check_lengths(q.shape[0], q.device, if_readable(q.shape[1]), seqused_q=seqused_q)
    check_lengths(q.shape[0], q.device, if_readable(k.shape[1]), seqused_k=seqused_k, leftpad_k=leftpad_k)
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
    ran, keeps_all = implementation_of(impl, q), may_keep_all(discovery, impl, q, tile, deterministic)
    uncovered = uncovered_by_dense(q, v, settings, sequences, sinks, mask)
    if discovery == "dense":
        check_dense(uncovered, impl, save_support, deterministic)
    asked_auto = discovery == "auto"
    hands_over = asked_auto and may_be_dense(uncovered, impl, q, tile, save_support, deterministic, return_lse)
    discovery = discovery_of(discovery, ran, q, settings, sequences, mask, may_be_dense=True)
    may_be = ("fused", *(["int8"] if discovery == "auto" else []), *(["dense"] if hands_over else []))
    call = Call(settings, sequences, ran, return_work, save_support, discovery, may_be if asked_auto else ())
    call = decode_call(call, decode, num_splits, q, k, v, sinks, mask, tile is not None, key_plane, keeps_all)
    out, lse, work = attend(q, k, v, sinks, mask, call, key_plane=key_plane)
    return returned(out, lse, work, return_lse, return_work)


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

    >>> import torch
    >>> q, k, v = (torch.randn(300, heads, 64) for heads in (8, 2, 2))  # sequences of 100 and 200 tokens
    >>> boundaries = torch.tensor([0, 100, 300], dtype=torch.int32)
    >>> mala_attn_varlen_func(q, k, v, cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, causal=True).shape
    torch.Size([300, 8, 64])
    """
    check_tensors(q, k, v, sinks, ndim=3)
    check_call_flags(causal, save_support, deterministic, return_lse, return_work)
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu_seqlens, Tensor):
            raise ValueError(f"{name} must be an int32 or int64 tensor, got {type(cu_seqlens).__name__}")
    check_lengths(cu_seqlens_q.numel(), q.device, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    longest_q = longest_of(q.shape[0], "q", cu_seqlens_q, max_seqlen_q)
    longest_k = longest_of(k.shape[0], "k", cu_seqlens_k, max_seqlen_k)
    settings = settings_of(q, v, tau, causal, softmax_scale, window, softcap, tile, longest_q, longest_k)
    sequences = packed_sequences(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, settings.window[1])
    impl = implementation_of(impl, q)
    discovery = discovery_of(discovery, impl, q, settings, sequences, None)
    call = Call(settings, sequences, impl, return_work, save_support, discovery)
    out, lse, work = attend(q[None], k[None], v[None], sinks, None, call)
    assert lse is not None  # packed sequences are never dense
    return returned(out[0], lse[0], work, return_lse, return_work)

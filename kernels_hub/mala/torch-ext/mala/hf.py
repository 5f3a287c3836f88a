# SPDX-License-Identifier: Apache-2.0
"""The adapter with the signature that Transformers calls: what a layer asks for is done by MALA or refused, never ignored.

Transformers' names (query, key, value, scaling, attention_mask; heads before sequence) are left behind here. Transposes are views.
A model's settings are the plain dict ``config.mala``: {"tau": 1.0, "layers": {"0": 0.5, "1": "sdpa", "2-": {"heads": {"0-3": 0.1},
"window": 4096}}, "tile": [64, 64], "save_support": true, "deterministic": true, "discovery": "fused",
"kernel": "org/name"}, all optional; ``hf_settings`` reads it. Whoever calls this adapter has chosen the kernel already.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import lru_cache
from typing import Callable, Optional

import torch
from torch import Tensor

from .choice_memory import asked_by
from .decode_choice import MAX_TOKENS
from .hf_dense import dense_attention
from .hf_heads import HeadGroup, HeadWork, head_groups, head_share, put_together
from .hf_mask import Visible
from .hf_settings import DENSE, LayerSettings, layer_settings
from .hf_visible import narrowed, visible_pairs
from .interface import mala_attn_func
from .key_plane import KeyPlane
from .packed_steps import attend_packed
from .work import Work

# what the package mala_hf and a build of these kernels say to one another: kinds of masks, settings, what recorders are called with
ADAPTER_VERSION = 4

# keyword arguments that change what attention means, and that MALA does not have
REFUSED = {
    "position_bias": "a position bias added to the scores",
    "indices": "keys selected by an indexer",
    "block_indices": "key blocks selected by an indexer",
    "sinks": "attention sinks that differ from token to token",
    "read_index": "a part of a model on the cache of continuous batching",
}

# each is called with (module, list of HeadWork) after a layer's attention
recorders: list[Callable] = []  # of the process, not of a thread: generation often runs in a thread of its own


def mala_attention_forward(module, query, key, value, attention_mask=None, **kwargs) -> tuple[Tensor, None]:
    """Attention of one layer: Triton on a GPU, blockwise PyTorch elsewhere.

    Args:
        module: the attention layer; ``module.config.mala``, ``module.layer_idx`` and ``module.is_causal`` are read if present.
        query: (batch, num_heads, seqlen_q, head_dim); key, value (batch, num_kv_heads, seqlen_k, head_dim or v_head_dim).
        attention_mask: None or one of the kinds in ``hf_mask``. None: causal if the layer is, the last row sees the last key.
        kwargs: dropout, scaling, is_causal, sliding_window, softcap, s_aux, position_ids, cu_seq_lens_q, cu_seq_lens_k, ... as
            Transformers passes them; names that no model of the supported releases gives a meaning are ignored.

    Returns:
        out (batch, seqlen_q, num_heads, v_head_dim), and None for the attention weights.

    Raises:
        ValueError: for dropout, additive biases and whatever else MALA does not cover.
    """
    return _attend(module, query, key, value, attention_mask, "auto", **kwargs), None


def mala_reference_attention_forward(module, query, key, value, attention_mask=None, **kwargs) -> tuple[Tensor, None]:
    """The same through the executable definition of the rule; slow."""
    return _attend(module, query, key, value, attention_mask, "reference", **kwargs), None


def _attend(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    impl: str,
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    **kwargs,
) -> Tensor:
    _check_request(query, key, value, dropout, kwargs)
    settings = layer_settings(module)
    query, key, value = _one_dtype(query, key, value)
    q, k, v = (_last_dim_contiguous(x).transpose(1, 2) for x in (query, key, value))
    plane = _plane_of(key, q.shape[1])
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    visible = visible_pairs(attention_mask, q.shape[0], q.shape[1], k.shape[1], causal, sliding_window, kwargs)
    if visible.padding is not None:  # a cache may be longer than its content
        k, v = k[:, : visible.padding.width], v[:, : visible.padding.width]
        plane = None if plane is None else plane.first(visible.padding.width)
        visible = Visible(visible.window) if visible.padding.is_full else visible
    listeners = tuple(recorders)
    if listeners and torch.compiler.is_compiling():
        raise ValueError(
            "recording work reads values, which a compiled graph cannot: record the model before it is compiled"
        )
    first, total = head_share(module, q.shape[2]) if listeners or settings.heads else (0, q.shape[2])
    groups = head_groups(settings, q.shape[2], k.shape[2], first, total)
    outs, works = [], []
    for group in groups:
        options = {
            "softmax_scale": scaling,
            "softcap": softcap or 0.0,
            "sinks": None if s_aux is None else group.of_queries(s_aux, 0),
            "impl": impl,
            "return_work": bool(listeners),
            "key_plane": None if plane is None else KeyPlane(*(group.of_keys(x, 1) for x in plane.tensors)),
        }
        seen = narrowed(visible, group.settings.window, causal)
        if seen.mask is not None:
            seen = Visible(seen.window, mask=group.of_queries(seen.mask, 1))
        own = group.of_queries(q, 2), group.of_keys(k, 2), group.of_keys(v, 2)
        out, work = _of_group(module, *own, seen, settings, group, options)
        outs.append(out)
        works.append(work)
    if listeners:
        told = [HeadWork.of(group, work, q.shape[2], first, total) for group, work in zip(groups, works)]
        _tell(listeners, module, told)
    return put_together(outs, groups)


def _of_group(
    module, q: Tensor, k: Tensor, v: Tensor, visible: Visible, settings: LayerSettings, group: HeadGroup, options: dict
) -> tuple[Tensor, Optional[Work]]:
    """Attention of query heads with equal settings: out (batch, seqlen_q, their number, v_head_dim), and work if asked for."""
    if group.settings.tau is None:
        if options["softcap"] or options["sinks"] is not None:
            lacking = "a softcap" if options["softcap"] else "attention sinks"
            raise ValueError(
                f"layer {getattr(module, 'layer_idx', None)} is set to {DENSE!r} but has {lacking}, which torch's SDPA lacks: "
                "set its tau to 0 (full attention) instead"
            )
        return dense_attention(q, k, v, visible, options["softmax_scale"]), None
    options.update(
        tau=group.settings.tau,
        tile=settings.tile,
        save_support=settings.save_support,
        deterministic=settings.deterministic,
    )
    if settings.discovery != "auto":
        is_decode = q.shape[1] <= MAX_TOKENS and q.shape[1] < k.shape[1]
        options["discovery"] = "fused" if is_decode else settings.discovery  # a decode tests its tiles in one way
    with nullcontext() if torch.compiler.is_compiling() else asked_by(module):
        result = _mala(q, k, v, visible, options)
    return result if options["return_work"] else (result, None)


@torch.compiler.disable  # where a compiled model breaks its graph, there is nothing to compile in this
def _tell(listeners: tuple[Callable, ...], module, works: list[HeadWork]) -> None:
    for listener in listeners:
        listener(module, works)


def _mala(q: Tensor, k: Tensor, v: Tensor, visible: Visible, options: dict):
    if visible.packing is not None:
        of_q, of_k = visible.packing
        del options["key_plane"]  # of a cache, and packed sequences have none
        result = attend_packed(
            q[0], k[0], v[0],
            cu_seqlens_q=of_q.cu_seqlens, cu_seqlens_k=of_k.cu_seqlens, max_seqlen_q=of_q.max_seqlen, max_seqlen_k=of_k.max_seqlen,
            causal=False, window=visible.window, **options,
        )  # fmt: skip
        return (result[0][None], result[1]) if options["return_work"] else result[None]
    if visible.padding is not None:
        padding = visible.padding
        options.update(
            leftpad_k=padding.leftpad_k, seqused_k=padding.seqused_k, seqused_q=padding.seqused_q(q.shape[1])
        )
    if visible.lengths is not None:
        options.update(leftpad_k=visible.lengths[:, 0], seqused_k=visible.lengths[:, 1])
    return mala_attn_func(q, k, v, mask=visible.mask, window=visible.window, **options)


def _plane_of(key: Tensor, new_tokens: int) -> Optional[KeyPlane]:
    """The INT8 plane that a cache gave these very keys; none where a compiler looks, or for a prompt."""
    if torch.compiler.is_compiling() or new_tokens > MAX_TOKENS or new_tokens >= key.shape[2]:
        return None
    plane = getattr(key, "mala_plane", None)  # it may be another build's class
    return None if plane is None else KeyPlane(plane.quantized, plane.scales, plane.residuals)


def _check_request(query: Tensor, key: Tensor, value: Tensor, dropout: float, kwargs: dict) -> None:
    if any(type(x).__name__ == "DTensor" for x in (query, key, value)):
        raise ValueError(
            "query, key and value are DTensors: MALA needs local tensors, so use a tensor-parallel plan with local outputs"
        )
    replaced = getattr(torch.nn.functional.scaled_dot_product_attention, "__module__", None)
    if str(replaced).startswith("torch.distributed."):
        raise ValueError(
            "torch's context parallelism replaces SDPA, and each process would see its own part of the sequence only: use tensor "
            "parallelism, or Ulysses sequence parallelism (mala_hf.sequence_parallel)"
        )
    if dropout:
        raise ValueError(
            f"MALA has no attention dropout, got {dropout}: set the config's attention dropout (attention_dropout, "
            "attention_probs_dropout_prob or attn_pdrop) to 0, or call model.eval()"
        )
    for name, meaning in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"MALA does not cover {meaning} ({name}): use attn_implementation='sdpa' or 'eager' for this model"
            )
    if kwargs.get("output_attentions"):
        _warn_no_weights()


@lru_cache(maxsize=1)
def _warn_no_weights() -> None:
    warnings.warn(
        "MALA never forms the attention weights, so output_attentions=True returns none: use attn_implementation='eager' for them",
        stacklevel=4,
    )


def _one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What SDPA would compute in: autocast's dtype, else the value's (rotary embeddings may leave query and key in float32)."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _last_dim_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()

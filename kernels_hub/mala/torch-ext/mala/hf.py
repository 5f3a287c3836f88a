# SPDX-License-Identifier: Apache-2.0
"""The adapter with the signature that Transformers calls: what a layer asks for is done by MALA or refused, never ignored.

Transformers' names (query, key, value, scaling, attention_mask; heads before sequence) are left behind here. Transposes are views.
A model's settings are the plain dict ``config.mala``: {"tau": 1.0, "layers": {"0": 0.5, "1": "sdpa"}, "tile": [64, 64], "save_support":
true, "deterministic": true, "kernel": "org/name"}, all optional. Whoever calls this adapter has chosen the kernel already.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Callable, Optional

import torch
from torch import Tensor

from .hf_dense import dense_attention, legal_pairs
from .hf_mask import (
    HOLES,
    PACKING_DTYPE,
    PASS_LENGTHS,
    Packing,
    Visible,
    read_allowed,
    read_packing,
    read_padding,
    read_positions,
    remembered,
)
from .interface import mala_attn_func, mala_attn_varlen_func
from .work import Work

DENSE = "sdpa"
SETTINGS = ("tau", "layers", "tile", "save_support", "deterministic", "kernel")

# what the package mala_hf and a build of these kernels say to one another: kinds of masks, settings, what recorders are called with
ADAPTER_VERSION = 1

# keyword arguments that change what attention means, and that MALA does not have
REFUSED = {
    "position_bias": "a position bias added to the scores",
    "indices": "keys selected by an indexer",
    "block_indices": "key blocks selected by an indexer",
    "sinks": "attention sinks that differ from token to token",
}

# each is called with (module, work, tau) after a layer's attention; work is None for a dense layer
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


@dataclass(frozen=True)
class LayerSettings:
    """``tau`` is None for a dense layer."""

    tau: Optional[float]
    tile: Optional[tuple[int, int]] = None
    save_support: Optional[bool] = None
    deterministic: bool = False


def layer_settings(module) -> LayerSettings:
    """What ``module.config.mala`` says about this layer; tau = 1 where nobody said anything."""
    mala = getattr(getattr(module, "config", None), "mala", None)
    if mala is None:
        return LayerSettings(1.0)
    if not isinstance(mala, dict) or not set(mala) <= set(SETTINGS):
        raise ValueError(f"config.mala must be a dict with the keys {SETTINGS}, got {mala!r}: see mala_hf.MalaConfig")
    layers, index, tile = mala.get("layers") or {}, getattr(module, "layer_idx", None), mala.get("tile")
    if not isinstance(layers, dict) or not (tile is None or isinstance(tile, (list, tuple))):
        raise ValueError(f"config.mala: layers must be a dict and tile a pair, got {layers!r} and {tile!r}")
    count = getattr(module.config, "num_hidden_layers", None)
    for key in layers:
        if not str(key).isdecimal() or str(int(key)) != str(key) or (count is not None and int(key) >= count):
            raise ValueError(f"config.mala: {key!r} is not the index of one of the model's {count} layers")
    setting = layers.get(index, layers.get(str(index), mala.get("tau", 1.0)))
    if setting != DENSE and (isinstance(setting, bool) or not isinstance(setting, (int, float))):
        raise ValueError(
            f"config.mala: a layer's setting is a tau >= 0 or {DENSE!r}, got {setting!r} for layer {index}"
        )
    return LayerSettings(
        None if setting == DENSE else setting,
        None if tile is None else tuple(tile),
        mala.get("save_support"),
        mala.get("deterministic", False),
    )


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
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    visible = _visible(attention_mask, q.shape[0], q.shape[1], k.shape[1], causal, sliding_window, kwargs)
    if visible.padding is not None and visible.padding.is_full:  # a cache longer than its content
        k, v = k[:, : visible.padding.width], v[:, : visible.padding.width]
        visible = Visible(visible.window)
    listeners = tuple(recorders)
    if listeners and torch.compiler.is_compiling():
        raise ValueError(
            "recording work reads values, which a compiled graph cannot: record the model before it is compiled"
        )
    work = None
    if settings.tau is None:
        if softcap or s_aux is not None:
            lacking = "a softcap" if softcap else "attention sinks"
            raise ValueError(
                f"layer {getattr(module, 'layer_idx', None)} is set to {DENSE!r} but has {lacking}, which torch's SDPA lacks: "
                "set its tau to 0 (full attention) instead"
            )
        out = dense_attention(q, k, v, visible, scaling)
    else:
        options = {
            "tau": settings.tau,
            "tile": settings.tile,
            "save_support": settings.save_support,
            "deterministic": settings.deterministic,
            "softmax_scale": scaling,
            "softcap": softcap or 0.0,
            "sinks": s_aux,
            "impl": impl,
            "return_work": bool(listeners),
        }
        result = _mala(q, k, v, visible, options)
        out, work = result if listeners else (result, None)
    if listeners:
        _tell(listeners, module, work, settings.tau)
    return out


@torch.compiler.disable  # where a compiled model breaks its graph, there is nothing to compile in this
def _tell(listeners: tuple[Callable, ...], module, work: Optional[Work], tau: Optional[float]) -> None:
    for listener in listeners:
        listener(module, work, tau)


def _mala(q: Tensor, k: Tensor, v: Tensor, visible: Visible, options: dict):
    if visible.packing is not None:
        of_q, of_k = visible.packing
        result = mala_attn_varlen_func(
            q[0], k[0], v[0],
            cu_seqlens_q=of_q.cu_seqlens, cu_seqlens_k=of_k.cu_seqlens, max_seqlen_q=of_q.max_seqlen, max_seqlen_k=of_k.max_seqlen,
            window=visible.window, **options,
        )  # fmt: skip
        return (result[0][None], result[1]) if options["return_work"] else result[None]
    if visible.padding is not None:
        padding = visible.padding
        options.update(
            leftpad_k=padding.leftpad_k, seqused_k=padding.seqused_k, seqused_q=padding.seqused_q(q.shape[1])
        )
    return mala_attn_func(q, k, v, mask=visible.mask, window=visible.window, **options)


def _check_request(query: Tensor, key: Tensor, value: Tensor, dropout: float, kwargs: dict) -> None:
    if any(type(x).__name__ == "DTensor" for x in (query, key, value)):
        raise ValueError(
            "query, key and value are DTensors: MALA needs local tensors, so use a tensor-parallel plan with local outputs"
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


def _visible(
    mask: Optional[Tensor],
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    sliding_window: Optional[int],
    kwargs: dict,
) -> Visible:
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    side = -1 if sliding_window is None else sliding_window - 1
    window = (side, 0 if causal else side)
    packing = _packing_of_lengths(kwargs, batch)
    if mask is None:
        if packing is not None:
            return Visible(window, packing=packing)
        shown = _packing_of_positions(kwargs.get("position_ids"), batch, seqlen_q, seqlen_k) if causal else None
        if shown is not None:
            return Visible(window, packing=(shown, shown))
        if causal and seqlen_q > seqlen_k:
            raise ValueError(
                f"causal attention of {seqlen_q} rows over {seqlen_k} keys has no meaning without an attention mask"
            )
        return Visible(window)
    if mask.ndim == 4:
        mask = (mask if mask.dtype == torch.bool else remembered(mask, read_allowed))[..., :seqlen_k]
        if packing is not None:  # a square mask need not know of the packing
            mask = mask & legal_pairs(Visible((-1, -1), packing=packing), seqlen_q, seqlen_k, mask.device)
        return Visible((-1, -1), mask=mask)
    if mask.ndim == 2 and mask.dtype == PACKING_DTYPE:
        sequences = remembered(mask, read_packing)
        return Visible(window, packing=(sequences, sequences))
    if mask.ndim != 2 or mask.is_floating_point() or mask.shape[1] > seqlen_k:
        raise ValueError(
            f"attention_mask must be 2-D (batch, keys up to {seqlen_k}) of 0 and 1, or 4-D, got {mask.dtype} {tuple(mask.shape)}"
        )
    if not causal:
        if mask.shape[1] != seqlen_k:
            raise ValueError(
                f"a 2-D mask of non-causal attention must cover all {seqlen_k} keys, got {tuple(mask.shape)}"
            )
        return Visible(window, mask=mask.to(torch.bool)[:, None, None, :])
    padding = remembered(mask, read_padding)
    if padding is None:
        raise ValueError(HOLES)
    if packing is not None and not padding.is_full:
        raise ValueError("both a padding mask and packed sequences (cu_seq_lens_q) were given: pass one of them")
    return Visible(window, padding=padding)


def _packing_of_lengths(kwargs: dict, batch: int) -> Optional[tuple[Packing, Packing]]:
    """The boundaries that a padding-free collator passes, of queries and of keys."""
    cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_q is None or cu_k is None:
        return None
    if batch != 1:
        raise ValueError(f"packed sequences (cu_seq_lens_q) come in a batch of 1, got {batch}")
    longest = kwargs.get("max_length_q"), kwargs.get("max_length_k")
    if torch.compiler.is_compiling() and any(n is None or isinstance(n, Tensor) for n in longest):
        raise ValueError(f"{PASS_LENGTHS}; the last two as Python integers")
    of_q, of_k = (
        Packing(cu.to(torch.int32), int(cu.diff().max() if n is None else n)) for cu, n in zip((cu_q, cu_k), longest)
    )
    return of_q, of_k


def _packing_of_positions(
    position_ids: Optional[Tensor], batch: int, seqlen_q: int, seqlen_k: int
) -> Optional[Packing]:
    """Packing is looked for where nothing else can be meant: one row of positions, no cache behind it."""
    if (
        position_ids is None
        or batch != 1
        or seqlen_q == 1
        or seqlen_q != seqlen_k
        or position_ids.shape != (1, seqlen_q)
    ):
        return None
    return remembered(position_ids, read_positions)

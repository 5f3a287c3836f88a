# SPDX-License-Identifier: Apache-2.0
"""``generate_batch``: a model on "mala" stays on MALA while Transformers runs it over a cache in pages.

Transformers decides by name there: it replaces what it does not know by FlashAttention where that is installed, and refuses it
elsewhere. Registered names are not asked. So this package answers for its own, in the one function that decides, and leaves all other
names to it. The pages of a batch are gathered by Transformers' cache; its sequences arrive packed.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from .hub import adapter_of
from .sequence_parallel import NAME

PAGED_NAME = "paged_mala"  # with no mask function: lengths say all
RENAMED = {"max_seqlen_q": "max_length_q", "max_seqlen_k": "max_length_k"}  # up to Transformers 5.18


def mala_paged_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of one layer over the cache of continuous batching.

    Args:
        query: (1, num_heads, total_q, head_dim), the new tokens of all sequences; key, value (1, num_kv_heads, total_q or, where the
            layer has updated the cache already, total_k, ...).
        kwargs: the cache, its indices, cu_seq_lens_q and cu_seq_lens_k as continuous batching passes them, else as for "mala".

    Raises:
        ValueError: outside of ``generate_batch``, and for reading by block tables, which Transformers keeps to FlashAttention's names.
    """
    if kwargs.get("read_index") is None or attention_mask is not None:
        raise ValueError(f"{PAGED_NAME!r} is what generate_batch makes of {NAME!r}: set attn_implementation={NAME!r}")
    if kwargs.get("block_table") is not None:
        raise ValueError(f"{NAME!r} gets the keys of continuous batching gathered, not by a block table")
    cache = kwargs.pop("cache", None)
    if cache is not None:  # since 5.23 the layer has done it
        key, value = _updated(cache, module, key, value, kwargs)
    window = getattr(module, "sliding_window", None) or None
    layer_type = "full_attention" if window is None else "sliding_attention"
    passed = {RENAMED.get(name, name): x for name, x in kwargs.items() if name not in ("read_index", "write_index")}
    passed = {name: x[layer_type] if isinstance(x, dict) and layer_type in x else x for name, x in passed.items()}
    passed.setdefault("sliding_window", window)
    return adapter_of(module).mala_attention_forward(module, query, key, value, **passed)


def _updated(cache: Any, module: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Keys and values (1, num_kv_heads, total_k, ...) of the sequences, the new ones among them and in the cache."""
    if "kwargs" in inspect.signature(cache.update).parameters:  # since 5.19
        return cache.update(key, value, module.layer_idx, kwargs=kwargs)
    indices = {name: kwargs[name] for name in ("read_index", "write_index")}
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **indices)
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None]


def keep_mala(refused: str) -> None:
    """Wrap the function by which continuous batching chooses the attention; doing it twice changes nothing.

    "mala" stays, ``refused`` is refused, other names are Transformers' to judge.
    """
    choose = ContinuousBatchingManager.switch_to_cb_friendly_attn
    if hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def wrapper(manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        name = model.config._attn_implementation
        if name == NAME:
            model.set_attn_implementation(PAGED_NAME)
            manager._original_attn_impl = name  # set again when the manager stops
        elif name == refused:
            raise ValueError(f"{name!r} is not for continuous batching: use {NAME!r}")
        elif name != PAGED_NAME:
            choose(manager, model, *args, **kwargs)

    ContinuousBatchingManager.switch_to_cb_friendly_attn = wrapper

# SPDX-License-Identifier: Apache-2.0
"""The mask function that Transformers asks once per forward and kind of layer.

Causal and sliding-window patterns with at most padding or packing stay one row per sequence (or None), so that long contexts
need no quadratic mask, and steps over a static cache get two numbers per sequence; everything else becomes the 4-D bool mask of SDPA.
The invariant behind the short forms: causal, the last row sees the last of the first ``mask.shape[1]`` keys (all keys if None), and
the layer applies its own window. See ``ops/hf_mask.py`` for the kinds.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from .ops.hf_mask import PACKING_DTYPE, Padding, lengths_mask, mark, read_packing, read_padding
from .sequence_parallel import check_mask_is_not_lost, place_and_size

COMPUTES_WITH_MASK = re.compile(r"allow_is_causal_skip=False")
PASSES_WINDOW = re.compile(r"attention_interface\((?:[^()]|\([^()]*\))*sliding_window=")


def mala_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The attention mask of one forward, with the arguments of ``transformers.masking_utils.sdpa_mask``.

    Raises:
        ValueError: if the model of ``config`` computes its own attention and would never ask for MALA.
    """
    if not is_tracing(attention_mask):
        check_asks_for_attention(type(config))
    request = _Request(
        batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, allow_is_causal_skip, device, type(config)
    )  # fmt: skip
    short, mask = _short_mask(request, mask_function)
    if not short:
        mask = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,  # SDPA's None is aligned at the top left
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap,
            device=device,
        )
    if not is_tracing(attention_mask):
        check_mask_is_not_lost(mask)
    return mask


@dataclass(frozen=True)
class Pattern:
    """Causal attention, within ``window`` keys up to the own one, inside each of ``sequences`` (int (batch, seqlen), rising)."""

    window: int | None = None
    sequences: Tensor | None = None


def read_pattern(mask_function: Callable) -> Pattern | None:
    """What Transformers' nested mask function means; None for all but causal, sliding and packed ones.

    Transformers hands over closures, so this looks inside them by name. A name that it does not know costs memory, never correctness.
    """
    if mask_function is causal_mask_function:
        return Pattern()
    if _made_by(mask_function) != "and_masks":
        return None
    parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    if len(parts) != 2:
        return None
    first, second = parts
    if _made_by(first) == "sliding_window_overlay" and second is causal_mask_function:
        return Pattern(window=inspect.getclosurevars(first).nonlocals.get("sliding_window"))
    if _made_by(second) == "packed_sequence_mask_function":
        if (
            _made_by(first) == "remap_positions_for_packed_sequence"
        ):  # positions rise by one inside a sequence, as the indices do
            first = inspect.getclosurevars(first).nonlocals.get("mask_function")
        base = read_pattern(first) if callable(first) else None
        sequences = inspect.getclosurevars(second).nonlocals.get("packed_sequence_mask")
        if base is not None and base.sequences is None and sequences is not None:
            return Pattern(base.window, sequences)
    return None


def _made_by(function: Callable) -> str | None:
    """Name of the function of ``transformers.masking_utils`` that made this closure."""
    is_theirs = getattr(function, "__module__", None) == causal_mask_function.__module__
    return function.__qualname__.split(".")[0] if is_theirs and "<locals>" in function.__qualname__ else None


@dataclass(frozen=True)
class _Request:
    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int
    attention_mask: Tensor | None
    may_be_none: bool
    device: torch.device | str
    config_type: Any


NOT_SHORT = False, None


def _short_mask(request: _Request, mask_function: Callable) -> tuple[bool, Tensor | None]:
    """(True, mask of at most one row per sequence), or NOT_SHORT where one row does not suffice."""
    r = request
    if is_tracing(r.attention_mask):
        return _traced_mask(request) if mask_function is causal_mask_function else NOT_SHORT
    pattern = read_pattern(mask_function)
    if pattern is None:
        return NOT_SHORT
    if pattern.sequences is not None:
        if r.batch_size > 1 or r.attention_mask is not None or _hides_window(pattern, r.kv_length, r.config_type):
            return NOT_SHORT
        mask = (pattern.sequences % 2).to(PACKING_DTYPE)
        return True, mark(mask, read_packing, read_packing(mask))
    if r.may_be_none:
        seen = int(r.q_offset) + r.q_length - r.kv_offset
        return NOT_SHORT if _hides_window(pattern, seen, r.config_type) else _padding_mask(request, seen)
    if r.q_length > 1 or _computes_with_mask(r.config_type) or _hides_window(pattern, r.kv_length, r.config_type):
        return NOT_SHORT
    return _step_mask(request)


def _traced_mask(request: _Request) -> tuple[bool, Tensor | None]:
    """The mask of causal attention in a graph, where values and closures cannot be read."""
    r = request
    if not r.may_be_none and (
        r.q_length > 1 or not torch.compiler.is_compiling() or _computes_with_mask(r.config_type)
    ):
        return NOT_SHORT
    if r.attention_mask is None:
        if isinstance(r.q_offset, Tensor):
            return True, _without_padding(request)
        return (True, None) if r.q_offset + r.q_length - r.kv_offset == r.kv_length else NOT_SHORT
    is_square = r.q_length == r.kv_length and not isinstance(r.q_offset, Tensor)
    if is_square and r.may_be_none and torch.compiler.is_compiling() and r.attention_mask.shape[1] == r.kv_length:
        return True, r.attention_mask  # the graph asserts that it has no holes
    return NOT_SHORT


def _step_mask(request: _Request) -> tuple[bool, Tensor | None]:
    """The lengths mask of one new token for each sequence."""
    r = request
    if r.attention_mask is None:
        return True, _without_padding(request)
    seen = int(r.q_offset) + 1 - r.kv_offset
    mask = r.attention_mask[:, r.kv_offset : r.kv_offset + seen]
    padding = read_padding(mask) if mask.shape[1] == seen else None
    if padding is None:
        return NOT_SHORT
    is_token = padding.seqused_k == seen  # else the new one is padding, which sees nothing
    return True, lengths_mask(padding.leftpad_k * is_token, padding.seqused_k * is_token)


def _without_padding(request: _Request) -> Tensor:
    """The lengths mask of sequences that own all keys so far."""
    r = request
    seen = torch.as_tensor(r.q_offset, device=r.device) + r.q_length - r.kv_offset
    end = seen.expand(r.batch_size)
    return lengths_mask(torch.zeros_like(end), end)


def _hides_window(pattern: Pattern, num_keys: int, config_type: Any) -> bool:
    """Whether a window matters that the model's layers do not pass to their attention function."""
    if pattern.window is None or _passes_window(config_type):
        return False
    sharers = place_and_size()  # of a sequence; the keys are those of one of them
    return pattern.window < num_keys * (1 if sharers is None else sharers[1])


def _padding_mask(request: _Request, seen: int) -> tuple[bool, Tensor | None]:
    """The padding mask of the first ``seen`` keys; None if they are all there is and all real."""
    r = request
    if r.attention_mask is not None:
        mask = r.attention_mask[:, r.kv_offset : r.kv_offset + seen]
        padding = read_padding(mask) if mask.shape[1] == seen else None
        if padding is None:
            return NOT_SHORT
        if not padding.is_full:
            return True, mark(mask, read_padding, padding)
    if seen == r.kv_length:
        return True, None
    mask = torch.ones(r.batch_size, seen, dtype=torch.bool, device=r.device)
    begin, end = (torch.full((r.batch_size,), n, dtype=torch.int32, device=r.device) for n in (0, seen))
    return True, mark(mask, read_padding, Padding(begin, end, seen, is_full=True))


def check_asks_for_attention(config_type: Any) -> None:
    """Refuse models that compute their own attention, and would run dense without a word."""
    name = _own_attention(config_type)
    if name is not None:
        raise ValueError(
            f"{name} computes its own attention and never asks the attention interface, so it cannot run MALA: "
            "load it with attn_implementation='eager' (or give composite models a dict, {'text_config': 'mala'})"
        )


@cache
def _own_attention(config_type: Any) -> str | None:
    """Name of the model class if none of this config's loaded model classes asks the attention interface."""
    classes = [cls for cls in _model_classes(config_type) if _source(cls) is not None]
    if any(cls._can_set_attn_implementation() for cls in classes):
        return None
    return classes[0].__name__ if classes else None


@torch._dynamo.assume_constant_result
def _computes_with_mask(config_type: Any) -> bool:
    """Whether this config's models compute with the mask themselves, and need a row for each query."""
    return _source_asks_for_rows(config_type)


@cache
def _source_asks_for_rows(config_type: Any) -> bool:
    return any(COMPUTES_WITH_MASK.search(_source(cls) or "") for cls in _model_classes(config_type))


@cache
def _passes_window(config_type: Any) -> bool:
    """Whether the layers of this config's models tell their attention function the window; else only a 4-D mask can."""
    return any(PASSES_WINDOW.search(_source(cls) or "") for cls in _model_classes(config_type))


def _model_classes(config_type: Any) -> Iterator[type[PreTrainedModel]]:
    """Loaded model classes of exactly this config."""
    seen, pending = set(), [PreTrainedModel]
    while pending:
        cls = pending.pop()
        if cls not in seen:
            seen.add(cls)
            pending += cls.__subclasses__()
            if getattr(cls, "config_class", None) is config_type:
                yield cls


def _source(cls: type) -> str | None:
    module = sys.modules.get(cls.__module__)
    try:
        return None if module is None else inspect.getsource(module)
    except (OSError, TypeError):
        return None

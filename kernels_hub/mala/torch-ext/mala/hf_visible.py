# SPDX-License-Identifier: Apache-2.0
"""Which pairs a layer may see: from its attention mask, its window, what a padding-free collator passes, and MALA's own window."""

from __future__ import annotations

from dataclasses import replace
from typing import Optional

import torch
from torch import Tensor

from .hf_dense import legal_pairs
from .hf_mask import (
    HOLES,
    LENGTHS_DTYPE,
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


def visible_pairs(
    mask: Optional[Tensor],
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    sliding_window: Optional[int],
    kwargs: dict,
) -> Visible:
    """What ``mask`` (one of the kinds in ``hf_mask``, or None) and the layer's other arguments allow.

    Raises:
        ValueError: for masks that MALA cannot honour.
    """
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
    if mask.ndim == 4 and mask.dtype == LENGTHS_DTYPE:
        if not causal or mask.shape != (batch, 1, 1, 2):
            raise ValueError(
                f"a 4-D attention mask of {mask.dtype} gives the lengths (batch, 1, 1, 2) of causal attention, got {tuple(mask.shape)}"
            )
        return Visible(window, lengths=mask[:, 0, 0])
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


def narrowed(visible: Visible, window: Optional[int], causal: bool) -> Visible:
    """The same with at most ``window`` keys for each row, counted back from the last that it may see: in causal attention its own.

    Raises:
        ValueError: for a window of a layer that is not causal.
    """
    if window is None:
        return visible
    if not causal:
        raise ValueError("config.mala: a window narrows causal attention only, and this layer is not causal")
    if visible.mask is None:
        left, right = visible.window
        return replace(visible, window=(window - 1 if left < 0 else min(left, window - 1), right))
    last = visible.mask.shape[-1] - 1 - visible.mask.flip(-1).to(torch.int8).argmax(-1, keepdim=True)
    key = torch.arange(visible.mask.shape[-1], device=visible.mask.device)
    return replace(visible, mask=visible.mask & (key > last - window))


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

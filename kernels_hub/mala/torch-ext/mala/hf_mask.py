# SPDX-License-Identifier: Apache-2.0
"""What an attention mask from Transformers says about rows and keys.

Five kinds reach an attention function here:

- bool (batch, W), the padding mask: causal attention over the first W keys, of which each sequence owns one contiguous block;
- int8 (1, seqlen), the packing mask: 0 and 1 by turns, one sequence of a packed batch after the other, causal inside each;
- int32 (batch, 1, 1, 2), the lengths mask: sequence b owns keys begin <= j < end, causal, and the last row is its token end - 1. Its
  shape says nothing about lengths, so that steps over a static cache share one graph;
- bool (batch or 1, heads or 1, seqlen_q, seqlen_k): True where attention is allowed, and nothing else applies on top;
- the same in floating point, if it says no more than a bool one can: 0 where allowed, hugely negative elsewhere.

Reading a mask's values costs a device synchronisation, so what was read is remembered as long as the tensor lives. A compiled
graph cannot read them: there, what is assumed of them is asserted when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

PACKING_DTYPE = torch.int8
LENGTHS_DTYPE = torch.int32
HOLES = "a 2-D attention mask must give each sequence one contiguous block of tokens: pass a 4-D mask for holes"
PASS_LENGTHS = (
    "a compiled model cannot count the sequences of a packed batch: pass cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k "
    "(DataCollatorWithFlattening(return_flash_attn_kwargs=True))"
)


@dataclass(frozen=True)
class Padding:
    """Sequence b owns keys leftpad_k[b] <= j < seqused_k[b] of the first ``width``; int32 (batch,). ``is_full``: all of them."""

    leftpad_k: Tensor
    seqused_k: Tensor
    width: int
    is_full: bool

    def seqused_q(self, seqlen_q: int) -> Tensor:
        """int32 (batch,): query rows up to the sequence's last token. Row i is the token at position i + width - seqlen_q."""
        return (self.seqused_k - (self.width - seqlen_q)).clamp(0, seqlen_q)


@dataclass(frozen=True)
class Packing:
    """Boundaries of packed sequences, int32 (num_sequences + 1,), and the longest of them."""

    cu_seqlens: Tensor
    max_seqlen: int


@dataclass(frozen=True)
class Visible:
    """Which pairs are legal: ``window`` (left, right) and at most one of mask, padding, lengths, packing (queries, keys).

    ``lengths``: int32 (batch, 2), the keys that each sequence owns, from the first to before the last; its last row is aligned there.
    """

    window: tuple[int, int]
    mask: Optional[Tensor] = None
    padding: Optional[Padding] = None
    lengths: Optional[Tensor] = None
    packing: Optional[tuple[Packing, Packing]] = None


def _require(condition: Tensor, message: str) -> None:
    """ValueError unless ``condition`` (one bool); in a compiled graph, RuntimeError when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)


def read_padding(mask: Tensor) -> Optional[Padding]:
    """The blocks of a 2-D padding mask; None where a row has a hole."""
    mask = mask.to(torch.bool)
    width = mask.shape[1]
    count = mask.sum(1, dtype=torch.int32)
    first = mask.to(torch.int8).argmax(1).to(torch.int32)
    end = (width - mask.flip(1).to(torch.int8).argmax(1).to(torch.int32)) * (count > 0)
    if torch.compiler.is_compiling():
        _require((end - first == count).all(), HOLES)
        return Padding(first, end, width, is_full=False)
    is_full, is_contiguous = torch.stack([count == width, end - first == count]).all(1).tolist()
    return Padding(first, end, width, is_full) if is_contiguous else None


def lengths_mask(begin: Tensor, end: Tensor) -> Tensor:
    """The lengths mask of ``begin`` and ``end``, integers (batch,)."""
    return torch.stack([begin, end], 1)[:, None, None].to(LENGTHS_DTYPE)


def read_packing(mask: Tensor) -> Packing:
    """The sequences of a packing mask (1, seqlen).

    Raises:
        ValueError: in a compiled graph, which cannot count them.
    """
    if torch.compiler.is_compiling():
        raise ValueError(PASS_LENGTHS)
    return _packing(mask[0, 1:] != mask[0, :-1])


def read_positions(position_ids: Tensor) -> Optional[Packing]:
    """The packed sequences that ``position_ids`` (1, seqlen) show, None where they show one sequence or leave a doubt.

    Packed means: positions rise by one, except where they fall back to the very first position.
    """
    positions = position_ids[0]
    restarts = positions[1:] != positions[:-1] + 1
    is_packed = restarts.any() & (positions[1:].where(restarts, positions[0]) == positions[0]).all()
    if torch.compiler.is_compiling():
        _require(~is_packed, PASS_LENGTHS)
        return None
    return _packing(restarts) if bool(is_packed) else None


def _packing(is_first: Tensor) -> Packing:
    """``is_first`` (seqlen - 1,): whether token i + 1 begins a sequence."""
    inner = is_first.nonzero()[:, 0] + 1
    cu_seqlens = torch.nn.functional.pad(inner, (1, 1))
    cu_seqlens[-1] = len(is_first) + 1
    return Packing(cu_seqlens.to(torch.int32), int(cu_seqlens.diff().max()))


def read_allowed(mask: Tensor) -> Tensor:
    """A 4-D floating-point mask as bool.

    Raises:
        ValueError: if a value is neither 0 nor at most half the dtype's minimum: an additive bias, which MALA does not have.
    """
    if not mask.is_floating_point():
        raise ValueError(f"a 4-D attention mask must be bool or floating-point, got {mask.dtype}")
    allowed = mask == 0
    _require(
        (allowed | (mask <= torch.finfo(mask.dtype).min / 2)).all(),
        "MALA has no additive attention bias, and the 4-D attention mask holds values between 0 (allowed) and "
        f"{torch.finfo(mask.dtype).min:.3g} (forbidden): use attn_implementation='sdpa' or 'eager' for this model",
    )
    return allowed


# what was read of a tensor: (reader, version of the tensor or None if it never changes, value)
_read: MutableMapping[Tensor, tuple] = WeakTensorKeyDictionary()


def mark(mask: Tensor, read: Callable, value) -> Tensor:
    """``mask``, made by us and written to by nobody, with ``read(mask)`` already known."""
    _read[mask] = read, None, value
    return mask


def remembered(tensor: Tensor, read: Callable):
    """``read(tensor)``, read once as long as nobody writes to the tensor (inference tensors can't tell: they are read again)."""
    if torch.compiler.is_compiling():
        return read(tensor)
    version = None if tensor.is_inference() else tensor._version
    stored = _read.get(tensor)
    if stored is not None and stored[0] is read and (stored[1] is None or stored[1] == version):
        return stored[2]
    value = read(tensor)
    if version is not None:
        _read[tensor] = read, version, value
    return value

# SPDX-License-Identifier: Apache-2.0
"""What the public functions make of the options that they share."""

from __future__ import annotations

import os
from typing import Optional

import torch
from torch import Tensor

from .checks import check_boundaries, check_flags, check_numbers
from .query_tile import Settings
from .tile_config import tile_config
from .visibility import Sequences
from .work import DISCOVERIES, INSTEAD


def settings_of(q, v, tau, causal, softmax_scale, window, softcap, tile, seqlen_q, seqlen_k) -> Settings:
    """The numbers of a call, checked; a ``tile`` of None is the shipped one."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    check_numbers(tau=tau, softmax_scale=scale, softcap=softcap, window=window, tile=tile)
    # a side that reaches beyond both sequences is unlimited
    left, right = (-1 if side >= max(seqlen_q, seqlen_k) else side for side in window)
    tile = tile_config(q.shape[-1], v.shape[-1], q.dtype, seqlen_q).tile if tile is None else tile
    return Settings(float(tau), float(scale), (left, 0 if causal else right), float(softcap), tile)


def if_readable(limit: int) -> Optional[int]:
    """``limit`` where values can be checked against it; a compiler has none yet."""
    return None if torch.compiler.is_compiling() else limit


def longest_of(total: int, name: str, cu_seqlens: Tensor, max_seqlen: Optional[int]) -> int:
    """The longest sequence, read from its boundaries unless it is given."""
    if not torch.compiler.is_compiling():
        return check_boundaries(total, name, cu_seqlens, max_seqlen)
    if max_seqlen is None:
        raise ValueError(
            f"a compiled call cannot read the longest sequence from cu_seqlens_{name}: pass max_seqlen_{name}"
        )
    return max_seqlen


def check_call_flags(causal, save_support, deterministic, return_lse, return_work) -> None:
    """Raise ``ValueError`` for a flag that is none."""
    check_flags(causal=causal, deterministic=deterministic, return_lse=return_lse, return_work=return_work)
    if save_support is not None:
        check_flags(save_support=save_support)


def discovery_of(
    discovery: str, impl: str, q: Tensor, settings: Settings, sequences: Sequences, mask, may_be_dense: bool = False
) -> str:
    """The way that was asked for, or "auto" where INT8 discovery could be chosen and "fused" where it could not.

    Raises:
        ValueError: for INT8 discovery that does not cover the call, and for "dense" where it ``may_be_dense`` is False.
    """
    if discovery not in DISCOVERIES:
        raise ValueError(f"discovery must be 'auto', 'fused', 'int8' or 'dense', got {discovery!r}")
    if discovery == "dense":
        if not may_be_dense:
            raise ValueError(f"discovery='dense' does not cover packed sequences and caches. {INSTEAD}")
        return discovery
    uncovered = {
        f"impl={impl!r} on {q.device.type}": impl != "triton",
        f"{q.dtype} inputs": q.dtype not in (torch.float16, torch.bfloat16),
        "padded or packed sequences": sequences.bounds is not None,
        "a mask": mask is not None,
        "softcap": settings.softcap > 0,
        "tau = 0": settings.tau == 0,
    }
    found = [name for name, is_there in uncovered.items() if is_there]
    if discovery == "int8" and found:
        raise ValueError(f"discovery='int8' does not cover {', '.join(found)}. {INSTEAD}")
    return "fused" if found else discovery


def hands_over(q: Tensor) -> bool:
    """Whether "auto" may hand a call on this tensor's device to a dense kernel: it was measured on GPUs."""
    return q.is_cuda


def check_dense(uncovered: list[str], impl: str, save_support: Optional[bool], deterministic: bool) -> None:
    """Raise ``ValueError`` where discovery="dense" was asked for and cannot be; ``uncovered`` as torch's kernels say."""
    found = [
        *uncovered,
        *([f"impl={impl!r}"] if impl != "auto" else []),
        *(["save_support=True"] if save_support else []),
        *(["deterministic=True"] if deterministic else []),
    ]
    if found:
        raise ValueError(f"discovery='dense' does not cover {', '.join(found)}. {INSTEAD}")


def may_be_dense(
    uncovered: list[str],
    impl: str,
    q: Tensor,
    tile,
    save_support: Optional[bool],
    deterministic: bool,
    return_lse: bool,
) -> bool:
    """Whether "auto" may choose torch's dense kernels: only where nothing was asked for that they do not give.

    impl and tile are those that were asked for. A compiled graph calls torch's public function, which returns no lse; an exported one
    is to hold for all lengths.
    """
    if torch.compiler.is_compiling() and (return_lse or getattr(torch.compiler, "is_exporting", bool)()):
        return False
    asked_for_nothing = impl == "auto" and tile is None and not save_support and not _is_repeatable(deterministic)
    return hands_over(q) and asked_for_nothing and not uncovered


def may_keep_all(discovery: str, impl: str, q: Tensor, tile, deterministic: bool) -> bool:
    """Whether "auto" may choose a decode that tests no tile: only where nothing was asked for. Arguments are those of the call."""
    return (
        discovery == "auto" and impl == "auto" and tile is None and not _is_repeatable(deterministic) and hands_over(q)
    )


def _is_repeatable(deterministic: bool) -> bool:
    """A call that is to give the same bits again must not go the way of earlier ones."""
    return deterministic or torch.are_deterministic_algorithms_enabled()


def implementation_of(impl: str, q: Tensor) -> str:
    """ "triton", "blockwise" or "reference" for ``impl``; ``ValueError`` where it cannot run."""
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


def returned(out, lse, work, return_lse: bool, return_work: bool):
    """What a public function returns."""
    extra = ([lse] if return_lse else []) + ([work] if return_work else [])
    return (out, *extra) if extra else out

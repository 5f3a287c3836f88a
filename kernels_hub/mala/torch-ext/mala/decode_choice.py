# SPDX-License-Identifier: Apache-2.0
"""How a call with few queries is computed: in one pass as any other, or as a decode, whose keys are split over the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Optional

import torch
from torch import Tensor

from .attend import Call
from .choice_memory import memory, memory_key
from .cudnn_plans import is_capturing
from .dense import dense_backend
from .discover_choice import SHORT, is_measured
from .key_plane import KeyPlane, check_key_plane
from .query_tile import Settings
from .support_reuse import is_reusing_support
from .tile_config import MAX_DECODE_ROWS, decode_launch
from .visibility import Sequences
from .work import Choice

FORMS = ("single", "two_pass", "int8_two_pass", "split")
MAX_TOKENS = 64  # new tokens of a sequence
# bytes of all keys of a call; below, two passes are slower than one over all values (results/decode_forms_h200.json)
SHORT_BYTES = 32 << 20
# of the tiles, retained: beyond, one pass over all values is faster, on a line between the same file's peaked and flat times at 128K
MAX_TWO_PASS_FRACTION = 0.7
CPU_SPLITS = 4  # where there is no GPU to fill


def decode_call(
    call: Call,
    decode: str,
    num_splits: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
    chosen_tile: bool,
    key_plane: Optional[KeyPlane] = None,
    may_keep_all: bool = False,
) -> Call:
    """``call`` in the form that ``decode`` asks for. ``chosen_tile``: its tile was asked for, and is not the shipped one.

    ``may_keep_all``: "auto" may choose a decode that retains every tile.

    Raises:
        ValueError: for a form that does not cover the call, and a ``key_plane`` that is not that of k or that the form does not read.
    """
    form = decode_form(decode, num_splits, q, k, v, sinks, call.sequences, mask, call.discovery)
    if key_plane is not None:
        if decode not in ("auto", "int8_two_pass"):
            raise ValueError(
                f"decode={decode!r} reads no key_plane: use decode='int8_two_pass' or 'auto', or give none"
            )
        check_key_plane(key_plane, k.shape[0], k.shape[2], k.shape[1], k.shape[3], k.device)
        if form == "two_pass" and call.settings.tau > 0:  # with tau = 0 all exact keys are read anyway
            form = "int8_two_pass"
    elif form == "int8_two_pass":
        raise ValueError("decode='int8_two_pass' reads the keys' INT8 plane: give key_plane, see quantize_keys")
    if form == "single" or (form == "two_pass" and decode == "auto" and not num_splits and _is_dense(call, q, k, v)):
        return call
    reason = ""
    if decode == "auto" and not num_splits and may_keep_all:
        reason = _dense_reason(call, k) or _flat_reason(call, q, k)
    settings = decode_settings(call.settings, q, v, k.shape[2], chosen_tile)
    num_splits = num_splits or (0 if call.impl == "triton" else CPU_SPLITS)
    form = "split" if reason else form
    return replace(call, settings=settings, form=form, num_splits=num_splits, dense_reason=reason)


def _is_dense(call: Call, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a step over a short cache is left to torch: the host takes longer to start MALA's kernels than they could save."""
    if torch.compiler.is_compiling() or is_capturing() or "dense" not in call.may_be:
        return False
    is_short = q.shape[1] == 1 and call.sequences.max_seqlen_k < SHORT
    return is_short and dense_backend(q, k, v, call.settings) is not None


def _dense_reason(call: Call, k: Tensor) -> str:
    """Why one pass over all keys and values is faster than two, whatever they hold; empty where it may not be.

    By shapes alone, so a CUDA graph may hold it. A compiler is asked for no length that varies: it would keep a graph for each answer.
    """
    if call.settings.tau == 0:
        return "tau = 0 retains every tile"
    keys = call.sequences.num_sequences * call.sequences.max_seqlen_k
    if torch.compiler.is_compiling() and not _is_constant(keys):
        return ""
    left = call.settings.window[0]
    if left >= 0:  # no more keys are read than the rows see
        keys = min(keys, call.sequences.num_sequences * (left + call.sequences.max_seqlen_q))
    if keys * k.shape[-2] * k.shape[-1] * k.element_size() >= SHORT_BYTES:
        return ""
    return f"fewer than {SHORT_BYTES >> 20} MiB of keys, where a second pass costs more than it can save"


def _flat_reason(call: Call, q: Tensor, k: Tensor) -> str:
    """Why two passes would read nearly all values after all, as a look at this layer's scores found; empty where they would not.

    A look waits for the device. It is taken as ``choice_memory.py`` says, and a CUDA graph goes the way that the last one found.
    """
    if torch.compiler.is_compiling() or call.sequences.bounds is not None or not is_measured(q.device):
        return ""
    key = memory_key(q, k, call.settings, call.sequences, FORMS)
    found = memory.recall(key, counts=not is_capturing())
    if found is None:
        if is_capturing():
            return ""
        from .discover_probe import sampled_counts  # triton is needed only here

        retained, visible = sampled_counts(q, k, call.settings, call.sequences).sum(0).tolist()
        is_flat = retained > MAX_TWO_PASS_FRACTION * visible
        reason = f"a look at the scores retains more than {MAX_TWO_PASS_FRACTION:.0%} of the tiles" if is_flat else ""
        found = [Choice("dense" if is_flat else "fused", reason)]
        memory.store(key, found)
    return found[0].reason


def _is_constant(number: int) -> bool:
    try:
        from torch.fx.experimental.symbolic_shapes import has_static_value
    except ImportError:  # a torch that cannot tell
        return False
    return has_static_value(number)


def decode_form(
    decode: str,
    num_splits: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Optional[Tensor],
    sequences: Sequences,
    mask: Optional[Tensor],
    discovery: str,
) -> str:
    """One of FORMS for ``decode``, which may also be "auto".

    Raises:
        ValueError: for a form that does not cover the call.
    """
    if decode not in ("auto", *FORMS):
        raise ValueError(f"decode must be 'auto', 'single', 'two_pass', 'int8_two_pass' or 'split', got {decode!r}")
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 0:
        raise ValueError(f"num_splits must be a whole number, 0 to let the kernel choose, got {num_splits!r}")
    if decode == "single" and num_splits:
        raise ValueError(f"decode='single' has no splits, got num_splits={num_splits}: leave it at 0")
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    if decode == "auto" and (needs_grad or sequences.max_seqlen_q >= sequences.max_seqlen_k):
        return "single"  # before anything else of a length is asked: a compiler would keep a graph for each answer
    group = max(q.shape[-2] // k.shape[-2], 1)
    uncovered = {
        f"{sequences.max_seqlen_q} queries (at most {MAX_TOKENS})": sequences.max_seqlen_q > MAX_TOKENS,
        f"{group} query heads to a KV head (at most {MAX_DECODE_ROWS})": group > MAX_DECODE_ROWS,
        "packed sequences": sequences.is_packed,
        "a mask": mask is not None,
        "gradients": needs_grad,
        "support that is kept for a recomputation": is_reusing_support(),
        f"discovery={discovery!r}": discovery in ("int8", "dense"),
    }
    found = [name for name, is_there in uncovered.items() if is_there]
    if decode == "auto":
        return "single" if found else "two_pass"
    if decode != "single" and found:
        raise ValueError(f"decode={decode!r} does not cover {', '.join(found)}: use decode='auto'")
    return decode


def decode_settings(settings: Settings, q: Tensor, v: Tensor, num_kv_heads: int, chosen_tile: bool) -> Settings:
    """``settings`` with the tile of a decode, (tokens, BLOCK_N): the one that was asked for, cut to what fits, or the shipped one."""
    tokens = max(1, min(q.shape[1], MAX_DECODE_ROWS // max(q.shape[2] // num_kv_heads, 1)))
    block_n = decode_launch(q.shape[-1], v.shape[-1], q.dtype).block_n
    if chosen_tile:
        tokens, block_n = min(settings.tile[0], tokens), settings.tile[1]
    return Settings(settings.tau, settings.softmax_scale, settings.window, settings.softcap, (tokens, block_n))

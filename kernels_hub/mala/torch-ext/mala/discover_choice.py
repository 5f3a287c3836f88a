# SPDX-License-Identifier: Apache-2.0
"""Which way a call takes where it may choose: the fused kernel, discovery in INT8, or torch's dense kernels; and why.

All satisfy the rule. "fused" and "int8" give the same bits; "dense" retains every tile, so its bits are those of full attention.
Lengths decide first. A long call is looked at (``discover_probe.py``), which waits for the device once. A shorter one goes the way that
a look at an earlier one found (``choice_memory.py``), and so does one in a CUDA graph, which cannot wait; where nothing is
remembered, and under a compiler, lengths decide alone. Which kernel a dense call runs is the business of ``cudnn_plans.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Optional

import torch
from torch import Tensor

from .choice_memory import ChoiceMemory, memory_key
from .cudnn_plans import is_capturing
from .query_tile import Settings
from .visibility import Sequences
from .work import Choice

# measured on an H200 (docs/performance.md); elsewhere nothing is known, so only lengths are looked at
SHORT = 2048  # keys; below, nothing that can be skipped pays for looking at it
MIN_LOOK = 16384  # queries and keys; below, a look takes longer than it could save in that call
# head_dim: share of the tiles, retained, beyond which walking the candidates costs more than INT8 scores save (by
# the slopes between rows of results/discovery_growth_h200.json; at 64 from 32,768 keys only)
MAX_INT8_FRACTION = {64: 0.06, 128: 0.12}
MAX_FUSED_FRACTION = 0.6  # beyond, a dense kernel is faster
MIN_SPLIT = 32768  # queries and keys; below, heads stay together, and one look serves many calls


def is_measured(device: torch.device) -> bool:
    """A Hopper GPU."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] == 9


def choose(
    q: Tensor,
    k: Tensor,
    settings: Settings,
    sequences: Sequences,
    may_be: tuple[str, ...],
    memory: Optional[ChoiceMemory] = None,
) -> list[Choice]:
    """The way of each KV head, of those in ``may_be`` ("fused" always is). Waits for the device where it looks at scores.

    ``memory``: None where nothing may be remembered, so that the same call always gets the same way.
    """
    if "dense" in may_be and settings.tau == 0:
        return [Choice("dense", "tau = 0 retains every tile")]
    if "dense" in may_be and sequences.max_seqlen_k < SHORT:
        return [Choice("dense", f"fewer than {SHORT:,} keys, where no tile that is skipped pays for the test")]
    if may_be == ("fused",):
        return [Choice("fused", "nothing else covers the call")]
    if torch.compiler.is_compiling():
        return [Choice("fused", "a compiled graph cannot look at scores before it chooses")]
    shortest = min(sequences.max_seqlen_q, sequences.max_seqlen_k)
    if shortest < MIN_LOOK and (memory is None or "dense" not in may_be or shortest < SHORT):
        return [
            Choice("fused", f"{SHORT:,} keys or more, fewer than {MIN_LOOK:,}, where a look costs more than it saves")
        ]
    if not is_measured(q.device):
        return [Choice("fused", "nothing else was measured on this device")]
    key = memory_key(q, k, settings, sequences, may_be)
    if memory is not None and (shortest < MIN_SPLIT or is_capturing()):
        remembered = memory.recall(key, counts=not is_capturing())
        if remembered is not None:
            return [replace(choice, reason=f"{choice.reason}, in an earlier call") for choice in remembered]
    if is_capturing():
        return [Choice("fused", "a CUDA graph cannot look at scores before it chooses")]
    if q.shape[-1] not in MAX_INT8_FRACTION:
        may_be = tuple(way for way in may_be if way != "int8")
        if may_be == ("fused",):
            return [
                Choice(
                    "fused", f"INT8 discovery was measured at head_dim {' and '.join(map(str, MAX_INT8_FRACTION))} only"
                )
            ]
    if shortest < MIN_LOOK:
        may_be = tuple(way for way in may_be if way != "int8")
    from .discover_probe import sampled_counts  # triton is needed only here

    counts = sampled_counts(q, k, settings, sequences).tolist()
    choices = choose_by_counts(counts, shortest, may_be, MAX_INT8_FRACTION.get(q.shape[-1], 0.0))
    if memory is not None:
        memory.store(key, choices)
    return choices


def choose_by_counts(
    counts: list[list[int]], shortest: int, may_be: tuple[str, ...], max_int8_fraction: float
) -> list[Choice]:
    """The ways of KV heads whose samples retained and saw so many tiles: (retained, visible) of each."""
    heads = range(len(counts))
    fractions = [retained / max(visible, 1) for retained, visible in counts]
    flat = [head for head in heads if "dense" in may_be and fractions[head] > MAX_FUSED_FRACTION]
    mean = sum(fractions) / len(fractions)
    if len(flat) < len(fractions) and shortest < MIN_SPLIT:  # one way for all
        flat = [*heads] if "dense" in may_be and mean > MAX_FUSED_FRACTION else []
    peaked = [head for head in heads if head not in flat]
    choices = []
    if peaked:
        share = sum(fractions[head] for head in peaked) / len(peaked)
        is_low = share <= max_int8_fraction and "int8" in may_be
        compared = f"at most {max_int8_fraction:.0%}" if is_low else f"at most {MAX_FUSED_FRACTION:.0%}"
        if not is_low and share > MAX_FUSED_FRACTION:  # no dense kernel covers the call
            compared = f"more than {MAX_FUSED_FRACTION:.0%}"
        reason = f"a sample of the rows retains {compared} of its tiles"
        choices.append(Choice("int8" if is_low else "fused", reason, tuple(peaked) if flat else None))
    if flat:
        reason = f"a sample of the rows retains more than {MAX_FUSED_FRACTION:.0%} of its tiles"
        choices.append(Choice("dense", reason, tuple(flat) if peaked else None))
    return choices

# SPDX-License-Identifier: Apache-2.0
"""Whether a dense call is worth cuDNN's plan for its shape.

Where MALA's own loop does not lead (``dense.py``) cuDNN is faster for many shapes once it has a plan for one, and builds it in about 38
ms, several hundred times as long as a short call takes (results/cudnn_plans_h200.json). Prompts of every length would pay that every
time. So a shape earns its plan: MALA's own kernel computes it until what cuDNN would have saved adds up to what a plan costs.

Where gradients are taken the own kernel stays: a forward and its recomputation must not go different ways.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from .choice_memory import remembers

PLAN_SECONDS = 0.038
SAVED_A_CALL = 5e-6  # seconds, by cuDNN over the loop that skips nothing, where it is faster
SAVED_A_FLOP = 0.08 / 550e12
MAX_SHAPES = 1024


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class PlanAccounts:
    """What each shape has earned, in seconds; the shapes that were seen last are kept."""

    def __init__(self) -> None:
        self._earned: OrderedDict[tuple, float] = OrderedDict()

    def has_plan(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
        """Count one more call of this shape, and say whether it has earned its plan.

        A CUDA graph under capture earns nothing, and a call whose gradient is taken, now or by a recomputation, has none.
        """
        if not remembers(q, k, v):
            return False
        shape = (*((x.shape, x.stride(), x.dtype, x.device) for x in (q, k, v)), is_causal)
        earned = self._earned.pop(shape, 0.0)
        if not is_capturing():
            flops = 2.0 * q.numel() * k.shape[1] + 2.0 * q.numel() // q.shape[-1] * v.shape[-1] * k.shape[1]
            earned += SAVED_A_CALL + SAVED_A_FLOP * flops / (2 if is_causal else 1)
        self._earned[shape] = earned
        if len(self._earned) > MAX_SHAPES:
            self._earned.popitem(last=False)
        return earned >= PLAN_SECONDS


plans = PlanAccounts()

# SPDX-License-Identifier: Apache-2.0
"""What reaches the operator while a model runs: which form, whether under a mask, and whether it reads the cache where it lies."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import pytest
import torch
import transformers as hf

from mala_hf.ops import operators


@dataclass(frozen=True)
class OperatorCall:
    """One call; ``in_cache``: its keys and values are the memory that the cache's last update returned."""

    form: str
    seqlen_q: int
    seqlen_k: int
    is_masked: bool
    in_cache: bool


@dataclass
class Calls:
    """Of a test, in order."""

    all: list[OperatorCall] = field(default_factory=list)

    @property
    def steps(self) -> list[OperatorCall]:
        """Those in which up to 64 new tokens meet a longer context."""
        return [call for call in self.all if call.seqlen_q <= 64 and call.seqlen_q < call.seqlen_k]


def memory_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def record_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Every call of MALA from now on."""
    found, updated = Calls(), []
    arguments = list(inspect.signature(operators.forward._init_fn).parameters)
    run, update = operators.run_forward, hf.Cache.update

    def recorded(*inputs):
        q, k, v, _, mask = inputs[:5]
        in_cache = updated[-2:] == [memory_of(k), memory_of(v)]
        form = inputs[arguments.index("form")]
        found.all.append(OperatorCall(form, q.shape[1], k.shape[1], mask is not None, in_cache))
        return run(*inputs)

    def remembered(cache, *args, **kwargs):
        states = update(cache, *args, **kwargs)
        updated.extend(map(memory_of, states))
        return states

    monkeypatch.setattr(operators, "run_forward", recorded)
    monkeypatch.setattr(hf.Cache, "update", remembered)
    return found

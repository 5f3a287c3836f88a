# SPDX-License-Identifier: Apache-2.0
"""A fixed part of the fuzz (``make fuzz`` runs 10,000 other cases), and that it would see what it is there for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fuzz_targets import TARGETS

from mala_hf.ops import blockwise, kvcache, visibility


@pytest.mark.parametrize("name", TARGETS)
def test_drawn_calls_give_the_rules_answers(name):
    if torch.cuda.is_available() and name.endswith("kernels"):
        pytest.skip("tensors on the CPU: the interpreter's test")
    target = TARGETS[name]
    assert target.run(target.subset) >= target.subset


def test_the_shares_are_those_of_a_hundred_cases():
    assert sum(target.share for target in TARGETS.values()) == 100


def _one_key_more(fixed):
    """Sequences that own a key of their padding."""

    def wrong(*args, **kwargs):
        sequences = fixed(*args, **kwargs)
        if sequences.bounds is not None:
            sequences.bounds[:, 3] = (sequences.bounds[:, 3] + 1).clamp(max=sequences.max_seqlen_k)
        return sequences

    return wrong


@pytest.mark.parametrize("fault", ["one key more", "a limit too high", "another gradient", "writes into one sequence"])
def test_the_fuzz_finds_a_planted_fault(fault, monkeypatch):
    """Each is one line that no shape of an output betrays."""
    name = "mala_attn_func"
    if fault == "one key more":
        name = "mala_attn_with_kvcache_func"
        monkeypatch.setattr(kvcache, "fixed_sequences", _one_key_more(visibility.fixed_sequences))
    elif fault == "a limit too high":
        limit_of = blockwise.limit_of
        monkeypatch.setattr(blockwise, "limit_of", lambda *args: limit_of(*args) + 0.05)
    elif fault == "another gradient":
        backward = blockwise.backward
        monkeypatch.setattr(blockwise, "backward", lambda *args: (2 * args[0], *backward(*args)[1:]))
    else:
        name = "mala_attn_with_kvcache_func"
        first = SimpleNamespace(arange=lambda *args, **more: torch.arange(*args, **more).clamp(max=0))
        monkeypatch.setattr(kvcache, "torch", first)
    with pytest.raises(AssertionError):
        TARGETS[name].run(200, shrinks=False)

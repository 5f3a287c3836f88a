# SPDX-License-Identifier: Apache-2.0
"""Twenty steps of Trainer on a tiny Llama: MALA's losses beside those of SDPA, eager attention, and SDPA in bfloat16.

The yardsticks are what users accept without a thought: another exact attention (for tau = 0), and bfloat16 autocast (for tau = 1).
"""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from project import ROOT
from tiny_model import runs_of_tokens, tiny_llama

sys.path.append(str(ROOT / "scripts"))

from training_runs import Attention, Settings, fine_tune, work_of

pytestmark = [pytest.mark.transformers, pytest.mark.xdist_group("training_miniature")]

LENGTH = 512
SETTINGS = Settings(steps=20, batch=2, seqlen=LENGTH, learning_rate=3e-4, warmup_steps=2)
LOSS_ULP = 2**-20  # of a float32 between 8 and 16, where the first losses lie
TILE = "tile=[16,16]"  # a short sequence then has many tiles to skip
RUNS = {
    "sdpa": ("sdpa", "float32"),
    "eager": ("eager", "float32"),
    "sdpa in bfloat16": ("sdpa", "bfloat16"),
    "tau 0": (f"mala:tau=0,{TILE}", "float32"),
    "tau 1": (f"mala:{TILE}", "float32"),
    "huge tau": (f"mala:tau=1e6,{TILE}", "float32"),
}


@pytest.fixture(scope="module")
def runs() -> dict[str, dict]:
    """Each run from the same weights on the same batches: what ``fine_tune`` returns, and the work before and after."""
    windows = runs_of_tokens(16 * LENGTH, run=12).view(16, LENGTH)
    done = {}
    for name, (label, dtype) in RUNS.items():
        model, attention = tiny_llama(positions=LENGTH), Attention.parse(label)
        before = work_of(model, windows[:2], attention, dtype)["work_fraction"]
        done[name] = fine_tune(model, windows, attention, dataclasses.replace(SETTINGS, dtype=dtype))
        done[name]["work"] = (before, work_of(model, windows[:2], attention, dtype)["work_fraction"])
    return done


def drift(run: dict, exact: dict, curve: str = "loss") -> float:
    """Largest difference of two curves at the same step."""
    one, other = (torch.tensor(r[curve], dtype=torch.float64) for r in (run, exact))
    return (one - other).abs().max().item()


def test_the_model_learns(runs):
    for run in runs.values():
        assert len(run["loss"]) == len(run["grad_norm"]) == SETTINGS.steps
        assert run["loss"][-1] < 0.75 * run["loss"][0]


def test_tau_zero_drifts_from_sdpa_no_more_than_eager_does(runs):
    allowed = 4 * max(drift(runs["eager"], runs["sdpa"]), LOSS_ULP)
    assert drift(runs["tau 0"], runs["sdpa"]) <= allowed
    assert runs["tau 0"]["work"] == (1, 1)


@pytest.mark.parametrize("curve", ["loss", "grad_norm"])
def test_tau_one_drifts_from_sdpa_less_than_bfloat16_does(runs, curve):
    assert drift(runs["tau 1"], runs["sdpa"], curve) <= drift(runs["sdpa in bfloat16"], runs["sdpa"], curve)


def test_tau_one_skips_most_tiles_before_and_after(runs):
    assert all(0 < work < 0.5 for work in runs["tau 1"]["work"])
    assert drift(runs["tau 1"], runs["sdpa"]) > 10 * LOSS_ULP  # the skipping reaches the losses


def test_a_huge_tau_is_seen_in_the_losses(runs):
    """Negative control: these losses can tell a wrong attention from a right one."""
    assert drift(runs["huge tau"], runs["sdpa"]) > 3 * drift(runs["sdpa in bfloat16"], runs["sdpa"])

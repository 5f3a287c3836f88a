# SPDX-License-Identifier: Apache-2.0
"""Two GPUs (NCCL) that share a model's heads compute what one computes, within the noise of bfloat16 that SDPA shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import PROCESSES, launch
from project import ROOT
from tiny_model import save_tiny_checkpoint
from torch import Tensor
from two_gpu_steps import ATTENTIONS, placed, results_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < PROCESSES, reason="needs two GPUs"),
    pytest.mark.xdist_group("distributed"),
]

FACTOR = 2.0  # MALA's difference over SDPA's: a tile at its limit may be retained in one sum and not in the other
FLOOR, CEILING = 1e-5, 0.05  # relative: of float32, and of what is noise at all


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[dict, list[dict]]:
    """Of one GPU and of two, by attention."""
    folder = tmp_path_factory.mktemp("model")
    checkpoint = save_tiny_checkpoint(folder / "checkpoint", positions=4096)
    return alone(checkpoint), together(checkpoint, folder)


def alone(checkpoint: Path) -> dict:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = placed(checkpoint, device)
    return {name: results_of(model, name) for name in ATTENTIONS}


def together(checkpoint: Path, folder: Path) -> list[dict]:
    launch(ROOT / "tests" / "two_gpu_steps.py", checkpoint, folder, gpus=True)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def same_context(found: dict, expected: dict) -> int:
    """Decoding steps that had the same tokens before them."""
    differ = (found["tokens"] != expected["tokens"]).any(0).nonzero()
    return int(differ[0]) + 1 if len(differ) else found["tokens"].shape[1]


def differences(found: dict, expected: dict) -> dict[str, float]:
    steps = same_context(found, expected)
    pairs = {key: (found[key], expected[key]) for key in ("logits", "gradient")}
    pairs["steps"] = found["steps"][:, :steps], expected["steps"][:, :steps]
    return {key: difference(*pair) for key, pair in pairs.items()}


def test_forward_backward_and_decode_are_those_of_one_gpu_within_the_noise_of_sdpa(results):
    one, two = results
    for found in two:
        noise = differences(found["sdpa"], one["sdpa"])
        for key, mine in differences(found["mala"], one["mala"]).items():
            assert noise[key] < CEILING
            assert mine <= max(FACTOR * noise[key], FLOOR), (key, mine, noise[key])


def test_greedy_tokens_differ_only_where_two_are_as_good_within_the_noise(results):
    one, two = results
    for found in two:
        mine, truth = found["mala"], one["mala"]
        assert mine["tokens"].tolist() == two[0]["mala"]["tokens"].tolist()  # the processes agree
        last = same_context(mine, truth) - 1
        scores, chosen = truth["steps"][0, last], mine["tokens"][0, last]
        moved = (mine["steps"][0, last] - scores).abs().max()
        assert scores.max() - scores[chosen] <= 2 * moved


def test_each_gpu_attends_with_its_share_of_the_heads(results):
    _, two = results
    for rank, found in enumerate(two):
        assert list(found["heads"].values()) == [[2 * rank, 2 * rank + 1]] * 2
        for layer in found["gathered"]["layers"]:
            assert layer["impls"] == ["triton" if torch.cuda.is_available() else "blockwise"]
            assert all(0 < kept < 1 for kept in layer["work_fraction"])

# SPDX-License-Identifier: Apache-2.0
"""Two processes on CPUs (gloo) train as one does on the same global batches: DDP and FSDP2 through accelerate, and Trainer.

How far they may differ is measured: one process that accumulates the gradients of the two halves of each batch does the same sums
in the same order, without communication. It differs from whole batches by rounding; four times that is allowed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed_steps import BATCH, LENGTH, STEPS, model_and_optimizer, steps_in_one_process, whole
from processes import PROCESSES, launch
from project import ROOT

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed"),
    pytest.mark.xdist_group("distributed"),
]

WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPLlamaForCausalLM", "trainer": "DistributedDataParallel"}
FLOOR = 1e-6  # relative; some eight roundings of float32


def saved_by(kind: str, folder: Path) -> list[dict]:
    """What each process saved."""
    launch(ROOT / "tests" / "distributed_steps.py", kind, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


@pytest.fixture(scope="module")
def one_process() -> dict:
    return steps_in_one_process()


@pytest.fixture(scope="module")
def halves() -> dict:
    return steps_in_one_process(parts=PROCESSES)


@pytest.fixture(scope="module", params=WRAPPERS)
def run(request, tmp_path_factory) -> tuple[str, list[dict]]:
    return request.param, saved_by(request.param, tmp_path_factory.mktemp(request.param))


def difference(one: dict, other: dict, what: str) -> float:
    """Relative L2 difference of the worst tensor."""
    assert one[what].keys() == other[what].keys()
    return max(((one[what][name] - x).norm() / x.norm()).item() for name, x in other[what].items())


def assert_same(results: list[dict], one_process: dict, halves: dict, what: str) -> None:
    allowed = max(4 * difference(halves, one_process, what), FLOOR)
    assert allowed < 1e-4  # rounding, so that a wrong average cannot hide
    for found in results:
        assert difference(found, one_process, what) <= allowed


def test_two_processes_share_the_work_and_skip_tiles(run):
    kind, results = run
    for found in results:
        assert found["processes"] == PROCESSES
        assert found["wrapper"] == WRAPPERS[kind]
        assert found["own_share"] == (pytest.approx(1 / PROCESSES, abs=0.01) if kind == "fsdp2" else 1)
        assert 0 < found["work_fraction"] < 0.5


def test_a_gathered_report_counts_the_sequences_of_all(run):
    first, second = (found["gathered"] for found in run[1])
    assert first == second
    assert [layer["rows"] for layer in first["layers"]] == [STEPS * BATCH * LENGTH] * 2
    mean = sum(found["work_fraction"] for found in run[1]) / PROCESSES
    assert first["work_fraction"] == pytest.approx(mean)
    assert run[1][0]["work_fraction"] != run[1][1]["work_fraction"]


def test_losses_are_those_of_one_process(run, one_process, halves):
    allowed = 4 * max(abs(a - b) for a, b in zip(halves["losses"], one_process["losses"], strict=True))
    for found in run[1]:
        assert found["losses"] == pytest.approx(one_process["losses"], rel=FLOOR, abs=allowed)


def test_gradients_of_the_first_step_are_those_of_one_process(run, one_process, halves):
    kind, results = run
    if kind == "trainer":
        pytest.skip("Trainer clears the gradients; the parameters show what they were")
    assert_same(results, one_process, halves, "gradients")


def test_parameters_after_the_last_step_are_those_of_one_process(run, one_process, halves):
    assert_same(run[1], one_process, halves, "parameters")


def test_parameters_are_equal_in_both_processes(run):
    first, second = (found["parameters"] for found in run[1])
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert torch.equal(weight, second[name])


def test_training_moves_the_parameters_by_far_more_than_is_allowed(one_process):
    start = {"parameters": whole(model_and_optimizer()[0].named_parameters())}
    assert len(one_process["losses"]) == STEPS
    assert difference(one_process, start, "parameters") > 1e-3

# SPDX-License-Identifier: Apache-2.0
"""The benchmark over several processes: how heads are shared out, and a small run on CPUs."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from processes import PROCESSES, launch
from project import ROOT

SCRIPTS = ROOT / "scripts"
SLOTS = [100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 800.0, 900.0]


@pytest.fixture(scope="module")
def script():
    sys.path.append(str(SCRIPTS))
    return pytest.importorskip("bench_tensor_parallel")


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_both_splits_share_out_every_head_once_and_as_many_to_each(script, ranks):
    for split in (script.in_order(8, ranks), script.balanced(SLOTS, ranks)):
        assert sorted(head for heads in split for head in heads) == list(range(8))
        assert {len(heads) for heads in split} == {8 // ranks}


def test_the_balanced_split_evens_out_what_heads_retained(script):
    def largest(split: list[list[int]]) -> float:
        return max(sum(SLOTS[head] for head in heads) for heads in split)

    assert largest(script.balanced(SLOTS, 2)) == sum(SLOTS) / 2 == 1900
    assert largest(script.balanced(SLOTS, 4)) == 1000 < largest(script.in_order(8, 4))


def test_processes_must_divide_the_heads(script):
    with pytest.raises(ValueError, match="3 processes do not divide 8 KV heads"):
        script.in_order(8, 3)


def test_a_share_holds_kv_heads_with_their_query_heads(script):
    q, k = torch.arange(6.0).expand(1, 2, 6)[..., None], torch.arange(3.0).expand(1, 2, 3)[..., None]
    own = script.share(script.Inputs(q, k, -k), [0, 2])
    assert own.q[0, 0, :, 0].tolist() == [0, 1, 4, 5]
    assert own.k[0, 1, :, 0].tolist() == [0, 2]
    assert own.v[0, 1, :, 0].tolist() == [0, -2]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
@pytest.mark.xdist_group("distributed")
def test_a_small_run_writes_every_operation_and_the_step_for_each_process(tmp_path):
    output = tmp_path / "found.json"
    sizes = ["--seqlen", 1024, "--slots", 300, "--heads", 8, 4, "--head-dim", 32, "--layers", 2, "--budget-ms", 1]
    launch(SCRIPTS / "bench_tensor_parallel.py", "--device", "cpu", *sizes, "--output", output)
    found = json.loads(output.read_text("utf-8"))
    assert found["ranks"] == PROCESSES
    for name in ("forward", "backward", "decode"):
        row = found[name]
        assert 150 < row["key_slots_per_query"] < 450
        in_order, balanced = (row["splits"][split]["key_slots_per_query_by_rank"] for split in ("in_order", "balanced"))
        assert max(balanced) - min(balanced) < max(in_order) - min(in_order)
        for column in (row["mala"]["in_order"], row["mala"]["balanced"], row["sdpa_math"]):
            times = [one["median_ms"] for one in column["by_rank"]]
            assert len(times) == PROCESSES
            assert column["slowest_ms"] == max(times) > 0
            assert column["spread"] == pytest.approx(max(times) / min(times) - 1)
        speedup = row["sdpa_math"]["slowest_ms"] / row["mala"]["in_order"]["slowest_ms"]
        assert row["mala"]["in_order"]["speedup_over_math"] == pytest.approx(speedup)
    step = found["step"]
    assert 0 < step["work_fraction"] < 1
    assert step["difference"] < 0.1
    for name in ("mala", "sdpa"):
        assert len(step["by_rank"][name]) == PROCESSES
        for one in step["by_rank"][name]:
            parts = [one[f"{part}_ms"] for part in ("attention", "communication", "rest")]
            assert min(parts[:2]) > 0
            assert sum(parts) == pytest.approx(one["step_ms"])

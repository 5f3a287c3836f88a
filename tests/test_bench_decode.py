# SPDX-License-Identifier: Apache-2.0
"""The decode benchmark: what it states is so, what is wrong is never timed, and it runs without a GPU."""

import json

import pytest
import torch
from inputs import CAPTURED

from mala_hf.bench import decode
from mala_hf.bench.decode import measure_decode, retained_keys
from mala_hf.bench.decode_inputs import DecodeShape, decode_inputs
from mala_hf.bench.decode_workload import DecodeWorkload, decode_slots, decode_workloads
from mala_hf.cli import main
from mala_hf.ops import mala_attn_func
from mala_hf.ops.choice_memory import memory
from mala_hf.ops.work import Choice

CPU = torch.device("cpu")
FLOAT32 = {"dtype": torch.float32, "device": "cpu"}
BANDWIDTH = {"copy_gb_s": 10.0, "read_gb_s": 10.0}


def dense(q, k, v):
    return mala_attn_func(q, k, v, tau=0.0)


def test_retained_slots_come_near_what_was_asked_for_and_heads_differ():
    shape = DecodeShape(2, 8, 2, 4096, 32)
    inputs = decode_inputs(shape, 600.0, decode_slots, **FLOAT32)
    assert inputs.q.shape == (2, 1, 8, 32)
    assert inputs.k.shape == inputs.v.shape == (2, 4096, 2, 32)
    assert decode_slots(inputs) == pytest.approx(600, rel=0.1)
    _, work = mala_attn_func(inputs.q, inputs.k, inputs.v, decode="single", return_work=True)
    assert work.key_slots_per_query[:, -1].mean() > work.key_slots_per_query[:, 0].mean()


def test_flat_heads_retain_everything_and_the_others_are_fitted_without_them():
    shape = DecodeShape(1, 4, 4, 2048, 32)
    inputs = decode_inputs(shape, 200.0, decode_slots, flat_share=0.25, **FLOAT32)
    _, work = mala_attn_func(inputs.q, inputs.k, inputs.v, decode="two_pass", return_work=True)
    assert inputs.flat_heads == 1
    assert work.work_fraction[0, 0] > 0.95
    assert work.key_slots_per_query[0, 1:].mean() == pytest.approx(200, rel=0.2)
    with pytest.raises(ValueError, match="between 0 and 1"):
        decode_inputs(shape, 200.0, decode_slots, flat_share=1.5, **FLOAT32)


def test_values_to_be_read_are_those_that_any_head_of_the_group_needs_and_no_more_than_there_are():
    retained = torch.tensor([[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 0]], dtype=torch.bool)[None, :, None]
    assert retained_keys(retained, 2, 64, 150) == (64 + 22) + 64
    assert retained_keys(retained, 4, 64, 150) == 64 + 22 + 64 + 64


def test_a_row_states_work_bytes_and_errors_and_a_baseline_that_fails_says_why():
    def broken(q, k, v):
        raise RuntimeError("no kernel\nfor this")

    def wrong(q, k, v):
        return 2 * dense(q, k, v)

    workload = DecodeWorkload(DecodeShape(1, 4, 2, 1024, 32), 200.0)
    baselines = {"dense": dense, "broken": broken, "wrong": wrong}
    memory.store(("an earlier row",), [Choice("fused", "peaked")])
    row = measure_decode(workload, baselines, CPU, budget_ms=1.0, bandwidth=BANDWIDTH)
    assert memory.recall(("an earlier row",)) is None
    assert row["auto"]["choices"] == ["fused: a decode has one way"]  # on the CPU
    cache = 1024 * 2 * 32 * 4
    for form in decode.FORMS:
        column = row[form]
        assert column["relative_error"] < 0.02
        assert (0.25 if form == "mala_int8" else 1) * cache < column["read_bytes"] <= 2 * cache
        assert column["gb_s"] == pytest.approx(column["read_bytes"] / column["median_ms"] / 1e6)
        assert column["of_copy"] == pytest.approx(column["gb_s"] / 10)
        assert column["p10_ms"] <= column["median_ms"] <= column["p90_ms"]
        assert column["speedup_over_dense"] == row["dense"]["median_ms"] / column["median_ms"]
    slots = row["two_pass"]["key_slots_per_query"]  # both heads of a group share their tiles
    assert row["two_pass"]["read_bytes"] == cache + slots * 2 * 32 * 4
    slots = row["mala_int8"]["key_slots_per_query"]
    assert row["mala_int8"]["read_bytes"] == 1024 * 2 * (32 + 8) + slots * 2 * 2 * 32 * 4
    assert row["dense"]["read_bytes"] == 2 * cache
    assert row["best_dense"] == "dense"
    assert row["broken"] == {"failed": "RuntimeError: no kernel"}
    assert "no timing" in row["wrong"]["failed"]


def test_a_wrong_form_of_ours_ends_the_run(monkeypatch):
    def wrong(q, k, v, plane, form, **options):
        found = mala_attn_func(q, k, v, causal=True, decode=form, **options)
        return found if options else found + 1

    monkeypatch.setattr(decode, "mala", wrong)
    workload = DecodeWorkload(DecodeShape(1, 2, 1, 256, 32), 128.0)
    with pytest.raises(RuntimeError, match="two_pass at 256 tokens is wrong"):
        measure_decode(workload, {}, CPU, budget_ms=1.0, bandwidth=BANDWIDTH)


def test_the_shapes_of_a_run_without_arguments_end_with_a_flat_one():
    found = decode_workloads([], [400.0], 128, 0.0)
    assert [one.flat_share for one in found] == [0.0] * 6 + [1.0]
    assert found[-1].shape == DecodeShape(1, 16, 8, 131072, 128)
    assert len(decode_workloads(["1,2,1,64", "2,2,1,64"], [100.0, 200.0], 64, 0.0)) == 4


def run(arguments, capsys):
    code = main(["bench", "--decode", "--device", "cpu", "--budget-ms", "1", *arguments])
    return code, capsys.readouterr()


SMALL = ["--shapes", "1,4,2,256", "2,4,1,300", "--head-dim", "32", "--slots", "128"]


def test_the_command_writes_its_rows_and_prints_them(tmp_path, capsys):
    output = tmp_path / "made" / "decode.json"
    code, printed = run([*SMALL, "--output", str(output), "--commit", "abc"], capsys)
    assert code == 0
    result = json.loads(output.read_text("utf-8"))
    assert result["commit"] == "abc"
    assert set(result["bandwidth"]) == {"copy_gb_s", "read_gb_s"}
    assert [(row["batch"], row["context"]) for row in result["rows"]] == [(1, 256), (2, 300)]
    assert result["unavailable"] == {"sdpa_cudnn": "it needs a GPU, and this runs on cpu"}
    assert "sdpa_cudnn" not in result["rows"][0]
    assert result["rows"][0]["best_dense"] == "sdpa_flash"
    assert "batch 2, 4/1 heads of 32, context 300" in printed.out
    assert "sdpa_cudnn is not here: it needs a GPU, and this runs on cpu" in printed.out
    assert "Error" not in printed.out


def test_json_goes_to_stdout_alone(capsys):
    code, printed = run([*SMALL[:2], *SMALL[3:], "--json"], capsys)
    assert code == 0
    assert len(json.loads(printed.out)["rows"]) == 1
    assert printed.err.startswith("mala-hf: batch 1")


def test_what_does_not_fit_into_the_time_is_named(capsys):
    code, printed = run([*SMALL, "--seconds", "1e-9", "--json"], capsys)
    assert code == 0
    result = json.loads(printed.out)
    assert result["rows"] == []
    assert [one["reason"] for one in result["not_run"]] == ["the 1e-09 seconds were spent"] * 2


def test_the_last_token_of_captured_inputs_is_a_decode(capsys):
    code, printed = run(["--captured", str(CAPTURED), "--lengths", "500", "--json"], capsys)
    assert code == 0
    (row,) = json.loads(printed.out)["rows"]
    assert (row["context"], row["num_heads"], row["captured"]) == (500, 3, CAPTURED.name)
    assert 0 < row["two_pass"]["work_fraction"] <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "1,2,3"], "a shape is BATCH,QUERY_HEADS,KV_HEADS,CONTEXT"),
        (["--shapes", "1,3,2,64"], "2 KV heads do not divide 3"),
        (["--shapes", "1,2,2,64", "--lengths", "64"], "leave out --heads and --lengths"),
        (["--captured", str(CAPTURED), "--slots", "100"], "captured q, k, v are as they are"),
        (["--budget-ms", "0"], "--budget-ms must be above 0"),
        (["--slots", "-1"], "--slots must be above 0"),
        (["--baselines", "sdpa"], "baselines are sdpa_cudnn"),
        (["--device", "meta"], "nothing can be computed on the device meta"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    code, printed = run(arguments, capsys)
    assert code == 1
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.gpu
def test_a_row_on_a_gpu(capsys):
    arguments = ["bench", "--decode", "--shapes", "1,8,4,2048", "--budget-ms", "5", "--json"]
    assert main(arguments) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    keys = 2048 * 4 * 128 * 2
    assert row["cache_copies"] * keys >= 4 * torch.cuda.get_device_properties(0).L2_cache_size
    assert row["two_pass"]["calls"] % row["cache_copies"] == 0
    assert row["two_pass"]["median_ms"] <= row["two_pass"]["eager_ms"]
    assert row["sdpa_flash"]["peak_bytes"] >= 0

# SPDX-License-Identifier: Apache-2.0
"""The benchmark of whole sequences: inputs, gate, times, baselines and rows, without a GPU."""

import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from inputs import CAPTURED
from safetensors.torch import save_file
from tiny_model import save_tiny_checkpoint
from torch.nn.attention.flex_attention import create_block_mask

from mala_hf.bench import baselines, forward, timing
from mala_hf.bench.backward import gradient_errors, measure_backward, true_gradients
from mala_hf.bench.baselines import LOADERS, causal_blocks, load_baselines, sdpa
from mala_hf.bench.forward import measure_forward
from mala_hf.bench.gate import check, full_attention, relative_error
from mala_hf.bench.generate import measure_generate
from mala_hf.bench.runner import run_rows
from mala_hf.bench.tables import row_lines
from mala_hf.bench.workload import Workload, measured_slots, workloads_of
from mala_hf.ops import mala_attn_func
from mala_hf.ops.choice_memory import memory
from mala_hf.ops.work import Choice
from mala_hf.workloads import captured_inputs, peaked_inputs

CPU = torch.device("cpu")
FLOAT32 = {"dtype": torch.float32, "device": "cpu"}
SMALL = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}


def dense(q, k, v):
    return mala_attn_func(q, k, v, causal=True, tau=0.0)


# inputs


def test_a_share_of_flat_heads_retains_nearly_everything_and_leaves_the_others_as_they_are():
    inputs = peaked_inputs(1024, links=0.5, flat_share=0.5, **SMALL, **FLOAT32)
    without = peaked_inputs(1024, links=0.5, **SMALL, **FLOAT32)
    _, work = mala_attn_func(inputs.q, inputs.k, inputs.v, causal=True, tile=(64, 64), return_work=True)
    assert inputs.flat_heads == 2
    assert work.work_fraction[0, :2].min() > 0.98
    assert work.work_fraction[0, 2:].max() < 0.6
    assert torch.equal(inputs.q[:, :, 2:], without.q[:, :, 2:])
    assert torch.equal(inputs.k[:, :, 1:], without.k[:, :, 1:])


def test_flat_heads_are_left_out_of_the_fit():
    inputs = Workload(1024, 250.0, flat_share=0.5, **SMALL).inputs(CPU)
    _, work = mala_attn_func(inputs.q, inputs.k, inputs.v, causal=True, return_work=True)
    assert measured_slots(inputs) == pytest.approx(250, rel=0.1)
    assert work.key_slots_per_query.mean() > 1.2 * measured_slots(inputs)


def test_flat_and_captured_inputs_have_a_row_for_each_length():
    assert len(workloads_of([64, 128], [100.0, 200.0], 0.0, SMALL)) == 4
    assert [one.slots for one in workloads_of([64, 128], [100.0, 200.0], 1.0, SMALL)] == [None, None]


def test_captured_inputs_are_the_first_tokens_of_all_groups(tmp_path):
    whole = captured_inputs(CAPTURED, None, **FLOAT32)
    assert (whole.q.shape, whole.k.shape) == ((1, 2048, 3, 64), (1, 2048, 1, 64))
    assert torch.equal(captured_inputs(CAPTURED, 100, **FLOAT32).k, whole.k[:, :100])
    tensors = {f"{x}.g{n}": torch.full((1, 2 if x == "q" else 1, 8, 4), float(n)) for x in "qkv" for n in range(3)}
    save_file(tensors, tmp_path / "groups.safetensors")
    groups = captured_inputs(tmp_path / "groups.safetensors", 8, **FLOAT32)
    assert groups.q[0, 0, :, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert groups.k[0, 0, :, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"q": (2, 8, 4), "k": (1, 8, 4)}, "lacks the tensor v"),
        ({"q": (8, 4), "k": (8, 4), "v": (8, 4)}, "must be \\(heads, length, head_dim\\)"),
        ({"q": (2, 4, 4), "k": (1, 4, 4), "v": (1, 4, 4)}, "holds 4 tokens, got a length of 8"),
        ({}, "lacks the tensor q"),
    ],
)
def test_a_capture_of_another_form_is_refused(tensors, message, tmp_path):
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=message):
        captured_inputs(tmp_path / "x.safetensors", 8, **FLOAT32)


# gate


def test_the_gate_sees_the_last_rows_of_every_sequence_and_a_nan():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 50, heads, 16) for heads in (4, 2, 2))
    truth = full_attention(q, k, v, 20)
    out = dense(q, k, v)
    assert truth.shape == (2, 20, 4, 16)
    assert relative_error(out, truth) < 1e-5
    out[1, -1, 3] += 1
    assert relative_error(out, truth) > 0.02
    out[0, -1, 0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="x is wrong: relative error nan"):
        check("x", relative_error(out, truth))


def test_the_gate_of_gradients_sees_a_wrong_one():
    inputs = peaked_inputs(40, links=0.0, **SMALL, **FLOAT32)
    for x in (inputs.q, inputs.k, inputs.v):
        x.requires_grad_()
    do = torch.randn(1, 10, 4, 32)
    truth = true_gradients(inputs, do)
    assert max(gradient_errors(dense, inputs, do, truth)) < 1e-4
    dq, dk, dv = gradient_errors(lambda q, k, v: dense(q, k.detach() + 0 * k, v), inputs, do, truth)
    assert max(dq, dv) < 1e-4
    assert dk > 0.9


# times


def test_times_are_per_call_and_their_spread_is_ordered():
    calls = [lambda: time.sleep(0.002)] * 3
    found = timing.device_times(calls, CPU, 20.0)
    assert found["calls"] == 3
    assert 2 <= found["p10_ms"] <= found["median_ms"] <= found["p90_ms"]
    assert found["median_ms"] < 6


def test_copies_exceed_the_cache_and_the_cpu_needs_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50))
    assert timing.copies_for_cold_reads(60, torch.device("cuda")) == 4
    assert timing.copies_for_cold_reads(200, torch.device("cuda")) == 1
    assert timing.copies_for_cold_reads(60, CPU) == 1


@pytest.mark.parametrize(("one_ms", "copies", "in_graph"), [(0.01, 1, 20), (0.01, 3, 21), (5.0, 1, 4), (50.0, 3, 3)])
def test_a_graph_holds_whole_rounds_over_the_copies(one_ms, copies, in_graph, monkeypatch):
    captured = []

    def capture(calls, stream):
        captured.extend(calls)
        return SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr(timing, "captured", capture)
    monkeypatch.setattr(timing, "laps", lambda run, device, count: [one_ms] * count)
    calls = [object() for _ in range(copies)]
    found = timing.device_times(calls, torch.device("cuda"), 100.0)
    assert captured == calls * (in_graph // copies)
    assert found["calls"] == in_graph
    assert found["median_ms"] == pytest.approx(one_ms / in_graph)


@pytest.mark.gpu
def test_the_launch_of_a_graph_is_no_part_of_a_device_time():
    x = torch.zeros(1, device="cuda")
    found = timing.device_times([lambda: x.add_(1)], torch.device("cuda"), 20.0)
    assert found["calls"] == 20
    assert found["median_ms"] < 0.004  # a launch alone takes longer


# baselines


def test_flex_is_compiled_anew_for_each_shape_and_no_other_time(monkeypatch):
    """A ninth shape would find torch's limit of compilations reached."""
    resets = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda q, *_, **__: q)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(None))
    attention = baselines.flex()
    for length, expected in ((1, 1), (1, 1), (128, 2), (1, 3)):
        attention(*(torch.empty(1, length, 1, 16) for _ in "qkv"))
        assert len(resets) == expected


@pytest.mark.parametrize("seqlen", [1, 127, 128, 129, 500])
def test_the_causal_blocks_of_flex_are_those_that_torch_makes(seqlen):
    expected = create_block_mask(baselines._causal, None, None, seqlen, seqlen, device="cpu")
    found = causal_blocks(seqlen, CPU)
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert torch.equal(found.kv_num_blocks, expected.kv_num_blocks)
    assert torch.equal(found.full_kv_num_blocks, expected.full_kv_num_blocks)


def test_torch_attention_is_ours_at_tau_0_for_one_query_and_for_all():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, heads, 16) for heads in (4, 2, 2))
    flash = load_baselines(["sdpa_flash"])[0]["sdpa_flash"]
    torch.testing.assert_close(flash(q, k, v), dense(q, k, v))
    torch.testing.assert_close(flash(q[:, -1:], k, v), dense(q[:, -1:], k, v))
    with pytest.raises(ValueError, match="one query or as many as keys"):
        sdpa(q[:, -3:], k, v, torch.nn.attention.SDPBackend.MATH)


def test_packages_are_called_as_they_want_it_and_may_return_more(monkeypatch):
    def attention(q, k, v, **options):
        return dense(q, k, v), options

    seen = []
    for module, name in (("flash_attn.cute", "fa4"), ("flash_sparse_attn.ops.cute.interface", "flash_sparse")):
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), SimpleNamespace(__path__=[]))
        sys.modules[module].flash_attn_func = lambda q, k, v, **options: (seen.append(options), dense(q, k, v))[::-1]
        found, missing = load_baselines([name])
        assert missing == {}
        q = torch.randn(1, 5, 2, 8)
        assert torch.equal(found[name](q, q, q), dense(q, q, q))
    assert seen == [{"causal": True}, {"is_causal": True, "softmax_threshold": 1.0}]


def test_what_does_not_import_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    found, missing = load_baselines(["sdpa_flash", "fa4"])
    assert list(found) == ["sdpa_flash"]
    assert missing["fa4"].startswith("ModuleNotFoundError: ")
    assert missing["fa4"].endswith("not installed: pip install --pre flash-attn-4")


@pytest.mark.parametrize("name", LOADERS)
def test_without_a_gpu_every_baseline_runs_or_says_that_it_needs_one(name):
    found, missing = load_baselines([name], torch.device("cpu"))
    if name in missing:
        assert missing[name] == "it needs a GPU, and this runs on cpu"
    elif name != "flex":  # which compiles
        q, k, v = (torch.randn(1, 33, heads, 16) for heads in (4, 2, 2))
        assert found[name](q, k, v).shape == q.shape
    assert (name in missing) == (name not in ("sdpa_flash", "flex"))


# rows


def test_a_row_of_the_forward_states_its_work_and_names_the_best_dense_kernel(monkeypatch):
    def slow(q, k, v):
        return dense(q, k, v)

    def times(calls, device, budget_ms):  # what a busy machine would measure says nothing
        ms = 50.0 if calls[0].func is slow else 2.0
        return {"median_ms": ms, "p10_ms": ms, "p90_ms": ms, "calls": 1}

    for name in ("device_times", "eager_times"):
        monkeypatch.setattr(forward, name, times)
    memory.store(("an earlier row",), [Choice("fused", "peaked")])
    row = measure_forward(Workload(300, 150.0, **SMALL), {"slow": slow, "flash_sparse": dense}, CPU, 1.0)
    assert memory.recall(("an earlier row",)) is None
    assert row["requested_slots"] == 150
    assert row["key_slots_per_query"] == pytest.approx(sum(row["key_slots_per_query_by_head"]) / 4)
    assert row["best_dense"] == "slow"  # flash_sparse is not dense
    assert row["mala"]["speedup_over_slow"] == row["mala"]["speedup_over_best_dense"] == 25
    assert row["mala_tau0"]["relative_error"] < 1e-4
    assert "speedup_over_slow" not in row["mala_tau0"]
    assert any(line.startswith("  slow") and "1.00x" in line for line in row_lines(row))


def test_a_row_of_the_backward_times_both_forms_and_a_wrong_baseline_has_no_time():
    row = measure_backward(
        Workload(200, 100.0, **SMALL), {"dense": dense, "wrong": lambda q, k, v: -dense(q, k, v)}, CPU, 1.0
    )
    for name in ("mala", "mala_state_only", "mala_auto", "dense"):
        assert max(row[name]["relative_errors"]) < 0.03
        assert row[name]["forward_and_backward_ms"] > 0
    assert row["mala"]["speedup_over_dense"] == row["dense"]["median_ms"] / row["mala"]["median_ms"]
    ratio = row["dense"]["forward_and_backward_ms"] / row["mala"]["forward_and_backward_ms"]
    assert row["mala"]["step_speedup_over_dense"] == ratio
    assert "step_speedup_over_dense" not in row["dense"]
    assert set(row["wrong"]) == {"failed"}


def test_mala_being_wrong_ends_the_run(monkeypatch):
    monkeypatch.setitem(forward.FORMS, "mala_tau0", lambda q, k, v: -dense(q, k, v))
    with pytest.raises(RuntimeError, match="mala_tau0 at 100 tokens is wrong"):
        measure_forward(Workload(100, None, **SMALL), {}, CPU, 1.0)


def test_rows_are_written_as_they_come_and_too_little_memory_is_named(tmp_path):
    def too_large():
        raise torch.OutOfMemoryError("of course")

    def broken():
        raise RuntimeError("stop")

    output = tmp_path / "rows.json"
    cases = [("a", lambda: {"x": 1}), ("b", too_large), ("c", lambda: {"x": 2}), ("d", broken)]
    with pytest.raises(RuntimeError, match="stop"):
        run_rows({}, cases, output=output)
    written = json.loads(output.read_text("utf-8"))
    assert written == {"rows": [{"x": 1}, {"x": 2}], "not_run": [{"case": "b", "reason": "out of memory"}]}


def test_generate_counts_tokens_after_the_prompt(tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path, positions=256)
    sdpa_row, mala_row = measure_generate(str(checkpoint), CPU, 40, new_tokens=9)
    assert [sdpa_row["attention"], mala_row["attention"]] == ["sdpa", "mala"]
    assert sdpa_row["same_tokens_as_sdpa"] == 9
    assert mala_row["prompt_tokens"] == 40
    assert mala_row["tokens_per_second"] > 0
    with pytest.raises(ValueError, match="positions"):
        measure_generate(str(checkpoint), CPU, 250, new_tokens=9)

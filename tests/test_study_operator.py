# SPDX-License-Identifier: Apache-2.0
"""The operator benchmark of the methods: a small run on the CPU, what its gate lets through, and the packaged NSA's place in it."""

import json
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from project import ROOT

sys.path.append(str(ROOT / "scripts"))

import study_operator

from mala_hf.studies import operator_methods
from mala_hf.studies.nsa import NSAShape, compressed_rows
from mala_hf.studies.operator_bench import METHODS, OperatorShape, errors_of, forward_flops, measure_decode, methods_of
from mala_hf.workloads import Inputs

OPTIONS = "--device cpu --seqlen 1024 --heads 2 1 --head-dim 16 --slots 512 --budget-ms 1 --commit abc"
SMALL = OperatorShape(1024, 2, 1, 16, 512)


def tensors(seqlen=1024, num_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, seqlen, heads, 16) for heads in (num_heads, 1, 1))
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.fixture(scope="module", name="run")
def a_small_run(tmp_path_factory):
    output = tmp_path_factory.mktemp("operator") / "operator.json"
    done = subprocess.run(
        [sys.executable, "scripts/study_operator.py", *OPTIONS.split(), "--output", output],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text("utf-8")), done.stdout


def test_every_method_is_measured_or_says_why_not(run):
    result, said = run
    assert result["commit"] == "abc"
    assert 0 < result["mala_key_slots_per_query"] < 1024
    for name in METHODS:
        found = result[name]
        if "failed" in found:
            assert name == "nsa_package"
            assert "fla" in found["failed"]
            assert found["failed"] in said
        else:
            assert found["relative_error"] < 0.01
            assert max(found["gradient_errors"]) < 0.01
            assert all(found[part]["median_ms"] > 0 for part in ("forward", "backward", "decode"))


def test_a_method_that_is_stored_is_not_measured_again(run, tmp_path, monkeypatch):
    result, _ = run
    monkeypatch.setattr(
        sys, "argv", ["study_operator.py", *OPTIONS.split(), "--output", str(tmp_path / "operator.json")]
    )
    measured = []

    def measure(self, name):
        measured.append(name)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return {"failed": "no memory"} if name == "mala" else result[name]

    monkeypatch.setattr(study_operator.OperatorBench, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        study_operator.main()
    stopped = json.loads((tmp_path / "operator.json").read_text("utf-8"))
    assert stopped["full"] == result["full"]
    assert stopped["not_run"] == list(METHODS[2:])
    study_operator.main()
    assert measured[3:] == list(METHODS[1:])  # what failed is tried again
    whole = json.loads((tmp_path / "operator.json").read_text("utf-8"))
    assert whole["not_run"] == []
    assert [name for name in METHODS if name in whole] == list(METHODS)
    assert [one.name for one in tmp_path.iterdir()] == ["operator.json"]


def test_methods_with_a_budget_have_the_slots_and_nsas_compressed_keys_on_top():
    made = {name: make() for name, make in methods_of(SMALL, tensors()[0]) if name != "nsa_package"}
    assert made["moba"].block * made["moba"].topk == made["dsa"].topk == 512
    assert made["nsa"].shape.count * made["nsa"].shape.selected + made["nsa"].shape.window == 512
    assert made["full"].slots(1024) == 512.5
    assert made["mala"].slots(1024) is None


def test_the_flops_of_a_forward_are_scores_values_and_what_choosing_takes():
    pairs = 1024 * 1025 / 2
    assert forward_flops("full", SMALL, 512.5) == pytest.approx(2 * 2 * pairs * (16 + 16))
    assert forward_flops("mala", SMALL, 100.0) == pytest.approx(2 * 2 * 16 * (pairs + 1024 * 100))
    attended = 2 * 2 * 1024 * 100 * (16 + 16)
    assert forward_flops("nsa", SMALL, 100.0) == pytest.approx(attended)
    assert forward_flops("moba", SMALL, 100.0) == pytest.approx(attended + 2 * 2 * 16 * pairs / 128)
    assert forward_flops("dsa", SMALL, 100.0) == pytest.approx(attended + 2 * 8 * 64 * pairs)


@pytest.mark.parametrize("name", ["moba", "nsa", "dsa"])
def test_the_gate_stops_an_attention_that_is_not_its_definition(name, monkeypatch):
    inputs = tensors()
    method = dict(methods_of(SMALL, inputs[0]))[name]()
    do = torch.randn(1, 128, 2, 16)
    assert errors_of(method, tuple(inputs), do)["relative_error"] < 1e-5
    right = method.attention
    monkeypatch.setattr(method, "attention", lambda q, k, v: right(q, k, v.roll(1, 1)))
    with pytest.raises(RuntimeError, match="the output is wrong"):
        errors_of(method, tuple(inputs), do)


def test_the_packages_kernels_are_called_with_our_shape_and_checked_like_the_others(monkeypatch):
    shape = NSAShape(selected=64, count=4, window=256)

    def topk(*, q, k, TK, lse, block_counts, block_size, scale):
        assert (TK, lse, block_counts, block_size, scale) == (1024, None, 4, 64, 0.25)
        blocks = torch.arange(1024).view(1, -1, 1, 1) // 64 - torch.arange(4)
        return blocks.where(blocks >= 0, -1).int()

    def attention(q, k, v, *, g_cmp, g_slc, block_counts, block_size):
        means = NSAShape(compressed=64, stride=64, selected=64, count=4, window=256)
        small_k, small_v = (x.unflatten(1, (-1, 64)).mean(2) for x in (k, v))
        compressed, _ = compressed_rows(q, small_k, small_v, 0, means)
        rows = torch.arange(1024)
        allowed = (rows[:, None] >= rows) & (rows[:, None] // 64 - rows // 64 < 4)
        return g_cmp[..., None] * compressed + g_slc[..., None] * operator_methods.masked_rows(
            q, k, v, allowed[None, None]
        )

    package = ModuleType("fla.ops.nsa.parallel")
    package.parallel_nsa, package.parallel_nsa_topk = attention, topk
    for name in ("fla", "fla.ops", "fla.ops.nsa"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    inputs = tensors()
    method = operator_methods.PackagedNSA(shape, inputs[0])
    errors = errors_of(method, tuple(inputs), torch.randn(1, 128, 2, 16))
    assert errors["relative_error"] < 1e-5
    assert max(errors["gradient_errors"]) < 1e-4


@pytest.mark.parametrize("name", ["full", "mala", "moba", "nsa", "dsa"])
def test_a_new_token_is_checked_against_the_definition(name, monkeypatch):
    q, k, v = (x.detach() for x in tensors())
    method = dict(methods_of(SMALL, q))[name]()
    inputs = Inputs(q[:, -1:], k, v)
    assert measure_decode(method, inputs, torch.device("cpu"), 1.0)["relative_error"] < 0.02
    monkeypatch.setattr(method, "decode", lambda k, v: lambda q, k, v: torch.zeros_like(q))
    with pytest.raises(RuntimeError, match="the new token is wrong"):
        measure_decode(method, inputs, torch.device("cpu"), 1.0)


@pytest.mark.parametrize("sizes", [{"seqlen": 1000}, {"slots": 300}, {"seqlen": 1024, "slots": 1024}])
def test_sizes_that_are_no_whole_blocks_are_refused(sizes):
    with pytest.raises(ValueError, match="must be whole blocks"):
        OperatorShape(**sizes)

# SPDX-License-Identifier: Apache-2.0
"""``mala-hf bench`` on whole sequences, its scripts and its errors, without a GPU."""

import json
import runpy
import sys

import pytest
import torch
from inputs import CAPTURED
from project import ROOT
from safetensors.torch import save_file

from mala_hf.bench.workload import workload_of
from mala_hf.cli import main


def run(arguments, capsys):
    code = main(["bench", "--device", "cpu", "--budget-ms", "1", "--baselines", "sdpa_flash", *arguments])
    return code, capsys.readouterr()


SIZES = ["--heads", "4", "2", "--head-dim", "32", "--slots", "100"]


@pytest.mark.parametrize("mode", [[], ["--backward"]], ids=["forward", "backward"])
def test_the_command_prints_a_table_for_each_length_and_writes_json(mode, capsys, tmp_path):
    output = tmp_path / "x.json"
    code, printed = run([*mode, "--lengths", "100", "200", *SIZES, "--output", str(output)], capsys)
    assert code == 0
    assert [row["seqlen"] for row in json.loads(output.read_text("utf-8"))["rows"]] == [100, 200]
    assert "200 tokens, 4/2 heads of 32; retained slots per query:" in printed.out
    assert "sdpa_flash" in printed.out


def test_shapes_are_rows_beside_a_capture(capsys, tmp_path):
    heads = {"q": 3, "k": 1, "v": 1}
    save_file({name: torch.randn(count, 60, 16) for name, count in heads.items()}, tmp_path / "x.safetensors")
    shapes = ["4,2,32,200,100", "6,2,16,150,flat", "4,2,32,256,100:0.5"]
    code, printed = run(["--shapes", *shapes, "--captured", str(tmp_path / "x.safetensors"), "--json"], capsys)
    assert code == 0
    rows = json.loads(printed.out)["rows"]
    assert [(row["seqlen"], row["num_heads"], row["head_dim"], row["flat_heads"]) for row in rows] == [
        (200, 4, 32, 0), (150, 6, 16, 6), (256, 4, 32, 2), (60, 3, 16, 0)
    ]  # fmt: skip
    for row in rows:
        assert row["mala_auto"]["choices"] == ["fused: nothing else covers the call"]
        assert row["mala_auto"]["eager_speedup_over_best_dense"] > 0


def test_json_is_one_object_on_stdout(capsys):
    code, printed = run(["--captured", str(CAPTURED), "--lengths", "256", "--json"], capsys)
    assert code == 0
    result = json.loads(printed.out)
    assert result["rows"][0]["captured"] == CAPTURED.name
    assert result["rows"][0]["requested_slots"] is None
    assert result["unavailable"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--generate", "model"], "belongs to --decode"),
        (["--shapes", "1,2,1,64"], "a shape is Q,KV,D,LENGTH,SLOTS"),
        (["--shapes", "4,2,32,100,0"], "slots must be above 0"),
        (["--shapes", "4,2,32,100,50", "--slots", "100"], "leave out --head-dim, --slots"),
        (["--shapes", "4,2,32,100,50", "--lengths", "100"], "leave out --heads and --lengths"),
        (["--lengths", "64", "--heads", "3", "2"], "2 KV heads do not divide 3 query heads"),
        (["--lengths", "0"], "at least 1"),
        (["--flat-share", "2"], "must be from 0 to 1"),
        (["--captured", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--captured", str(ROOT / "README.md")], "no safetensors file"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    code, printed = run(arguments, capsys)
    assert code == 1
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_cpu_must_be_asked_for(capsys):
    assert main(["bench"]) == 1
    assert "torch sees no GPU: --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["operator", "backward", "decode"])
def test_the_scripts_are_the_command(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts" / f"bench_{name}.py"), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: mala-hf bench ")


def test_the_operators_script_asks_for_every_row_of_the_page_unless_rows_are_named():
    script = runpy.run_path(str(ROOT / "scripts" / "bench_operator.py"))
    for given in ([], ["--backward"]):
        command = script["arguments"]([*given, "--output", "x.json"])
        end = command.index("--captured")
        rows = [workload_of(shape) for shape in command[command.index("--shapes") + 1 : end]]
        assert {(row.num_heads, row.head_dim) for row in rows} >= {(16, 128), (16, 64), (32, 128)}
        assert any(row.slots is None for row in rows)
        assert min(row.seqlen for row in rows) < 2048 < max(row.seqlen for row in rows)
        assert command[-2:] == ["--output", "x.json"]
    assert script["arguments"](["--lengths", "8192"]) == ["bench", "--lengths", "8192"]

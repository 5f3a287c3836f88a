# SPDX-License-Identifier: Apache-2.0
"""The command does what its help says on a tiny checkpoint, prints JSON on request, and fails in one line."""

import json
import runpy
import subprocess
import sys

import pytest
from project import ROOT
from tiny_model import save_tiny_checkpoint

from mala_hf.cli import build_parser, main
from mala_hf.info import info

COMMANDS = ("demo", "work", "ppl", "ruler", "generate", "convert", "bench", "info")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    # runs of a letter make the tiny model's attention sparse
    path.write_text("".join(letter * 64 for letter in "persuasion"), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)], ids=["top", *COMMANDS])
def test_help_fits_on_one_screen(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--help"])
    assert end.value.code == 0
    assert 5 < len(capsys.readouterr().out.splitlines()) <= 25


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_option_and_what_it_means(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    listed = capsys.readouterr().out.split("\n\n", 2)[2]
    (commands,) = build_parser()._subparsers._group_actions
    options = [action for action in commands.choices[command]._actions if action.option_strings]
    assert len(options) > 3
    for option in options:
        assert f" {option.option_strings[-1]} " in listed
        assert option.help in " ".join(listed.split())


def test_only_commands_that_exist_are_listed():
    listed = build_parser().format_help().split("COMMAND\n")[1]
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    names.remove("lm-eval")  # its help is lm_eval's
    assert names == list(COMMANDS)


def test_no_command_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    assert "required: COMMAND" in capsys.readouterr().err


def test_the_module_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "mala_hf", "info", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["registered"] == ["mala", "mala_reference"]


@pytest.mark.parametrize(("script", "command"), [("evaluate_ruler", "ruler"), ("evaluate_perplexity", "ppl")])
def test_the_scripts_are_the_commands(script, command, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: mala-hf {command} ")


def test_info_prints_what_the_library_function_returns(capsys):
    assert main(["info", "--json", "--head-dim", "64"]) == 0
    assert json.loads(capsys.readouterr().out) == info(64)
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "not installed" in printed or "transformers" in printed
    assert "mala, mala_reference" in printed


def test_demo_writes_its_files_and_prints_both_implementations(checkpoint, text_file, tmp_path, capsys):
    output = tmp_path / "results"
    arguments = ["demo", "--model", checkpoint, "--text", text_file, "--length", "256", "--new-tokens", "4"]
    assert main([*arguments, "--device", "cpu", "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert "sdpa" in printed.out
    assert "mala, tau 1" in printed.out
    assert "256 tokens of text" in printed.err
    assert (output / "work_per_head.png").read_bytes().startswith(b"\x89PNG")

    result = json.loads((output / "demo.json").read_text("utf-8"))
    full, mala, control = result["runs"]
    assert (full["implementation"], mala["tau"], control["tau"]) == ("sdpa", 1.0, 10.0)
    assert full["ppl"] == pytest.approx(mala["ppl"], rel=0.01)
    assert len(mala["continuation_tokens"]) == 4
    for run in (mala, control):
        assert [len(layer["work_fraction"]) for layer in run["layers"]] == [4, 4]
        assert run["summary"]["bound_violation"] < 1e-5
    assert control["summary"]["work_fraction"] <= mala["summary"]["work_fraction"] < 1


def test_demo_json_is_one_object_on_stdout(checkpoint, text_file, tmp_path, capsys):
    arguments = [
        "demo",
        "--model",
        checkpoint,
        "--text",
        text_file,
        "--length",
        "64",
        "--new-tokens",
        "2",
        "--taus",
        "1",
    ]
    assert main([*arguments, "--device", "cpu", "--output", str(tmp_path), "--json", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads((tmp_path / "demo.json").read_text("utf-8"))
    assert "tokens of text" not in printed.err


def test_ppl_prints_a_row_per_length_and_implementation(checkpoint, text_file, capsys):
    arguments = [
        "ppl",
        "--model",
        checkpoint,
        "--text",
        text_file,
        "--lengths",
        "64",
        "128",
        "--taus",
        "0",
        "1",
        "--device",
        "cpu",
    ]
    assert main([*arguments, "--quiet"]) == 0
    table, buckets = capsys.readouterr().out.split("\n\n")
    assert [line.split()[:2] for line in table.splitlines()[2:]] == [
        [length, name] for length in ("64", "128") for name in ("sdpa", "mala,", "mala,")
    ]
    assert buckets.splitlines()[0].split()[:3] == ["context", "at", "128"]
    assert buckets.splitlines()[-1].split()[:4] == ["64", "to", "127", "256"]
    assert main([*arguments, "--quiet", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["tau"] for row in rows] == [None, 0.0, 1.0] * 2
    assert rows[0]["nll"] == pytest.approx(rows[1]["nll"], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--length", "8"], "length must be at least 32"),
        (["demo", "--new-tokens", "0"], "new_tokens must be at least 1"),
        (["demo", "--taus", "-1"], "finite numbers >= 0"),
        (["demo", "--taus", "nan"], "finite numbers >= 0"),
        (["demo", "--text", "absent.txt"], "absent.txt"),
        (["demo", "--model", "CHECKPOINT", "--length", "600"], "664 is more than the model's 512 positions"),
        (["demo", "--model", "CHECKPOINT", "--text", "TEXT", "--length", "448"], "fewer than the length 448"),
        (["ppl", "--model", "CHECKPOINT", "--lengths", "1"], "must be at least 2, got 1"),
        (["ppl", "--model", "CHECKPOINT", "--lengths", "64", "--attn", "dense"], "dense"),
        (["ppl", "--model", "CHECKPOINT", "--attn"] + ["sdpa"] * 2, "each implementation once, got sdpa, sdpa"),
        (["ppl", "--model", "./absent-folder"], "absent-folder"),
        (["ppl", "--text", "EMPTY"], "empty.txt holds no text"),
        (["ppl", "--text", "FOLDER"], "holds no text: no file ends in .md"),
        (["ppl", "--documents", "0"], "--documents must be at least 1, got 0"),
        (["ppl", "--dtype", "int8"], "dtype must be float32"),
        (["ppl", "--windows", "0"], "--windows must be at least 1, got 0"),
        (
            ["ppl", "--model", "CHECKPOINT", "--lengths", "512", "--stride", "600"],
            "stride must be from 1 to the 512 tokens",
        ),
        (["ppl", "--model", "CHECKPOINT", "--lengths", "1024"], "1024 is more than the model's 512 positions"),
        (["ppl", "--model", "CHECKPOINT", "--text", "TEXT"], "512 is more than the 9 tokens of the longest text"),
        (["ppl", "--rope-scaling", "yarn"], "rope scaling is not JSON"),
        (["ppl", "--rope-scaling", '{"rope_type": "tarn"}'], "rope_type of default, dynamic"),
        (["ppl", "--rope-scaling", '{"rope_type": "yarn", "factor": 0.5}'], "must be a number >= 1, got 0.5"),
        (["info", "--head-dim", "512"], "512"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_failures_are_one_line_and_not_a_zero_exit(arguments, message, checkpoint, tmp_path, capsys):
    text = tmp_path / "short.txt"
    text.write_text("too short", encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    stand_ins = {"CHECKPOINT": checkpoint, "TEXT": str(text)}
    stand_ins |= {"EMPTY": str(tmp_path / "empty.txt"), "FOLDER": str(tmp_path / "folder")}
    assert main([stand_ins.get(argument, argument) for argument in arguments]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mala-hf: error:")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in lines[0]


def test_traceback_shows_where_it_failed():
    with pytest.raises(ValueError, match="length must be at least 32"):
        main(["demo", "--length", "8", "--traceback"])

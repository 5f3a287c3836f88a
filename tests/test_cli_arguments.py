# SPDX-License-Identifier: Apache-2.0
"""A wrong argument of a command is found before a model is looked for: none is there, and the argument's error is what is said."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys

import pytest
from project import PROJECT, ROOT

from mala_hf.cli import main
from mala_hf.extras import how_to_install

pytestmark = pytest.mark.transformers

NAME = "no-such-organisation/no-such-model"
WRONG = {
    "demo": [
        (["--device", "tpu9"], "a device is cpu, cuda or cuda:0, ..., got 'tpu9'"),
        (["--device", "meta"], "nothing can be computed on the device meta"),
        (["--device", "cuda:99"], "device cuda:99 was asked for, but torch sees"),
        (["--length", "-1"], "length must be at least 32 tokens, got -1"),
        (["--new-tokens", "0"], "new_tokens must be at least 1, got 0"),
        (["--taus", "inf"], "taus must be finite numbers >= 0"),
        (["--text", "absent.txt"], "absent.txt"),
        (["--output", "FILE"], "cannot be a folder"),
        (["--output", "FILE/results"], "cannot be a folder"),
    ],
    "work": [
        (["--device", "tpu9"], "got 'tpu9'"),
        (["--dtype", "int8"], "dtype must be float32"),
        (["--dtype", "float8_e4m3fn"], "dtype must be float32"),
        (["--length", "1"], "--length must be at least 2, got 1"),
        (["--layer", "-1"], "--layer must be at least 0, got -1"),
        (["--layer", "0", "--head", "-1"], "--head must be at least 0, got -1"),
        (["--head", "0"], "head 0 of which layer?"),
        (["--taus", "-1"], "taus must be finite numbers >= 0"),
        (["--output", "FILE"], "cannot be a folder"),
    ],
    "ppl": [
        (["--device", "tpu9"], "got 'tpu9'"),
        (["--lengths", "64", "1"], "--lengths must be at least 2, got 1"),
        (["--stride", "0"], "--stride must be from 1 to the 512 tokens of a window, got 0"),
        (["--lengths", "64", "32", "--stride", "33"], "--stride must be from 1 to the 32 tokens"),
        (["--windows", "0"], "--windows must be at least 1, got 0"),
        (["--dataset", "org/data", "--documents", "0"], "--documents must be at least 1, got 0"),
        (["--dataset", "org/data", "--device", "tpu9"], "got 'tpu9'"),
        (["--attn", "sdpa", "dense"], "attention implementations are eager, "),
        (["--taus", "nan"], "tau must be a finite number >= 0, got nan"),
        (["--rope-scaling", "{"], "rope scaling is not JSON"),
    ],
    "ruler": [
        (["--device", "tpu9"], "got 'tpu9'"),
        (["--dtype", "int8"], "dtype must be float32"),
        (["--tasks", "niah"], "unknown RULER task 'niah'"),
        (["--lengths", "0"], "a length is a number of tokens, got 0"),
        (["--samples", "0"], "samples must be at least 1, got 0"),
        (["--batch-size", "-2"], "batch_size must be at least 1, got -2"),
        (["--chat-template", "maybe"], "the chat template is auto, on, off, got 'maybe'"),
        (["--corpora", "nowhere"], "corpora are auto, hub, builtin or a folder, got 'nowhere'"),
        (["--attn", "dense"], "attention implementations are eager, "),
        (["--taus", "-1"], "tau must be a finite number >= 0, got -1.0"),
        (["--output", "FILE"], "cannot be a folder"),
    ],
    "generate": [
        (["--device", "tpu9"], "got 'tpu9'"),
        (["--dtype", "int8"], "dtype must be float32"),
        (["--prompts", "0"], "--prompts must be at least 1, got 0"),
        (["--length", "1"], "--length must be at least 2, got 1"),
        (["--new-tokens", "0"], "--new-tokens must be at least 1, got 0"),
        (["--cache", "stattic"], "a cache is one of "),
        (["--taus", "-1"], "tau must be a finite number >= 0, got -1.0"),
    ],
    "convert": [
        (["OUT", "--device", "tpu9"], "got 'tpu9'"),
        (["OUT", "--tau", "-1"], "tau must be a finite number >= 0, got -1.0"),
        (["OUT", "--discovery", "quick"], "discovery must be one of auto, fused, int8, dense, got 'quick'"),
        (["OUT", "--discovery", "int8", "--device", "cpu"], "discovery='int8' is measured on a GPU, and this is cpu"),
        (["OUT", "--search-tau", "--max-omitted-mass", "2"], "max_omitted_mass must be a share from 0 to 1"),
        (["OUT", "--max-ppl-increase", "1"], "is a budget of --search-tau"),
        (["OUT", "--length", "8"], "length must be at least 32 tokens, got 8"),
        (["OUT", "--ruler", "-1"], "RULER samples must be 0 or more, got -1"),
        (["OUT", "--text", "absent.txt"], "absent.txt"),
        (["FILE"], "exists already"),
        (["FILE/new"], "no such folder to put new into"),
    ],
    "bench": [
        (["--device", "tpu9"], "got 'tpu9'"),
        (["--lengths", "0"], "--lengths must be at least 1, got 0"),
        (["--lengths", "64", "--heads", "0", "1"], "--heads must be at least 1, got 0"),
        (["--head-dim", "0"], "--head-dim must be at least 1, got 0"),
        (["--head-dim", "4096"], "--head-dim must be at most 256, got 4096"),
        (["--flat-share", "2"], "--flat-share must be from 0 to 1, got 2.0"),
        (["--slots", "0"], "--slots must be above 0"),
        (["--heads", "5", "3"], "give --lengths with --heads"),
        (["--heads", "5", "3", "--lengths", "64"], "3 KV heads do not divide 5 query heads"),
        (["--baselines", "fast"], "baselines are "),
        (["--captured", "absent.safetensors"], "absent.safetensors: no such file"),
        (["--output", "FILE/results.json"], "cannot be a folder"),
        (["--output", "."], "a folder, or a file that may not be written"),
    ],
    "lm-eval": [
        (["run", "--tasks", "x", "--model_args", f"pretrained={NAME},attn_implementation=dense"], "got 'dense'"),
        (["--model_args", f"pretrained={NAME}", "attn_implementation=dense"], "got 'dense'"),
    ],
}  # fmt: skip
# what comes before the arguments, with a model that is not there
BEFORE = {
    **{command: [command, "--model", NAME] for command in ("demo", "work", "ppl", "ruler", "generate")},
    "convert": ["convert", NAME],
    "bench": ["bench", "--decode", "--device", "cpu", "--generate", NAME],
    "lm-eval": ["lm-eval"],
}


class Reached(BaseException):
    """Somebody asked the network: no command may catch this."""


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*arguments, **options):
        raise Reached(arguments)

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("mala_hf.checkpoint.download_wheel", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the suite runs with it


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [(command, *case) for command, cases in WRONG.items() for case in cases],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value if value in WRONG else "",
)
def test_a_wrong_argument_comes_before_the_model(command, arguments, message, here, capsys):
    if command == "lm-eval":
        pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    before = sorted(here.iterdir())
    assert main([*BEFORE[command], *arguments]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mala-hf: error: ")]
    assert message in line
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [(command, *case) for command, cases in WRONG.items() if command != "lm-eval" for case in cases[:4]]
    + [
        (command, ["--model", "./nope"], "./nope: no such folder")
        for command in ("demo", "work", "ppl", "ruler", "generate")
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value if value in WRONG else "",
)
def test_a_wrong_argument_comes_before_a_missing_package(command, arguments, message, here, capsys, monkeypatch):
    monkeypatch.setattr("mala_hf.extras.find_spec", lambda name: None)
    assert main([*BEFORE[command], *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_conversion_says_that_a_path_is_none_and_else_how_to_do_without_ruler(here, capsys, monkeypatch):
    monkeypatch.setattr("mala_hf.extras.find_spec", lambda name: None)
    (here / "empty").mkdir()
    missing = f"numpy, wonderwords not installed: {how_to_install('eval')}; or leave RULER out (--ruler 0, "
    for checkpoint, message in (
        ("./nope", "./nope: no such folder"),
        ("nope.gguf", "nope.gguf: no such file"),
        ("FILE", "FILE is a file: give the folder"),
        ("empty", "no config.json in empty"),
        (NAME, missing),
    ):
        assert main(["convert", checkpoint, "out"]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(Reached):
        main(["convert", NAME, "out", "--ruler", "0"])


@pytest.mark.parametrize("command", BEFORE)
def test_help_needs_no_extra(command, capsys, monkeypatch):
    for package in ("accelerate", "datasets", "deepspeed", "gguf", "kernels", "lm_eval", "matplotlib", "nltk", "rich"):
        monkeypatch.setitem(sys.modules, package, None)
    with contextlib.suppress(SystemExit):
        assert main([command, "--help"]) == 0
    assert f"usage: mala-hf {command} " in capsys.readouterr().out


def test_hints_and_pages_install_an_extra_alike():
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    found = re.findall(r"(pip install '[^'\[]*\[(\w+)\]')", pages)
    assert {"demo", "eval", "ulysses"} <= {extra for _, extra in found} <= {*PROJECT["optional-dependencies"]}
    for command, extra in found:
        assert how_to_install(extra).startswith(f"{command} in a checkout")


def test_no_file_writes_a_hint_of_its_own():
    own = [path.name for path in (ROOT / "mala_hf").rglob("*.py") if "pip install 'mala-hf[" in path.read_text("utf-8")]
    assert own == ["extras.py"]


@pytest.mark.parametrize("command", [command for command in BEFORE if command != "lm-eval"])
def test_with_right_arguments_the_model_is_looked_for(command, here):
    arguments = ["OUT"] if command == "convert" else []
    with pytest.raises(Reached):
        main([*BEFORE[command], *arguments])


@pytest.mark.parametrize("command", ["demo", "work", "ruler", "bench", "convert"])
def test_a_folder_that_may_not_be_written_is_found_first(command, here, capsys, monkeypatch):
    (here / "shut").mkdir()
    may = os.access  # for root every folder is open
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("shut") and may(path, mode))
    output = ["shut/new"] if command == "convert" else ["--output", "shut/new"]
    assert main([*BEFORE[command], *output]) == 1
    assert "no permission to " in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""``mala-hf convert``: what it prints, and its failures in one line."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
from convert_runs import LENGTH

from mala_hf.cli import main


@pytest.fixture
def command(place, tmp_path, capsys):
    """Runs the command on the tiny checkpoint; returns its exit code and what it printed."""

    def run_command(*arguments, checkpoint=str(place / "tiny")):
        fixed = (
            "--device",
            "cpu",
            "--quiet",
            "--text",
            str(place / "text.txt"),
            "--length",
            str(LENGTH),
            "--ruler",
            "0",
        )
        code = main(["convert", checkpoint, str(tmp_path / "out"), *fixed, *arguments])
        return code, capsys.readouterr()

    return run_command


def test_the_command_prints_before_and_after(command, tmp_path):
    code, printed = command("--search-tau", "--max-omitted-mass", "0.01")
    assert code == 0
    assert "full attention  MALA" in printed.out
    assert "at most 0.01 omitted mass in any layer" in printed.out
    assert printed.out.endswith(f"Written: {tmp_path / 'out'}\n")
    code, printed = command()
    assert code == 1
    assert "exists already" in printed.err


def test_the_command_prints_json_and_plans(command, tmp_path):
    code, printed = command("--dry-run", "--tau", "3")
    assert code == 0
    assert 'settings  {"tau": 3.0}' in printed.out
    assert printed.out.endswith("Nothing was written.\n")
    code, printed = command("--tau", "3", "--json")
    assert json.loads(printed.out) == json.loads((tmp_path / "out" / "mala" / "report.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-ppl-increase", "0.1"], "--max-ppl-increase is a budget of --search-tau"),
        (["--search-tau", "--tau", "1"], "leave out --tau"),
        (["--search-tau", "--max-omitted-mass", "2"], "max_omitted_mass must be a share"),
        (["--tau", "-1"], "tau must be a finite number"),
        (["--length", "8"], "length must be at least 32"),
        (["--ruler", "-1"], "RULER samples must be 0 or more"),
        (["--text", "absent.txt"], "absent.txt"),
    ],
    ids=" ".join,
)
def test_failures_of_the_command_are_one_line(command, tmp_path, arguments, message):
    code, printed = command(*arguments)
    lines = [line for line in printed.err.splitlines() if line.startswith("mala-hf: error:")]
    assert code == 1
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_name_without_a_network_is_one_line(command, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, printed = command("--ruler", "0", checkpoint="org/gated-model")
    (line,) = printed.err.strip().splitlines()
    assert code == 1
    assert line.startswith("mala-hf: error: cannot get org/gated-model: it is no folder here, not in the cache")
    assert list(tmp_path.iterdir()) == []

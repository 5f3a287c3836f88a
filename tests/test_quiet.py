# SPDX-License-Identifier: Apache-2.0
"""``--quiet`` leaves nothing on the standard error but what the command itself says, and everything is as it was afterwards."""

from __future__ import annotations

import logging as python_logging
from types import SimpleNamespace

import pytest
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from huggingface_hub.utils import logging as hub_logging
from tiny_model import save_tiny_checkpoint
from transformers.utils import logging

from mala_hf.cli import main
from mala_hf.convert_bench import Evidence
from mala_hf.convert_checkpoint import convert
from mala_hf.demo import DemoSettings, run_demo
from mala_hf.quiet import is_quiet, quiet_data, quietly

pytestmark = pytest.mark.transformers

TEXT = "".join(chr(97 + 7 * n % 26) * 24 for n in range(60))
COMMANDS = {
    "demo": ["demo", "--model", "tiny", "--text", "text.txt", "--length", "64", "--new-tokens", "2", "--taus", "1"],
    "work": ["work", "--model", "tiny", "--text", "text.txt", "--length", "64"],
    "ppl": ["ppl", "--model", "tiny", "--text", "text.txt", "--lengths", "64", "--windows", "1"],
    "generate": ["generate", "--model", "tiny", "--text", "text.txt", "--length", "64", "--prompts", "1", "--new-tokens", "2"],
    "convert": ["convert", "tiny", "OUT", "--text", "text.txt", "--length", "64", "--ruler", "0"],
}  # fmt: skip


def state():
    return is_quiet(), are_progress_bars_disabled(), logging.get_verbosity(), hub_logging.get_verbosity()


@pytest.fixture
def here(tmp_path, monkeypatch):
    save_tiny_checkpoint(tmp_path / "tiny", positions=512)
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_quiet_command_shows_no_bar_of_anybody(command, here, capfd):
    before = state()
    arguments = [*COMMANDS[command], "--device", "cpu"]
    assert main(arguments) == 0
    assert "Loading weights" in capfd.readouterr().err
    if command == "convert":
        (here / "OUT").rename(here / "first")
    assert main([*arguments, "--quiet"]) == 0
    assert [line for line in capfd.readouterr().err.splitlines() if not line.startswith("mala-hf: ")] == []
    assert state() == before


def test_library_functions_that_can_be_quiet_are(here, capfd):
    convert("tiny", "OUT", evidence=Evidence(text="text.txt", length=64, ruler_samples=0), device="cpu", quiet=True)
    run_demo(DemoSettings("tiny", "text.txt", 64, 2, (1.0,), "cpu"), quiet=True)
    assert [line for line in capfd.readouterr().err.splitlines() if not line.startswith("mala-hf: ")] == []


def fail_quietly():
    with quietly():
        assert state() == (True, True, python_logging.ERROR, python_logging.ERROR)
        raise KeyError


@pytest.mark.parametrize("hub_is_quiet", [False, True])
def test_what_was_set_before_is_set_again_even_after_an_error(hub_is_quiet):
    (disable_progress_bars if hub_is_quiet else enable_progress_bars)()
    logging.set_verbosity_info()
    hub_logging.set_verbosity_info()
    before = state()
    try:
        with pytest.raises(KeyError):
            fail_quietly()
        assert state() == before
        with quietly(False):
            assert state() == before
    finally:
        enable_progress_bars()
        logging.set_verbosity_warning()
        hub_logging.set_verbosity_warning()


def test_data_sets_are_as_quiet_as_models():
    switched = []
    datasets = SimpleNamespace(
        are_progress_bars_disabled=lambda: False,
        disable_progress_bars=lambda: switched.append("off"),
        enable_progress_bars=lambda: switched.append("on"),
    )
    with quiet_data(datasets):
        assert switched == []
    with quietly(), quiet_data(datasets):
        assert switched == ["off"]
    assert switched == ["off", "on"]

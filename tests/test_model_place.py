# SPDX-License-Identifier: Apache-2.0
"""What is no model is refused in one whole line with the way out, in every command that takes one; the hub is asked once."""

from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub import errors
from tiny_model import save_tiny_checkpoint

from mala_hf.checkpoint import load_model, load_tokenizer
from mala_hf.cli import main
from mala_hf.model_place import check_hub, check_model

pytestmark = pytest.mark.transformers

NAME = "organisation/model"
COMMANDS = {
    "demo": ["demo", "--model"],
    "work": ["work", "--model"],
    "ppl": ["ppl", "--dataset", "org/data", "--model"],  # which is not asked for before the model
    "ruler": ["ruler", "--prepare", "--model"],
    "generate": ["generate", "--model"],
    "convert": ["convert"],
    "bench": ["bench", "--decode", "--device", "cpu", "--generate"],
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with places that hold no model."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "notes", "adapter", "packed", "no-weights"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes" / "notes.txt").touch()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    (tmp_path / "packed" / "small.gguf").touch()
    (tmp_path / "file.txt").touch()
    save_tiny_checkpoint(tmp_path / "no-weights")
    (tmp_path / "no-weights" / "model.safetensors").unlink()
    return tmp_path


def error_of(arguments, capsys) -> str:
    assert main(arguments) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    return line.removeprefix("mala-hf: error: ")


PLACES = [
    ("empty", "no config.json in empty, the folder is empty: give the folder that a model was saved to, or its name on the hub"),
    ("notes", "no config.json in notes, it holds notes.txt: give the folder that a model was saved to"),
    ("adapter", "no config.json in adapter: an adapter; merge it into its model first"),
    ("packed", "no config.json in packed: unpack its GGUF file first, mala-hf convert packed/small.gguf OUT"),
    ("file.txt", "file.txt is a file: give the folder of the "),
    ("./absent", "./absent: no such folder"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_a_place_without_a_model_lacks(command, here, capsys):
    ruler_reads_the_tokenizer = {"notes", "adapter", "packed", "empty"} if command == "ruler" else set()
    for place, message in PLACES:
        arguments = [*COMMANDS[command], place, *(["OUT"] if command == "convert" else [])]
        line = error_of(arguments, capsys)
        if place in ruler_reads_the_tokenizer:
            assert line.startswith(("cannot load the tokenizer of ", "the folder empty is empty"))
            assert place in line
        else:
            assert line.startswith(message)


def test_weights_that_are_not_there_are_missed_before_a_tokenizer_is_read(here):
    with pytest.raises(ValueError, match=r"^no weights in .*no-weights, only config\.json, "):
        load_model(str(here / "no-weights"), device="cpu")
    assert load_tokenizer(str(here / "no-weights")).vocab_size > 0


def test_what_transformers_says_of_a_folder_is_one_line_that_names_it(here):
    (here / "no-weights" / "model.safetensors").write_bytes(b"")
    (here / "no-weights" / "config.json").write_text("{")
    with pytest.raises(OSError, match=r"^cannot load the ") as error:
        load_model(str(here / "no-weights"), device="cpu")
    assert "no-weights" in str(error.value)
    assert "\n" not in str(error.value)


def raised(kind):
    error = kind.__new__(kind)
    Exception.__init__(error, "a long story\nof many lines")
    return error


class ConnectError(Exception):
    """What network libraries raise, which shares no class with anything."""


@pytest.fixture
def answers(monkeypatch):
    """The hub answers with an error; the errors that are to come, and what was asked."""
    coming, asked = [], []

    def metadata(url, **options):
        asked.append(url)
        raise raised(coming[0])

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    return coming, asked


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.RepositoryNotFoundError, f"the hub has no model {NAME}, or it is private: check the name"),
        (errors.GatedRepoError, f"{NAME} is gated: accept its terms"),
        (errors.OfflineModeIsEnabled, f"cannot get {NAME}: it is no folder here, not in the cache"),
        (ConnectError, f"cannot get {NAME}: it is no folder here, not in the cache"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_the_model_that_the_hub_does_not_give(command, kind, message, answers, here, capsys):
    coming, asked = answers
    coming.append(kind)
    arguments = [*COMMANDS[command], NAME, *(["OUT"] if command == "convert" else [])]
    line = error_of(arguments, capsys)
    assert line.startswith(message)
    assert "give a folder" in line or "log in" in line
    assert len(asked) == 1  # no retries, of which each would print two lines


@pytest.mark.parametrize("kind", [errors.RemoteEntryNotFoundError, errors.HfHubHTTPError])
def test_a_file_that_the_hub_lacks_and_a_hub_that_is_busy_are_for_the_download_to_find(kind, answers):
    answers[0].append(kind)
    check_hub(NAME)
    assert len(answers[1]) == 1


def test_a_model_in_the_cache_is_not_asked_for(answers, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *names, **options: str(tmp_path))
    check_model(NAME)
    assert not answers[1]

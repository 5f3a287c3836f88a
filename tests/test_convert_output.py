# SPDX-License-Identifier: Apache-2.0
"""A converted checkpoint is there, whole, or it is not there; what was measured outlives a failure."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from tiny_model import save_tiny_checkpoint, tiny_llama
from transformers import AutoModelForCausalLM

from mala_hf import convert_output
from mala_hf.convert_output import bytes_to_copy, check_output, check_room, work_folder, write_checkpoint
from mala_hf.convert_source import open_source
from mala_hf.convert_store import Measurements

TEXTS = {"config.json": '{"model_type": "llama", "mala": {"tau": 1.0}}\n', "mala/report.md": "# Report\n"}


@pytest.fixture
def source(tmp_path):
    folder = save_tiny_checkpoint(tmp_path / "tiny")
    (folder / "assets").mkdir()
    (folder / "assets" / "figure.svg").write_text("<svg/>")
    return open_source(str(folder))


@pytest.fixture
def output(tmp_path):
    """Where to write, beside measurements of a run."""
    Measurements(work_folder(tmp_path / "out"), {}).get("nll", {}, lambda: 1.5)
    return tmp_path / "out"


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_weights_are_linked_and_everything_else_is_a_copy(source, output):
    assert bytes_to_copy(source, output, link=True) == 0
    assert write_checkpoint(source, output, TEXTS) == {"linked": 1, "copied": 0}
    assert files(output) == files(source.folder) | set(TEXTS)
    assert output.joinpath("model.safetensors").samefile(source.folder / "model.safetensors")
    assert not output.joinpath("tokenizer.json").samefile(source.folder / "tokenizer.json")
    assert output.joinpath("tokenizer.json").read_bytes() == (source.folder / "tokenizer.json").read_bytes()
    assert {name: output.joinpath(name).read_text() for name in TEXTS} == TEXTS


def test_weights_are_copied_when_asked_for_and_where_links_are_not_to_be_had(source, output, tmp_path, monkeypatch):
    size = source.bytes_of(source.weights)
    assert bytes_to_copy(source, output, link=False) == size
    assert write_checkpoint(source, output, TEXTS, link=False) == {"linked": 0, "copied": 1}

    def no_links(*_):
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", no_links)
    assert write_checkpoint(source, tmp_path / "other", TEXTS) == {"linked": 0, "copied": 1}
    for folder in (output, tmp_path / "other"):
        assert not (folder / "model.safetensors").samefile(source.folder / "model.safetensors")
        assert (folder / "model.safetensors").read_bytes() == (source.folder / "model.safetensors").read_bytes()


def test_links_in_the_source_lead_to_the_files_themselves(source, output):
    weights = source.folder / "model.safetensors"
    shutil.move(weights, source.folder.parent / "blob")
    weights.symlink_to(source.folder.parent / "blob")
    write_checkpoint(source, output, TEXTS)
    assert not (output / "model.safetensors").is_symlink()
    assert (output / "model.safetensors").samefile(source.folder.parent / "blob")


def test_all_shards_are_linked(tmp_path, output):
    tiny_llama().save_pretrained(tmp_path / "sharded", max_shard_size="300KB")
    source = open_source(str(tmp_path / "sharded"))
    done = write_checkpoint(source, output, {"config.json": (source.folder / "config.json").read_text()})
    assert done["linked"] == len(source.weights) > 1
    expected = AutoModelForCausalLM.from_pretrained(source.folder).state_dict()
    found = AutoModelForCausalLM.from_pretrained(output).state_dict()
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


def test_config_json_comes_last_so_that_nothing_half_written_loads(source, output, monkeypatch):
    written, flush = [], convert_output._flush
    monkeypatch.setattr(convert_output, "_flush", lambda path: (written.append(path.name), flush(path)))
    write_checkpoint(source, output, TEXTS)
    assert written.index("config.json") == max(
        written.index(Path(name).name) for name in files(output) if name != "model.safetensors"
    )


@pytest.mark.parametrize("call", range(1, 9))
def test_a_disk_that_fills_at_any_file_leaves_nothing_behind_but_the_measurements(source, output, monkeypatch, call):
    calls, flush = [], convert_output._flush

    def full(path):
        calls.append(path)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        flush(path)

    monkeypatch.setattr(convert_output, "_flush", full)
    with pytest.raises(
        OSError, match=r"no space left for .*: nothing of it was kept, and what was measured is"
    ) as error:
        write_checkpoint(source, output, TEXTS, link=False)
    assert error.value.errno == errno.ENOSPC
    assert not output.exists()
    assert [path.suffix for path in work_folder(output).iterdir()] == [".json"]
    assert source.folder.joinpath("model.safetensors").exists()
    monkeypatch.undo()
    write_checkpoint(source, output, TEXTS)
    assert files(output) == files(source.folder) | set(TEXTS)


def test_a_disk_that_is_full_when_linking_is_not_tried_again_with_a_copy(source, output, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="no space left for"):
        write_checkpoint(source, output, TEXTS)


def test_room_is_checked_before_anything_is_loaded(output, monkeypatch):
    usage = namedtuple("usage", "total used free")(100 << 30, 90 << 30, 10 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    check_room(9 << 30, output)
    with pytest.raises(OSError, match=r"10\.80 GB are needed, 10\.74 GB are free") as error:
        check_room(10 << 30, output)
    assert error.value.errno == errno.ENOSPC


@pytest.mark.parametrize("what", ["folder", "file", "dangling link"])
def test_nothing_is_overwritten(source, output, what):
    {"folder": Path.mkdir, "file": Path.touch, "dangling link": lambda path: path.symlink_to("absent")}[what](output)
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        check_output(output)
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        write_checkpoint(source, output, TEXTS)
    assert not (work_folder(output) / "built").exists()


def test_a_place_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder to put out into"):
        check_output(tmp_path / "absent" / "out")


def test_what_an_earlier_run_built_is_built_anew(source, output):
    stale = work_folder(output) / "built"
    stale.mkdir()
    (stale / "model.safetensors").write_text("half")
    (stale / "stale.txt").touch()
    write_checkpoint(source, output, TEXTS)
    assert files(output) == files(source.folder) | set(TEXTS)


def test_a_measurement_is_made_once_for_the_same_settings_and_the_same_both_times(tmp_path):
    calls = []
    made_with = {"model": "a"}

    def measure():
        calls.append(1)
        return {"taus": (0.1, 1), "by_layer": {3: 1e-9}}

    for _ in range(2):
        found = Measurements(tmp_path, made_with).get("study", {"length": 8}, measure)
        assert found == {"taus": [0.1, 1], "by_layer": {"3": 1e-9}}
    assert len(calls) == 1
    for changed in ({"model": "b"}, {"model": "a", "dtype": "bfloat16"}):
        Measurements(tmp_path, changed).get("study", {"length": 8}, measure)
    Measurements(tmp_path, made_with).get("study", {"length": 9}, measure)
    Measurements(tmp_path, made_with).get("other", {"length": 8}, measure)
    assert len(calls) == 5
    assert all(path.suffix == ".json" for path in tmp_path.iterdir())

# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that cannot be converted is refused in a sentence that says what is wrong and what to do."""

from __future__ import annotations

import json
import os

import huggingface_hub
import pytest
from huggingface_hub import errors
from tiny_model import save_tiny_checkpoint, tiny_llama

from mala_hf.convert_source import open_source

SHARDS = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of one file."""
    return save_tiny_checkpoint(tmp_path / "tiny")


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint of several shards."""
    tiny_llama().save_pretrained(tmp_path / "sharded", max_shard_size="300KB")
    assert (tmp_path / "sharded" / SHARDS).exists()
    return tmp_path / "sharded"


def shards(folder):
    return sorted(folder.glob("model-*.safetensors"))


def test_files_are_sorted_into_weights_what_goes_along_and_other_forms(folder):
    for name in ("pytorch_model.bin", "LICENSE", "consolidated.safetensors", ".gitattributes"):
        (folder / name).write_text("x")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_text("x")
    source = open_source(str(folder))
    assert source.name == "tiny"
    assert source.weights == ("model.safetensors",)
    assert set(source.left_out) == {"pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx"}
    assert {"config.json", "generation_config.json", "tokenizer.json", "LICENSE"} <= set(source.others)
    assert ".gitattributes" not in source.others
    assert source.bytes_of(source.weights) == (folder / "model.safetensors").stat().st_size


def test_a_sharded_checkpoint_has_the_files_of_its_index(sharded):
    source = open_source(str(sharded))
    assert source.weights == tuple(path.name for path in shards(sharded))
    assert len(source.weights) > 1
    assert SHARDS in source.others


def test_a_fingerprint_tells_weights_and_configs_apart(folder):
    first = open_source(str(folder)).fingerprint()
    assert open_source(str(folder)).fingerprint() == first
    os.utime(folder / "model.safetensors", ns=(1, 1))
    second = open_source(str(folder)).fingerprint()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert len({first, second, open_source(str(folder)).fingerprint()}) == 3


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-1])


def no_header(path):
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def to_pointer(path):
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_off, "is damaged or cut off"),
        (no_header, "is damaged or cut off"),
        (to_pointer, "git lfs pull"),
        (lambda path: path.write_bytes(b""), "is damaged or cut off"),
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(shards(path.parent)[0].read_bytes()), "lacks"),
    ],
    ids=["cut off", "no header", "pointer", "empty", "missing", "another"],
)
def test_a_damaged_shard_is_named(sharded, damage, said):
    last = shards(sharded)[-1]
    damage(last)
    with pytest.raises(ValueError, match=said) as error:
        open_source(str(sharded))
    assert last.name in str(error.value)


def set_index(folder, weight_map):
    (folder / SHARDS).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / SHARDS).write_text("{"), "index.json is damaged"),
        (lambda folder: (folder / SHARDS).write_text("[]"), "index.json is damaged"),
        (lambda folder: set_index(folder, {}), "names no file"),
        (lambda folder: set_index(folder, {"x": "../other/model.safetensors"}), "no file beside it"),
        (lambda folder: (folder / SHARDS).unlink(), "only model-00001"),
    ],
    ids=["not JSON", "no index", "empty", "elsewhere", "missing"],
)
def test_a_damaged_index_is_refused(sharded, damage, said):
    damage(sharded)
    with pytest.raises(ValueError, match=said):
        open_source(str(sharded))


def test_a_checkpoint_of_other_weights_is_told_how_to_become_safetensors(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only pytorch_model\.bin: load it .* save_pretrained it to a new folder"):
        open_source(str(folder))


@pytest.mark.parametrize(
    ("config", "said"),
    [(None, "no config.json in tiny"), ("{", "config.json of tiny is damaged"), ("{}", "it has no model_type")],
    ids=["missing", "not JSON", "no model's"],
)
def test_a_folder_without_a_model_s_config_is_refused(folder, config, said):
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(ValueError, match=said):
        open_source(str(folder))


def test_an_adapter_is_named_as_one(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(ValueError, match="an adapter; merge it"):
        open_source(str(folder))


@pytest.mark.parametrize("name", ["./absent", "/absent/folder", "a/b/c", "~/model"])
def test_a_path_that_is_none_is_not_looked_for_on_the_hub(name):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        open_source(name)


def test_a_file_is_not_a_checkpoint(folder):
    with pytest.raises(ValueError, match="give the folder"):
        open_source(str(folder / "model.safetensors"))


def raised(kind, message="a long story\nof many lines"):
    if issubclass(kind, errors.HfHubHTTPError):
        error = kind.__new__(kind)
        Exception.__init__(error, message)
        return error
    return kind(message)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (errors.GatedRepoError, r"org/model is gated: accept its terms"),
        (errors.RepositoryNotFoundError, r"the hub has no model org/model, or it is private"),
        (errors.RevisionNotFoundError, r"org/model has no revision v9"),
        (errors.LocalEntryNotFoundError, r"cannot get org/model: it is no folder here, not in the cache"),
        (
            errors.OfflineModeIsEnabled,
            r"cannot get org/model: .*\(a long story of many lines\); without a network give a folder",
        ),
        (ConnectionError, r"cannot get org/model"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_name_that_the_hub_does_not_give_is_explained_in_a_line(monkeypatch, kind, said):
    def snapshot_download(name, **options):
        assert (name, options["revision"]) == ("org/model", "v9")
        raise raised(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    with pytest.raises(OSError, match=said) as error:
        open_source("org/model@v9")
    assert "\n" not in str(error.value)


def test_a_hub_name_is_read_from_the_cache_without_other_weights_and_keeps_its_name(monkeypatch, folder):
    asked = []
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.append(options) or str(folder)
    )
    assert open_source("org/model").name == "org/model"
    (folder / "model.safetensors").unlink()
    plan = open_source("org/model", download=False)
    assert plan.weights == ()
    assert "*.bin" in asked[0]["ignore_patterns"]
    assert ["*.safetensors" in one["ignore_patterns"] for one in asked] == [False, True]

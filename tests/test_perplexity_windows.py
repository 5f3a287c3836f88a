# SPDX-License-Identifier: Apache-2.0
"""Windows cover a document without scoring a token twice; documents come from where they were asked for."""

import gzip
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import byte_tokenizer

from mala_hf.documents import read_dataset, read_documents
from mala_hf.text import DEFAULT_TEXT
from mala_hf.windows import beginning_token, cut_windows, tokenize


@pytest.mark.parametrize("flat", [True, False], ids=["n", "1xn"])
def test_fixed_windows_keep_every_token_but_a_lonely_last_one(flat):
    ids = torch.arange(9) if flat else torch.arange(9)[None]
    assert [window.input_ids.tolist() for window in cut_windows([ids], 4)] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert [window.scored for window in cut_windows([ids[..., :8]], 3)] == [2, 2, 1]
    assert len(cut_windows([ids], 4, max_windows=1)) == 1


@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_overlapping_windows_score_each_token_but_the_first_once_with_enough_context(tokens, length, data):
    stride = data.draw(st.integers(1, length - 1))
    scored = []
    for number, window in enumerate(cut_windows([torch.arange(tokens)], length, stride=stride)):
        ids = window.input_ids[0].tolist()
        assert len(ids) <= length
        assert number == 0 or len(ids) - window.scored >= length - stride
        scored += ids[-window.scored :]
    assert scored == list(range(1, tokens))


def test_windows_never_cross_documents_and_are_counted_in_each():
    documents = [torch.arange(7), torch.arange(10, 12), torch.arange(20, 21)]
    windows = cut_windows(documents, 3, max_windows=2)
    assert [window.input_ids[0].tolist() for window in windows] == [[0, 1, 2], [3, 4, 5], [10, 11]]
    assert [window.document for window in windows] == [0, 0, 1]


def test_a_beginning_token_opens_every_window_and_is_not_scored():
    windows = cut_windows([torch.arange(1, 8)], 4, bos=0)
    assert [window.input_ids[0].tolist() for window in windows] == [[0, 1, 2, 3], [0, 4, 5, 6], [0, 7]]
    assert [window.scored for window in windows] == [3, 3, 1]


@pytest.mark.parametrize(
    ("ids", "length", "options", "message"),
    [
        (torch.zeros(2, 8), 4, {}, r"\(2, 8\)"),
        (torch.zeros(8), 1, {}, "got length 1"),
        (torch.zeros(8), 2, {"bos": 0}, "got length 2"),
        (torch.zeros(1), 4, {}, "1 token"),
        (torch.zeros(8), 4, {"max_windows": 0}, "got 0"),
        (torch.zeros(8), 4, {"stride": 0}, "got 0"),
        (torch.zeros(8), 4, {"stride": 5}, "got 5"),
    ],
    ids=["two rows", "window of one", "beginning alone", "one token", "no windows", "no stride", "gaps"],
)
def test_windows_that_score_nothing_or_leave_gaps_are_refused(ids, length, options, message):
    with pytest.raises(ValueError, match=message):
        cut_windows([ids], length, **options)


def test_the_tokenizer_decides_whether_texts_have_a_beginning():
    tokenizer = byte_tokenizer()
    assert beginning_token(tokenizer) is None
    assert tokenizer.decode(tokenize(tokenizer, "Anne.")) == "Anne."

    class Beginning:
        bos_token_id = 5

        def __init__(self, ids):
            self.ids = ids

        def __call__(self, text):
            return type("Encoding", (), {"input_ids": self.ids})

    assert beginning_token(Beginning([5, 7])) == 5
    assert beginning_token(Beginning([7])) is None


def test_a_folder_is_a_document_a_file_in_the_order_of_the_paths(tmp_path):
    (tmp_path / "b.md").write_text("second", "utf-8")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt.gz").write_bytes(gzip.compress(b"first"))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert read_documents(tmp_path) == (["first", "second"], tmp_path.name)
    assert read_documents(tmp_path, 1)[0] == ["first"]
    assert read_documents(tmp_path / "b.md") == (["second"], "b.md")
    assert read_documents()[1] == DEFAULT_TEXT


def test_an_unreadable_file_of_a_folder_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        read_documents(tmp_path)


class TestDataSets:
    @pytest.fixture
    def folder(self, tmp_path):
        pytest.importorskip("datasets")
        rows = [{"text": "", "number": 1}, {"text": "one", "number": 2}, {"text": "two", "number": 3}]
        for split in ("train", "test"):
            path = tmp_path / "data" / f"{split}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        return tmp_path / "data"

    def test_documents_are_the_texts_of_the_test_split(self, folder):
        assert read_dataset(str(folder)) == (["one", "two"], f"{folder} (test)")
        assert read_dataset(f"{folder}::train", 1) == (["one"], f"{folder}::train (train)")

    def test_an_unclear_split_or_column_is_refused(self, folder):
        with pytest.raises(ValueError, match="has the splits train, test: say which"):
            read_dataset(f"{folder}::validation")
        for path in folder.iterdir():
            path.write_text(json.dumps({"title": "a", "body": "b"}) + "\n", "utf-8")
        with pytest.raises(ValueError, match="no column text, and these columns of texts: title, body"):
            read_dataset(str(folder))

    def test_without_a_network_the_error_says_what_to_do(self, monkeypatch):
        datasets = pytest.importorskip("datasets")

        def unreachable(*_, **__):
            raise ConnectionError("Couldn't reach 'a/b' on the Hub")

        monkeypatch.setattr(datasets, "load_dataset", unreachable)
        monkeypatch.setattr("mala_hf.documents.hub_answers", lambda: True)
        with pytest.raises(OSError, match=r"cannot load the data set a/b: Couldn't reach .* give a file or folder"):
            read_dataset("a/b")

    def test_a_hub_that_does_not_answer_is_asked_for_no_files(self, monkeypatch):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets, "load_dataset", None)
        monkeypatch.setattr("mala_hf.documents.hub_answers", lambda: False)
        with pytest.raises(
            OSError, match=r"cannot load the data set a/b: the hub does not answer; .* give a file or folder"
        ):
            read_dataset("a/b")

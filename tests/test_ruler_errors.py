# SPDX-License-Identifier: Apache-2.0
"""What RULER samples cannot be drawn from is refused with a reason; the original tries for ever."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ruler_inputs import count_words, write_corpora

from mala_hf.ruler import TASKS, Corpora, generate, punkt_sentences
from mala_hf.ruler import words as ruler_words


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("extra", [1, 40])
def test_a_length_that_is_too_short_is_an_error(task, extra, corpora):
    with pytest.raises(ValueError, match=f"{task} does not fit in {TASKS[task].answer_tokens + extra} tokens"):
        generate(task, tokenizer=count_words, length=TASKS[task].answer_tokens + extra, num_samples=1, corpora=corpora)


def test_a_length_with_room_for_the_solved_chain_alone_is_an_error():
    with pytest.raises(ValueError, match="vt does not fit in 560 tokens"):
        generate("vt", tokenizer=count_words, length=560, num_samples=1)


def test_a_tokenizer_too_fine_for_the_solved_chain_is_an_error():
    with pytest.raises(ValueError, match="solved example does not fit in 500 tokens"):
        generate("vt", tokenizer=len, length=8192, num_samples=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "niah"}, "unknown RULER task 'niah'; the tasks are niah_single_1, "),
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"length": 128}, "niah_single_1 keeps 128 tokens for the answer"),
        ({"length": 200, "reserved": 72}, "niah_single_1 keeps 128 tokens for the answer"),
        (
            {"tokenizer": "gpt2"},
            "tokenizer must be one of transformers or a function text -> number of tokens, got str",
        ),
        ({"tokenizer": str.split}, "must return the number of tokens of a text"),
        ({"tokenizer": lambda text: 7}, "more for a longer text"),
        ({"task": "qa_1", "num_samples": 3}, "3 samples asked for, but squad has 2 questions"),
    ],
    ids=["task", "samples", "length", "template", "tokenizer", "ids", "constant", "questions"],
)
def test_bad_arguments_are_refused(options, message, corpora):
    arguments = {
        "task": "niah_single_1",
        "tokenizer": count_words,
        "length": 1024,
        "num_samples": 1,
        "corpora": corpora,
    }
    with pytest.raises(ValueError, match=message):
        generate(**(arguments | options))


@pytest.mark.parametrize(("task", "name"), [("niah_single_2", "essays"), ("qa_1", "squad"), ("qa_2", "hotpotqa")])
def test_a_missing_or_malformed_text_is_named(task, name, tmp_path: Path):
    def draw(corpora: Corpora | None) -> None:
        generate(task, tokenizer=count_words, length=1024, num_samples=1, corpora=corpora)

    with pytest.raises(ValueError, match=rf"needs a text of yours: Corpora\({name}=path\)"):
        draw(None)
    path = tmp_path / "text.json"
    with pytest.raises(FileNotFoundError, match=r"text\.json"):
        draw(Corpora(**{name: path}))
    path.write_text("{", "utf-8")
    with pytest.raises(ValueError, match=r"text\.json is not JSON"):
        draw(Corpora(**{name: path}))
    path.write_text('{"date": 3}', "utf-8")
    with pytest.raises(ValueError, match=r"text\.json has another form than expected"):
        draw(Corpora(**{name: path}))


def test_lists_beyond_the_known_words_need_a_longer_list(tmp_path):
    def few(text: str) -> int:
        return len(text) // 60

    with pytest.raises(ValueError, match=r"Corpora\(english_words=path\)"):
        generate("cwe", tokenizer=few, length=32768, num_samples=1)
    path = tmp_path / "words.json"
    path.write_text(json.dumps({"1": "one"}), "utf-8")
    with pytest.raises(ValueError, match=r"tries lists of \d+ words, and english_words has 1"):
        generate("cwe", tokenizer=few, length=32768, num_samples=1, corpora=Corpora(english_words=path))


def test_other_words_than_the_original_ones_are_refused(monkeypatch):
    monkeypatch.setattr(ruler_words, "version", lambda name: "2.2.0")
    ruler_words.read_words.cache_clear()
    with pytest.raises(
        ImportError, match=r"words are those of wonderwords 3.0.1, found 2.2.0: pip install '\.\[eval\]' in a checkout"
    ):
        generate("cwe", tokenizer=count_words, length=1024, num_samples=1)


def test_a_missing_sentence_splitter_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nltk", None)
    monkeypatch.setitem(sys.modules, "nltk.tokenize", None)
    with pytest.raises(ImportError, match=r"nltk: pip install '\.\[eval\]' in a checkout"):
        punkt_sentences("One. Two.")

    def sent_tokenize(text: str) -> list[str]:
        raise LookupError("punkt_tab")

    monkeypatch.setitem(sys.modules, "nltk", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nltk.tokenize", SimpleNamespace(sent_tokenize=sent_tokenize))
    with pytest.raises(LookupError, match=r"no punkt_tab data.*split_at_punctuation"):
        punkt_sentences("One. Two.")

# SPDX-License-Identifier: Apache-2.0
"""No finished answer is lost or written twice, and no foreign file is taken for ours."""

from __future__ import annotations

import json

import pytest

from mala_hf.ruler.answer_store import AnswerStore, key_of

SETTINGS = {"model": "tiny", "dtype": "float32"}


def answer(index: int, tau: float | None = None, task: str = "vt") -> dict:
    name = "sdpa" if tau is None else "mala"
    return {"length": 1024, "task": task, "index": index, "implementation": name, "tau": tau, "answer": "Anne\n\x00é"}


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path, notices) -> AnswerStore:
    return AnswerStore(tmp_path, SETTINGS, notice=notices.append)


def test_answers_come_back_as_they_were_stored(store, notices):
    assert store.read() == {}
    answers = [answer(0), answer(0, 1.0), answer(1, 0.5)]
    store.append(answers[:2])
    store.append(answers[2:])
    assert store.read() == {key_of(one): one for one in answers}
    assert notices == []


def test_a_line_that_was_cut_off_is_dropped_with_a_notice_and_written_over(store, notices):
    store.append([answer(0), answer(1)])
    whole = store.part.read_bytes()
    for cut in (1, 30):
        store.part.write_bytes(whole[:-cut])
        assert [key.number for key in store.read()] == [0]
        assert notices.pop() == "answers.part-0.jsonl: the last line was cut off and is dropped; its sample runs again"
        assert store.part.read_bytes() == whole[:-cut]
        store.drop_cut_off_line()
        store.append([answer(1)])
        assert store.part.read_bytes() == whole
    assert len(store.read()) == 2
    assert notices == []


def test_a_file_that_was_killed_at_its_first_line_starts_anew(store, notices):
    store.part.write_bytes(b'{"format": "mala')
    assert store.read() == {}
    assert len(notices) == 1
    store.drop_cut_off_line()
    store.append([answer(0)])
    assert len(store.read()) == 1


def test_merging_sorts_the_parts_of_all_processes_into_one_file(store, tmp_path):
    other = AnswerStore(tmp_path, SETTINGS, rank=1)
    store.append([answer(2), answer(0, 10.0), answer(0, 1.0)])
    other.append([answer(1), answer(0)])
    merged = store.merge()
    assert [(one["index"], one["tau"]) for one in merged] == [(0, 1.0), (0, 10.0), (0, None), (1, None), (2, None)]
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]
    store.append([answer(1, 1.0)])
    assert len(store.read()) == 6


def test_an_answer_stored_in_two_files_counts_once(store, tmp_path):
    """Killed between the two steps of a merge, the parts are still there."""
    store.append([answer(0)])
    part = store.part.read_bytes()
    store.merge()
    store.part.write_bytes(part)
    assert len(store.merge()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}\n", "was not written by mala-hf ruler: choose another output folder"),
        ("[1]\n", "was not written by mala-hf ruler"),
        ("length,task\n1,2\n", r"answers\.jsonl, line 1 is no answer \(JSONDecodeError\)"),
        ("HEADER\n{oops}\n{}\n", r"line 2 is no answer \(JSONDecodeError\): repair or remove the file"),
        ('HEADER\n{"length": 1024}\n', r"line 2 is no answer \(KeyError\)"),
        ("HEADER\n\x00\x00\n", "line 2 is no answer"),
    ],
    ids=["object", "list", "csv", "json", "part", "zeros"],
)
def test_damaged_and_foreign_files_are_refused(store, tmp_path, text, message):
    store.append([answer(0)])
    header = store.part.read_text("utf-8").splitlines()[0]
    (tmp_path / "answers.jsonl").write_text(text.replace("HEADER", header), "utf-8")
    with pytest.raises(ValueError, match=message):
        store.read()


def test_bytes_that_are_no_text_are_refused(store, tmp_path):
    (tmp_path / "answers.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match="line 1 is no answer"):
        store.read()


def test_answers_made_with_other_settings_are_refused(store, tmp_path):
    store.append([answer(0)])
    with pytest.raises(ValueError, match="made with dtype 'float32', not 'bfloat16': choose another output folder"):
        AnswerStore(tmp_path, SETTINGS | {"dtype": "bfloat16"}).read()


def test_what_cannot_be_read_is_an_error_of_the_system(store, tmp_path):
    (tmp_path / "answers.jsonl").mkdir()
    with pytest.raises(OSError, match=r"answers\.jsonl"):
        store.read()


def test_the_first_line_names_format_and_settings(store):
    store.append([answer(0)])
    first = json.loads(store.part.read_text("utf-8").splitlines()[0])
    assert first == {"format": "mala-hf ruler answers 1", "settings": SETTINGS}

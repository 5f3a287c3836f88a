# SPDX-License-Identifier: Apache-2.0
"""Prompts of base, chat and thinking models, and the file that keeps them."""

from __future__ import annotations

import gzip
import json
import re
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from ruler_inputs import word_tokenizer, write_corpora
from tiny_model import byte_tokenizer

from mala_hf.ruler import generate, sources
from mala_hf.ruler.prompts import Prompter, uses_chat_template
from mala_hf.ruler.sample_file import Wanted, prepare, read_samples

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
CAN_THINK = CHAT + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
ALWAYS_THINKS = CHAT + "{% if add_generation_prompt %}<think>\n{% endif %}"


def chat_tokenizer(template: str | None = CHAT):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "Who? Answer:"),
        (CHAT, "<user>Who?<assistant> Answer:"),
        (CAN_THINK, "<user>Who?<assistant><think></think> Answer:"),
        (ALWAYS_THINKS, "<user>Who?<assistant><think>\n</think>\n\n Answer:"),
    ],
    ids=["base", "chat", "thinking can be turned off", "thinks always"],
)
def test_the_prefix_of_the_answer_opens_the_turn_of_the_assistant(template, expected):
    prompter = Prompter(chat_tokenizer(template), chat=template is not None)
    text = prompter.text("Who?", " Answer:")
    assert text == expected
    assert byte_tokenizer().decode(prompter.ids(text)) == expected
    assert prompter.template_tokens == len(expected) - len("Who? Answer:")


def test_base_prompts_are_those_of_the_original_and_chat_leaves_room_for_its_template():
    tokenizer = chat_tokenizer()
    base = Prompter(tokenizer, chat=False).draw("niah_multikey_2", length=2048, num_samples=2)
    original = generate("niah_multikey_2", tokenizer=tokenizer, length=2048, num_samples=2)
    assert [prompt.text for prompt in base] == [sample.prompt for sample in original]
    for chat in (False, True):
        for prompt in Prompter(tokenizer, chat).draw("niah_multikey_2", length=2048, num_samples=2):
            assert len(prompt.ids) + prompt.answer_tokens <= 2048
            assert tokenizer.decode(prompt.ids) == prompt.text
            (depth,) = prompt.depths
            assert prompt.text.index(prompt.outputs[0]) / len(prompt.text) == pytest.approx(depth, abs=0.06)


def test_the_template_makes_no_sample_one_of_shorter_lengths():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = CHAT
    for length, common in ((4096, 30), (4095, 6)):
        (prompt,) = Prompter(tokenizer, chat=True).draw("cwe", length=length, num_samples=1)
        listed = prompt.text.rsplit("most often.\n", 1)[1].split("\nQuestion")[0]
        assert len(re.findall(rf"\d+\. {prompt.outputs[0]}\b", listed)) == common
        assert len(prompt.ids) + prompt.answer_tokens <= length


def test_a_task_that_fits_only_without_the_template_has_it_on_top():
    tokenizer = chat_tokenizer()
    smallest = 250
    base = Prompter(tokenizer, chat=False)
    while True:
        try:
            drawn = base.draw("fwe", length=smallest, num_samples=1)
            break
        except ValueError:
            smallest += 1
    (prompt,) = Prompter(tokenizer, chat=True).draw("fwe", length=smallest, num_samples=1)
    assert prompt.text.startswith(f"<user>{drawn[0].text[:60]}")
    assert len(prompt.ids) == len(drawn[0].ids) + Prompter(tokenizer, chat=True).template_tokens
    with pytest.raises(ValueError, match="fwe does not fit"):
        Prompter(tokenizer, chat=True).draw("fwe", length=smallest - 1, num_samples=1)


def test_special_tokens_are_added_only_where_no_template_writes_them():
    class WithBeginning:
        chat_template = CHAT

        def get_chat_template(self):
            return CHAT

        def __call__(self, text, add_special_tokens, **_):
            return type("Encoding", (), {"input_ids": [1] * add_special_tokens + [2]})

    assert Prompter(WithBeginning(), chat=False).ids("a") == [1, 2]
    assert Prompter(WithBeginning(), chat=True).ids("a") == [2]


def test_the_chat_template_is_used_where_there_is_one():
    assert uses_chat_template(chat_tokenizer(), "auto")
    assert not uses_chat_template(chat_tokenizer(), "off")
    assert not uses_chat_template(byte_tokenizer(), "auto")
    with pytest.raises(ValueError, match="has no chat template: use --chat-template off"):
        uses_chat_template(byte_tokenizer(), "on")
    with pytest.raises(ValueError, match="auto, on, off, got 'yes'"):
        uses_chat_template(byte_tokenizer(), "yes")


def wanted(**changes) -> Wanted:
    return Wanted(**({"tasks": ["fwe"], "lengths": [1024], "num_samples": 2, "corpora": "builtin"} | changes))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "samples" / "samples.jsonl.gz"


def test_prepared_samples_are_read_not_drawn_again(path, monkeypatch):
    first = prepare(path, wanted(), byte_tokenizer())
    data = path.read_bytes()
    monkeypatch.setattr(Prompter, "draw", None)
    assert prepare(path, wanted(), byte_tokenizer()) == first
    assert prepare(path, wanted(num_samples=1, corpora="auto"), byte_tokenizer()) == first[:1]
    assert path.read_bytes() == data


def test_more_samples_tasks_and_lengths_extend_the_file_and_leave_what_it_holds(path):
    first = prepare(path, wanted(), byte_tokenizer())
    more = wanted(tasks=["niah_single_1", "fwe"], lengths=[1024, 1500], num_samples=3, corpora="auto")
    found = prepare(path, more, byte_tokenizer())
    assert [(one.length, one.task, one.index) for one in found] == [
        (length, task, index) for length in (1024, 1500) for task in ("fwe", "niah_single_1") for index in range(3)
    ]
    assert found[:2] == first
    elsewhere = path.with_name("elsewhere.jsonl.gz")
    assert prepare(elsewhere, more, byte_tokenizer()) == found
    assert elsewhere.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("tokenizer", "changes", "message"),
    [
        (byte_tokenizer(), {"seed": 7}, "have seed 42, not 7"),
        (chat_tokenizer(), {}, "have chat_template False, not True"),
        (byte_tokenizer(), {"corpora": "hub"}, "are of the corpora builtin, not hub"),
    ],
    ids=["seed", "template", "corpora"],
)
def test_samples_of_another_kind_are_refused(path, tokenizer, changes, message):
    prepare(path, wanted(), byte_tokenizer())
    with pytest.raises(ValueError, match=message):
        prepare(path, wanted(**changes), tokenizer)


def test_samples_split_into_sentences_in_another_way_are_not_mixed(path, monkeypatch):
    prepare(path, wanted(), byte_tokenizer())
    split = read_samples(path)[0]["corpora"]["sentences"]
    monkeypatch.setattr(sources, "punkt_sentences", str.split if split == "punctuation" else missing_punkt)
    with pytest.raises(ValueError, match=r"was drawn from .* here are .*: use another folder"):
        prepare(path, wanted(num_samples=3), byte_tokenizer())


def missing_punkt(text: str) -> list[str]:
    raise LookupError(text)


def test_samples_for_another_tokenizer_are_refused(path):
    prepare(path, wanted(), byte_tokenizer())
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["another"])
    with pytest.raises(ValueError, match="have tokenizer "):
        prepare(path, wanted(), tokenizer)


def test_damaged_files_are_refused(path):
    prepare(path, wanted(), byte_tokenizer())
    data = path.read_bytes()
    lines = gzip.decompress(data).splitlines(keepends=True)
    for damaged, message in (
        (data[:-40], "no prepared sample"),
        (b"text", "line 0: no prepared sample"),
        (gzip.compress(b'{"format": "another"}\n'), "line 1: no prepared sample"),
        (gzip.compress(lines[0] + b'{"length": 3}\n'), "line 2: no prepared sample"),
        (gzip.compress(b""), "holds no prepared samples"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            read_samples(path)


@pytest.mark.parametrize("task", ["niah_multivalue", "qa_1", "qa_2"])
def test_substitutes_need_no_network_and_answer_their_questions(task, path):
    (prompt,) = prepare(
        path, wanted(tasks=[task], lengths=[5000], num_samples=1), byte_tokenizer(), notice=lambda _: None
    )
    assert all(prompt.text.count(output) == 1 for output in prompt.outputs)
    assert read_samples(path)[0]["corpora"]["source"] == "builtin"


def test_questions_of_the_substitutes_have_one_answer_each():
    town, people = sources.substitutes.squad(), sources.substitutes.hotpotqa()
    paragraphs = [article["paragraphs"][0] for article in town["data"]]
    assert len({one["qas"][0]["question"] for one in paragraphs}) == len(paragraphs) == len(people) == 500
    assert all(one["qas"][0]["answers"][0]["text"] in one["context"] for one in paragraphs)
    for one in people:
        text = " ".join("".join(sentences) for _, sentences in one["context"])
        assert text.count(one["answer"]) == 1
    assert sources.substitutes.squad() == town


def test_auto_says_when_it_takes_substitutes_and_never_asks_a_hub_it_does_not_need(monkeypatch):
    asked, notices = [], []
    monkeypatch.setattr(sources, "hub_answers", lambda: asked.append(1))
    monkeypatch.setattr(sources, "punkt_sentences", lambda text: [text])
    assert sources.find_sources("auto", ["fwe", "cwe"], notices.append).source == "builtin"
    assert (asked, notices) == ([], [])
    assert sources.find_sources("auto", ["qa_1"], notices.append).source == "builtin"
    assert "not comparable with published ones" in notices[0]
    monkeypatch.setattr(sources, "hub_answers", lambda: True)
    monkeypatch.setattr(sources, "from_hub", lambda corpus: {"from": corpus})
    found = sources.find_sources("auto", ["qa_1"], notices.append)
    assert (found.source, found.corpora.squad, found.corpora.essays) == ("hub", {"from": "squad"}, None)


def test_the_hub_is_asked_once_and_not_at_all_when_offline(monkeypatch):
    class Answering(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_):
            pass

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.handle_request)
        thread.start()
        assert sources.hub_answers()
        thread.join()
    assert not sources.hub_answers()  # nobody listens there now
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("urllib.request.urlopen", None)
    assert not sources.hub_answers()


def test_a_folder_gives_the_files_it_has(tmp_path, path):
    write_corpora(tmp_path)
    (tmp_path / "essays.txt").rename(tmp_path / "PaulGrahamEssays.json")
    (tmp_path / "PaulGrahamEssays.json").write_text(json.dumps({"text": "One sentence here. " * 900}), "utf-8")
    (tmp_path / "squad.json.gz").write_bytes(gzip.compress((tmp_path / "squad.json").read_bytes()))
    (tmp_path / "squad.json").unlink()
    here = {"corpora": str(tmp_path), "num_samples": 1, "lengths": [6000]}
    found = prepare(path, wanted(tasks=["niah_single_2", "qa_1"], **here), byte_tokenizer(), notice=lambda _: None)
    assert {prompt.task: "One sentence here." in prompt.text for prompt in found} == {
        "niah_single_2": True,
        "qa_1": False,
    }
    with pytest.raises(ValueError, match="say where that folder is"):
        prepare(path, wanted(tasks=["qa_2"], **(here | {"corpora": "auto"})), byte_tokenizer())
    with pytest.raises(ValueError, match="auto, hub, builtin or a folder, got 'nowhere'"):
        sources.find_sources("nowhere", ["qa_1"], print)


def test_rows_of_the_hub_take_the_form_of_the_files():
    row = {"title": "T", "context": "C.", "question": "Q?", "answers": {"text": ["a", "b"], "answer_start": [0, 0]}}
    impossible = row | {"question": "I?", "answers": {"text": [], "answer_start": []}}
    assert sources.squad_form([row, impossible, row | {"context": "D."}]) == {
        "data": [
            {
                "title": "T",
                "paragraphs": [
                    {
                        "context": "C.",
                        "qas": [
                            {"question": "Q?", "answers": [{"text": "a"}, {"text": "b"}], "is_impossible": False},
                            {"question": "I?", "answers": [], "is_impossible": True},
                        ],
                    },
                    {
                        "context": "D.",
                        "qas": [{"question": "Q?", "answers": [{"text": "a"}, {"text": "b"}], "is_impossible": False}],
                    },
                ],
            }
        ]
    }
    hotpot = {"question": "Q?", "answer": "a", "context": {"title": ["T", "U"], "sentences": [["S."], ["R.", " V."]]}}
    assert sources.hotpotqa_form([hotpot]) == [
        {"question": "Q?", "answer": "a", "context": [["T", ["S."]], ["U", ["R.", " V."]]]}
    ]
    assert sources.essays_form([{"text": "One  two."}, {"text": "Three"}]) == ["One", "two.", "Three"]

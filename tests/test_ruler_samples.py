# SPDX-License-Identifier: Apache-2.0
"""Samples for any tokenizer: templates, answers, lengths, determinism, and errors instead of endless tries."""

from __future__ import annotations

import json
import re

import pytest
from ruler_inputs import count_words, digest, paragraph, write_corpora

from mala_hf.ruler import TASKS, Corpora, Sample, generate, split_at_punctuation
from mala_hf.ruler.words import Keys

NIAH = [task for task in TASKS if task.startswith("niah")]

# of this implementation, with count_words: they change when any draw does
OWN = {
    ("niah_single_1", 1024): "1f65fd136a38068a010b35d30ad797182299d39afa60fac17f92edac84cb2eb9",
    ("niah_single_1", 4096): "9bba73fec1a4162a85bd79a4dc5596cbc8a14f0beda45b867ed4e7cef7e65b8c",
    ("niah_single_2", 1024): "8feab7750e17d255b201734f4cbe32f18eb5171efdc08888b6f4762a6f8ec084",
    ("niah_single_2", 4096): "dd98c3fa00a9ed8dde429291ae784a20e29b3b875d9198eabcc9f9cbf128233b",
    ("niah_single_3", 1024): "7054616ad6a39039c024244ebf7bc0fd737ebd3dda5ecc5f821815ceaba40e12",
    ("niah_single_3", 4096): "d1267ea8431a7fe7aa7403cf4a0a7ff8d51064aeb24718cfeb0798a427a93ab5",
    ("niah_multikey_1", 1024): "79a42d070902d7ecbae4d2ec9a9a9121ec60f98de97d530f7d57fc3be98e6e84",
    ("niah_multikey_1", 4096): "a68fa2f5510ac55e28753d739946efc36be143bedd72c4785f8ad03ce2c6534d",
    ("niah_multikey_2", 1024): "1ca942f8971ec94c12737e9af3ba8f5a7425481bea507502261b540a28f62df2",
    ("niah_multikey_2", 4096): "82118d17da0a36bae5f20d222ff2e535c8df73ac7d37ec84e7ee5ac7c35cbd57",
    ("niah_multikey_3", 1024): "e658d388f092c21b9f955e88f1d2fd228ddf7b2625ecb35ae927cc5bf2808b3a",
    ("niah_multikey_3", 4096): "e89d34cd6210c36985c12a418a458c12d97d948bf714122d08f028b05bafcc58",
    ("niah_multivalue", 1024): "8303779674f311f3f1ac68771be9eca5ef824a2dd21646f0888946ac782eff44",
    ("niah_multivalue", 4096): "a0bafa4ea6a1108220121e465865af5fafc5c761be852d205a7850f359023854",
    ("niah_multiquery", 1024): "b76de0ddcc57eeaf77f1498fbb358e30ffeff0d51d3ec1323425950be273352c",
    ("niah_multiquery", 4096): "7b38e3ea1fcaccf56675ca7f9ceeafaaf52a0bedb0c9fbfe2a3e6c55a3377a64",
    ("vt", 1024): "2ad5ffe914ceeaa7b4cdda9651b709e468b2c1857868634a143f45c9e321867d",
    ("vt", 4096): "6b92ad494b64feac276b40e658d61dc85f7251a627058a1b053e9925f8614a08",
    ("cwe", 1024): "0f067e2c1f0a7ad702d96227382ae9a72309d6c9dab3646bb84a1b778389b0d9",
    ("cwe", 4096): "ddef5ba8ae5b9cd3bd5c5e9182dba2ccb8c831614a5db7ef15f99095b9fa24ea",
    ("fwe", 1024): "a064dc261dbbf74bb4786c2abc109a08d15512add0c3964e2e3ed43b2d4b0d3a",
    ("fwe", 4096): "6cee8f3963b6a5792093745a657af6696d5d1e69d3f4b208d0959de0c1e1c06c",
    ("qa_1", 1024): "23ccdca5312869984bac3621f8777c7f8f9919c1a20d89af530070fe0b467729",
    ("qa_1", 4096): "09a7325b28bda2ec743f22ae13498081135b545d17a6ce7ae3d62f4e7a7047e5",
    ("qa_2", 1024): "593e89b024cff59ff2a86fe807e105fb6b29f638aaa728283741ec25e97b408e",
    ("qa_2", 4096): "36e306220a1439c3c8d4a94f54ad73046ad1fbcbadae7d0ee8f97a1e665cb52b",
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def draw(corpora):
    def draw(task: str, length: int = 1024, **options) -> list[Sample]:
        return generate(
            task, **{"tokenizer": count_words, "num_samples": 2, "corpora": corpora, **options}, length=length
        )

    return draw


@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("task", TASKS)
def test_samples_stay_what_they_are(task, length, draw):
    assert digest(draw(task, length)) == OWN[task, length]


@pytest.mark.parametrize("task", TASKS)
def test_samples_fit_and_say_how_long_they_are(task, draw):
    for i, sample in enumerate(draw(task)):
        assert (sample.task, sample.index) == (task, i)
        assert sample.length == count_words(sample.prompt) + TASKS[task].answer_tokens <= 1024


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_gives_the_same_samples_whatever_was_drawn_before_and_another_seed_others(task, draw):
    first = draw(task)
    draw("niah_single_1")
    assert draw(task) == first
    if task.startswith("qa"):  # the questions stay
        assert [sample.input for sample in draw(task, seed=43)] != [sample.input for sample in first]
    else:
        assert {sample.outputs for sample in draw(task, seed=43)}.isdisjoint(sample.outputs for sample in first)


@pytest.mark.parametrize("task", TASKS)
def test_fewer_samples_are_the_first_ones(task, draw):
    assert draw(task, num_samples=1) == draw(task)[:1]


# what stands around the context, for one key K
TEMPLATES = {
    "niah_single_1": (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number "
        "afterwards.\n",
        "\nWhat is the special magic number for K mentioned in the provided text?",
        " The special magic number for K mentioned in the provided text is",
    ),
    "niah_multikey_3": (
        "A special magic uuid is hidden within the following text. Make sure to memorize it. I will quiz you about the uuid "
        "afterwards.\n",
        "\nWhat is the special magic uuid for K mentioned in the provided text?",
        " The special magic uuid for K mentioned in the provided text is",
    ),
    "niah_multivalue": (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about the numbers "
        "afterwards.\n",
        "\nWhat are all the special magic numbers for K mentioned in the provided text?",
        " The special magic numbers for K mentioned in the provided text are",
    ),
    "vt": (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
        "\nQuestion: Find all variables that are assigned the value K in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the value K, they are: ",
    ),
    "cwe": (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most "
        "often.\n1. ",
        "\nQuestion: What are the 10 most common words in the above list?",
        " Answer: The top 10 words that appear most often in the list are:",
    ),
    "fwe": (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded "
        "words. ",
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared words "
        "in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
    ),
    "qa_1": (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\nThe following "
        "are given documents.\n\nDocument 1:\n",
        "\n\nAnswer the question based on the given documents. Only give me the answer and do not output any other words.\n\nQuestion: "
        "How many windows has house 100?",
        " Answer:",
    ),
}


@pytest.mark.parametrize("task", TEMPLATES)
def test_prompts_follow_the_published_templates(task, draw):
    sample = draw(task)[0]
    found = re.search(r"(?:for|value) (\S+?)(?:,| mentioned)", sample.answer_prefix)
    start, end, prefix = (text.replace(" K", f" {found[1]}" if found else "") for text in TEMPLATES[task])
    assert sample.input.startswith(start)
    assert sample.input.endswith(end)
    assert sample.answer_prefix == prefix
    assert sample.prompt == sample.input + prefix


def test_budgets_of_the_answers_are_the_published_ones():
    budgets = {task: TASKS[task].answer_tokens for task in TASKS}
    assert budgets == dict.fromkeys(NIAH, 128) | {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}


@pytest.mark.parametrize("task", NIAH)
def test_needles_give_each_answer_to_the_key_that_is_asked_for(task, draw):
    for sample in draw(task):
        needles = dict.fromkeys(re.findall(r"One of the special magic \w+ for (.+?) is: (.+?)\.", sample.input))
        asked = re.split(", and |, ", re.search("for (.*) mentioned", sample.answer_prefix)[1])
        assert len(asked) == (4 if task == "niah_multiquery" else 1)
        assert len(sample.outputs) == (4 if task in ("niah_multiquery", "niah_multivalue") else 1)
        keys = asked if len(asked) == len(sample.outputs) else asked * len(sample.outputs)
        assert set(zip(keys, sample.outputs, strict=True)) == {needle for needle in needles if needle[0] in asked}
        if task in ("niah_single_1", "niah_multikey_1", "niah_multikey_2"):
            assert (len(needles) == 1, len(needles) == 4) == (task == "niah_single_1", task == "niah_multikey_1")


@pytest.mark.parametrize("task", NIAH)
def test_needles_tell_how_deep_they_lie(task, draw):
    for sample in draw(task):
        before = sample.input.index(sample.outputs[0])
        assert sample.answer_position == count_words(sample.input[:before])
        assert json.loads(sample.to_json())["index"] == before


def test_variables_form_one_chain_after_a_solved_one(draw):
    for sample in draw("vt"):
        example, question = sample.input.split("they are: ")
        solved, question = question.split("\n\n", 1)
        for text, names, letters in ((example, solved.split(), 3), (question, list(sample.outputs), 5)):
            value = re.search(r"the value (\d{5}) in the text", text)[1]
            assert re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text) == list(zip(names, [value, *names], strict=False))
            assert {len(name) for name in names} == {letters}
        assert "12345" not in sample.input


@pytest.mark.parametrize(("length", "common", "uncommon"), [(1024, 6, 1), (4096, 30, 3)])
def test_common_words_are_the_answer(length, common, uncommon, draw):
    for sample in draw("cwe", length):
        listed = sample.input.rsplit("most often.\n", 1)[1].split("\nQuestion")[0]
        words = re.findall(r"\d+\. (.*?)(?= \d+\. |$)", listed)
        counts = {word: words.count(word) for word in words}
        assert {word for word, count in counts.items() if count == common} == set(sample.outputs)
        assert set(counts.values()) == {common, uncommon}


def test_frequent_words_are_the_answer_in_their_order(draw):
    for sample in draw("fwe"):
        words = sample.input.split("coded words. ")[1].split("\nQuestion")[0].split()
        by_count = sorted(set(words), key=words.count, reverse=True)
        assert by_count[:4] == ["...", *sample.outputs]


def test_questions_come_with_their_documents(draw):
    for sample, house in zip(draw("qa_1"), (100, 200), strict=True):
        assert sample.outputs == (str(house + 2), f"{house + 2} windows")
        assert paragraph(house) in sample.input
    for sample, house in zip(draw("qa_2", 512), (100, 102), strict=True):
        assert sample.outputs == (str(house + 2),)
        assert f":\nHouse {house}\n{paragraph(house)}" in sample.input


@pytest.mark.parametrize("task", NIAH)
def test_a_transformers_tokenizer_is_counted_without_special_tokens(task, draw):
    class Tokenizer:
        def tokenize(self, text: str) -> list[str]:
            return re.findall(r"\w+|[^\w\s]", text)

        def __call__(self, text: str) -> dict:
            raise AssertionError("would add special tokens")

    assert draw(task, tokenizer=Tokenizer()) == draw(task)


def test_essays_start_again_when_they_are_too_short(tmp_path):
    (tmp_path / "essays.json").write_text(json.dumps({"text": "One  two\nthree. Four five."}), "utf-8")
    corpora = Corpora(essays=tmp_path / "essays.json", split_sentences=split_at_punctuation)
    (sample,) = generate("niah_single_2", tokenizer=count_words, length=900, num_samples=1, corpora=corpora)
    assert "One two three. Four five. One two three. Four five." in sample.input
    assert sample.length > 600


def test_documents_repeat_when_there_are_too_few(draw):
    (sample,) = draw("qa_2", 2048, num_samples=1)
    counts = [sample.input.count(f"house {number} has") for number in range(100, 112)]
    assert min(counts) > 1
    assert max(counts) - min(counts) <= 1


def test_long_lists_have_the_words_of_the_longer_list():
    def few(text: str) -> int:
        return len(text) // 60

    words = {str(number): f"word{number}" for number in range(60_000)}
    (sample,) = generate("cwe", tokenizer=few, length=16_384, num_samples=1, corpora=Corpora(english_words=words))
    listed = re.findall(r"\d+\. (\S+)", sample.input.rsplit("most often.\n", 1)[1].split("\nQuestion")[0])
    assert len(set(listed)) > 8166
    assert set(listed) <= set(words.values())
    assert set(sample.outputs) <= set(words.values())
    assert 16_384 * 0.9 < sample.length <= 16_384


@pytest.mark.parametrize(("length", "reserved", "common"), [(4096, 0, 30), (4096, 40, 30), (4056, 0, 6), (4095, 40, 6)])
def test_room_for_a_template_makes_no_shorter_length(length, reserved, common, draw):
    for sample in draw("cwe", length, reserved=reserved):
        listed = sample.input.rsplit("most often.\n", 1)[1].split("\nQuestion")[0]
        assert len(re.findall(rf"\d+\. {sample.outputs[0]}\b", listed)) == common
        assert sample.length <= length - reserved


def test_the_solved_chain_is_measured_with_one_newline_behind_it(draw):
    counted = []

    def count(text: str) -> int:
        counted.append(text)
        return count_words(text)

    (sample,) = draw("vt", tokenizer=count, num_samples=1)
    measured = [text for text in counted if text.endswith("\n")]
    assert [text.rstrip("\n") + "\n" for text in measured] == measured
    assert len(measured) == 1
    assert len(measured[0]) == sample.input.index("\n\nMemorize") + 1


def test_keys_are_the_sorted_pairs_also_where_adjectives_begin_alike():
    adjectives = ["old", "old-fashioned", "older", "ad", "ad hoc", "old", "x-rated"]
    nouns = ["fame", "fashioned-man", "man", "art", "zoo"]
    keys = Keys(adjectives, nouns)
    assert [keys[i] for i in range(len(keys))] == sorted(
        {f"{adjective}-{noun}" for adjective in adjectives for noun in nouns}
    )

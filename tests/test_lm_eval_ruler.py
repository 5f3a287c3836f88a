# SPDX-License-Identifier: Apache-2.0
"""RULER in lm-evaluation-harness: samples are RULER's, and scores those of ``mala-hf ruler`` for the same prompts and answers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from lm_eval_inputs import save_checkpoint
from ruler_inputs import word_tokenizer, write_corpora

from mala_hf.implementations import Implementation
from mala_hf.ruler import TASKS, generate, score
from mala_hf.ruler.answering import greedy_answers, stop_tokens
from mala_hf.ruler.prompts import Prompt, Prompter
from mala_hf.ruler.scoring import sample_score
from mala_hf.ruler.sources import find_sources
from mala_hf.ruler.summary import summarize

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from mala_hf.lm_eval.launcher import CONFIGS  # noqa: E402
from mala_hf.lm_eval.ruler_task import draw_documents, read_lengths  # noqa: E402

THEIRS = Path(lm_eval.__file__).parent / "tasks" / "ruler"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("corpora")
    write_corpora(folder)
    return str(folder)


def load(names: str | list[str], folder: Path = CONFIGS, **metadata: Any) -> tuple[TaskManager, dict[str, Any]]:
    manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
    return manager, manager.load(names)


class Clerk(LM):
    """Answers from a list; ``asked`` keeps the prompts."""

    def __init__(self, answers: dict[str, str]) -> None:
        super().__init__()
        self.answers, self.asked = answers, []

    def generate_until(self, requests, disable_tqdm=False):
        self.asked += [request.args[0] for request in requests]
        return [self.answers[request.args[0]] for request in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError


def partly_right(index: int, references: list[str] | tuple[str, ...]) -> str:
    """Give all references, or the first in capitals, or half of one, or none, with what answers come with."""
    return (
        f" \t{', '.join(references)}.\n",
        f"\n{references[0].upper()}\x00",
        references[-1][: len(references[-1]) // 2],
        "I do not know.",
    )[index % 4]


def evaluate(model: Any, manager: TaskManager, tasks: list[str]) -> dict[str, Any]:
    return lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=True)


def test_there_is_a_task_for_each_of_ruler_and_a_group_of_them_all():
    names = [f"mala_ruler_{task}" for task in TASKS]
    manager = TaskManager(include_path=str(CONFIGS), include_defaults=False)
    assert manager.all_subtasks == sorted(names)
    assert manager.all_groups == ["mala_ruler"]
    assert manager.task_index["mala_ruler"].cfg["task"] == names


def test_prompts_and_scores_are_those_of_our_own_command(corpora):
    lengths, count = [1024, 1280], 2
    tokenizer = word_tokenizer()
    source = find_sources(corpora, TASKS, lambda _: None).corpora
    prompts, answers, by_text = [], [], {}
    for task in TASKS:
        for length in lengths:
            for sample in generate(task, tokenizer=tokenizer, length=length, num_samples=count, corpora=source):
                prompts.append(Prompt(length, task, sample.index, sample.prompt, (), sample.outputs))
                by_text[sample.prompt] = partly_right(len(answers), sample.outputs)
                share = sample_score(task, by_text[sample.prompt], sample.outputs)
                answer = {"length": length, "task": task, "index": sample.index, "answer": by_text[sample.prompt]}
                answers.append(answer | {"score": 100 * share, "found": [], "implementation": "sdpa", "tau": None})
    ours = summarize(prompts, answers, [Implementation("sdpa")])

    settings = {"tokenizer": tokenizer, "max_seq_lengths": lengths[::-1], "num_samples": count, "corpora": corpora}
    manager, _ = load([], **settings)
    clerk = Clerk(by_text)
    found = evaluate(clerk, manager, ["mala_ruler"])
    assert sorted(clerk.asked) == sorted(by_text)
    assert len(by_text) == len(TASKS) * len(lengths) * count
    for row in ours["tasks"]:
        theirs = found["results"][f"mala_ruler_{row['task']}"]
        assert round(theirs[f"{row['length']},none"], 2) == row["score"], row
        assert theirs["score,none"] == pytest.approx(fmean(theirs[f"{length},none"] for length in lengths))
    means = {row["length"]: row["score"] for row in ours["lengths"]}
    assert 20 < means[None] < 80
    assert found["groups"]["mala_ruler"]["score,none"] == pytest.approx(means[None], abs=0.005)
    assert found["configs"]["mala_ruler_qa_1"]["metadata"]["texts"]["source"] == Path(corpora).name


def test_room_for_a_chat_template_is_left_when_asked_for(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for turn in messages %}<{{ turn['role'] }}> {{ turn['content'] }}{% if not loop.last %}\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}\n<assistant>{% endif %}"
    )
    settings = {"tokenizer": tokenizer, "max_seq_lengths": 700, "num_samples": 2, "chat_template": True}
    manager, _ = load([], **settings)
    (task,) = manager.load("mala_ruler_niah_single_1")["tasks"].values()
    expected = Prompter(tokenizer, chat=True).draw("niah_single_1", length=700, num_samples=2)

    def write(turns, add_generation_prompt=True):  # as lm_eval's models do
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return tokenizer.apply_chat_template(turns, tokenize=False, **options)

    task.build_all_requests(apply_chat_template=True, fewshot_as_multiturn=True, chat_template=write)
    assert [request.args[0].split() for request in task.instances] == [prompt.text.split() for prompt in expected]
    room = draw_documents("niah_single_1", [700], {**settings, "chat_template": False})[0]
    assert [one["input"] for one in room] != [request.doc["input"] for request in task.instances]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("checkpoint")))


def model_of(checkpoint: str, batch_size: int, attention: str) -> HFLM:
    return HFLM(pretrained=checkpoint, attn_implementation=attention, device="cpu", batch_size=batch_size)


def answers_of(found: dict[str, Any], task: str) -> list[str]:
    return [sample["resps"][0][0] for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"])]


@pytest.mark.parametrize("attention", ["sdpa", "mala"])
def test_answers_are_those_of_our_own_command_at_every_batch_size(attention, checkpoint, corpora):
    names = ["mala_ruler_fwe", "mala_ruler_qa_1"]
    settings = {"pretrained": checkpoint, "max_seq_lengths": [1300, 1700], "num_samples": 2, "corpora": corpora}
    manager, _ = load([], **settings)
    lm = model_of(checkpoint, 1, attention)
    found = evaluate(lm, manager, names)
    batched = evaluate(model_of(checkpoint, 3, attention), manager, names)
    prompter = Prompter(lm.tokenizer, chat=False)
    different = set()
    for name in names:
        task = name.removeprefix("mala_ruler_")
        source = find_sources(corpora, [task], lambda _: None).corpora
        prompts = [
            prompt
            for length in settings["max_seq_lengths"]
            for prompt in prompter.draw(task, length=length, num_samples=2, corpora=source)
        ]
        budgets = [TASKS[task].answer_tokens] * len(prompts)
        ours = greedy_answers(lm.model, [one.ids for one in prompts], budgets, stop=stop_tokens(lm.model, lm.tokenizer))
        assert answers_of(found, name) == lm.tokenizer.batch_decode(ours, skip_special_tokens=True)
        assert answers_of(batched, name) == answers_of(found, name)
        assert batched["results"][name] == found["results"][name]
        different |= {*answers_of(found, name)}
    assert len(different) > 4


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
def test_tasks_that_are_right_in_its_own_port_have_the_same_scores_here(task, checkpoint, monkeypatch):
    """Its documents, its prompts; its scores are shares, ours percent."""
    # when it is imported it makes six million keys of all words, and downloads what these tasks do not need
    few_words = SimpleNamespace(_categories=defaultdict(lambda: ["cat", "dog", "owl"]))
    monkeypatch.setattr("wonderwords.RandomWord", lambda: few_words)
    monkeypatch.setattr("nltk.download", lambda *_, **__: False)
    manager, loaded = load(task, THEIRS, pretrained=checkpoint, max_seq_lengths=[2048])
    documents = list(loaded["tasks"][task].eval_docs)[:8]
    prompts = [f"{one['input']} {one['gen_prefix']}" for one in documents]
    texts = [partly_right(number, one["outputs"]) for number, one in enumerate(documents)]
    clerk = Clerk(dict(zip(prompts, texts, strict=True)))
    tasks = list(loaded["tasks"].values())
    found = lm_eval.simple_evaluate(clerk, tasks=tasks, task_manager=manager, limit=8, bootstrap_iters=0)
    assert clerk.asked == prompts
    expected = score(task, texts, [one["outputs"] for one in documents])
    assert 0 < expected < 100
    assert 100 * found["results"][task]["2048,none"] == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("value", [[], [0], [4096, 4096], "4096", [True], None])
def test_lengths_that_are_none_are_refused(value):
    with pytest.raises(ValueError, match="max_seq_lengths are numbers of tokens, each once, got"):
        read_lengths(value)


def test_a_length_that_lm_eval_would_cut_is_refused(checkpoint):
    with pytest.raises(ValueError, match="length 5000 is more than the model's 4096 tokens"):
        load("mala_ruler_fwe", pretrained=checkpoint, max_seq_lengths=[1024, 5000], num_samples=1)
    for settings in ({"max_length": 5000}, {"max_position_embeddings": 5000}):
        load("mala_ruler_fwe", pretrained=checkpoint, max_seq_lengths=[5000], num_samples=1, **settings)
    with pytest.raises(ValueError, match="length 1024 is more than the model's 1000 tokens"):
        load("mala_ruler_fwe", tokenizer=word_tokenizer(), max_seq_lengths=[1024], num_samples=1, max_length=1000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": ""}, "--model_args or --metadata must name a tokenizer"),
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"chat_template": True}, "has no chat template"),
        ({"corpora": "nowhere"}, "corpora are auto, hub, builtin or a folder, got 'nowhere'"),
        ({"max_seq_lengths": [140]}, "niah_single_1 does not fit in 140 tokens"),
    ],
    ids=["tokenizer", "samples", "template", "corpora", "length"],
)
def test_settings_that_cannot_be_drawn_are_refused(settings, message):
    settings = {"tokenizer": word_tokenizer(), "max_seq_lengths": [1024], "num_samples": 1} | settings
    with pytest.raises(ValueError, match=message):
        load("mala_ruler_niah_single_1", **settings)

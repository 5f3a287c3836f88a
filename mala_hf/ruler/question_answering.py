# SPDX-License-Identifier: Apache-2.0
"""Question answering (qa): the documents that answer a question of SQuAD or HotpotQA, among others of the same data set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

from .sampling import Draft, Run, draw_samples, largest_size

TEMPLATE = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {query}"
)
ANSWER_PREFIX = " Answer:"
STEP = 10


@dataclass(frozen=True)
class Question:
    """A question, its accepted answers, the documents it needs, and those of the same article, which distract first."""

    text: str
    answers: list[str]
    needed: list[str]
    related: list[str]


def read_squad(data: Any) -> list[Question]:
    """Take the answerable questions of a SQuAD 2.0 file, in its order."""
    questions = []
    for article in data["data"]:
        paragraphs = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            needed = paragraph["context"]
            related = [other for other in paragraphs if other != needed]
            for qa in paragraph["qas"]:
                if not qa.get("is_impossible", False):
                    answers = [answer["text"] for answer in qa["answers"]]
                    questions.append(Question(qa["question"], answers, [needed], related))
    return questions


def squad_documents(data: Any) -> list[str]:
    """Take every paragraph of a SQuAD 2.0 file, sorted, each once."""
    return sorted({paragraph["context"] for article in data["data"] for paragraph in article["paragraphs"]})


def hotpotqa_context(question: Any) -> list[str]:
    """Take the ten paragraphs of a question, each under its title."""
    return [f"{title}\n{''.join(sentences)}" for title, sentences in question["context"]]


def read_hotpotqa(data: Any) -> list[Question]:
    """Take the questions of a HotpotQA file, in its order; all of their paragraphs are needed."""
    return [Question(one["question"], [one["answer"]], hotpotqa_context(one), []) for one in data]


def hotpotqa_documents(data: Any) -> list[str]:
    """Take every paragraph of a HotpotQA file, sorted, each once."""
    return sorted({document for one in data for document in hotpotqa_context(one)})


READERS = {
    "squad": lambda data: (read_squad(data), squad_documents(data)),
    "hotpotqa": lambda data: (read_hotpotqa(data), hotpotqa_documents(data)),
}


def draw_task(run: Run, *, corpus: str) -> Iterator[Draft]:
    """Draw samples, one for each question of the file in order; the size is the number of documents."""
    questions, documents = run.corpora.read_json(corpus, READERS[corpus])
    if run.num_samples > len(questions):
        raise ValueError(
            f"{run.task}: {run.num_samples} samples asked for, but {corpus} has {len(questions)} questions"
        )

    def choose(question: Question, size: int) -> list[str]:
        if size >= len(documents):
            return list(islice(cycle(documents), size))
        free = size - len(question.needed)
        if free < 0:
            raise run.too_short(f"no prompt did that has the {len(question.needed)} documents of a question")
        if free <= len(question.related):
            return question.needed + run.rng.sample(question.related, free)
        known = {*question.needed, *question.related}
        others = [document for document in documents if document not in known]
        return question.needed + question.related + run.rng.sample(others, free - len(question.related))

    def draw(index: int, size: int) -> Draft:
        question = questions[index]
        numbered = [f"Document {i}:\n{document}" for i, document in enumerate(run.shuffled(choose(question, size)), 1)]
        prompt = TEMPLATE.format(context="\n\n".join(numbered), query=question.text)
        return Draft(prompt, ANSWER_PREFIX, question.answers)

    tokens_per_document = run.prompt_tokens(draw(0, STEP)) / STEP
    estimate = int(run.length / tokens_per_document * 3)
    size = largest_size(partial(draw, 0), run.fits, smallest=STEP, estimate=estimate)
    return draw_samples(run, draw, size=size, step=STEP)

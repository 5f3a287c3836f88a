# SPDX-License-Identifier: Apache-2.0
"""Small texts for the RULER tasks that need one, and tokenizers that need no file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mala_hf.ruler import Corpora, Sample, split_at_punctuation
from mala_hf.text import default_text


def count_words(text: str) -> int:
    """Words and punctuation marks."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Give all words and punctuation marks the same token: for what is counted as ``count_words`` does, and never decoded."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


def digest(samples: Sequence[Sample]) -> str:
    """SHA-256 of the file that RULER would write."""
    return hashlib.sha256("".join(f"{sample.to_json()}\n" for sample in samples).encode()).hexdigest()


def paragraph(number: int) -> str:
    return f"Paragraph {number} says that house {number} has {number + 2} windows. " + "Nobody counted its doors. " * (
        number % 3
    )


def squad() -> dict:
    """Two articles of 3 and 12 paragraphs; the first paragraph of each has an impossible and an answerable question."""

    def article(numbers: range) -> dict:
        paragraphs = [{"context": paragraph(number), "qas": []} for number in numbers]
        paragraphs[0]["qas"] = [
            {"question": "Impossible?", "answers": [], "is_impossible": True},
            {
                "question": f"How many windows has house {numbers[0]}?",
                "answers": [{"text": str(numbers[0] + 2)}, {"text": f"{numbers[0] + 2} windows"}],
                "is_impossible": False,
            },
        ]
        return {"title": f"House {numbers[0]}", "paragraphs": paragraphs}

    return {"data": [article(range(100, 103)), article(range(200, 212))]}


def hotpotqa() -> list[dict]:
    """Two questions with ten of twelve paragraphs each."""
    return [
        {
            "question": f"How many windows has house {first}?",
            "answer": str(first + 2),
            "context": [
                [f"House {number}", re.split("(?<=[.])(?= )", paragraph(number))] for number in range(first, first + 10)
            ],
        }
        for first in (100, 102)
    ]


def write_corpora(folder: Path) -> Corpora:
    """Write all of them, and take the novel of the package for the essays."""
    for name, data in {"squad": squad(), "hotpotqa": hotpotqa()}.items():
        (folder / f"{name}.json").write_text(json.dumps(data), "utf-8")
    (folder / "essays.txt").write_text(default_text(), "utf-8")
    return Corpora(
        essays=folder / "essays.txt",
        squad=folder / "squad.json",
        hotpotqa=folder / "hotpotqa.json",
        split_sentences=split_at_punctuation,
    )

# SPDX-License-Identifier: Apache-2.0
"""Where the texts of an evaluation come from: the hub, a folder, or the substitutes that ship with the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..extras import how_to_install
from ..model_place import hub_answers
from ..quiet import quiet_data
from . import substitutes
from .corpora import Corpora, punkt_sentences, split_at_punctuation, words_of
from .tasks import TASKS

FILES = {
    "essays": ("essays.txt", "essays.json", "PaulGrahamEssays.json"),
    "squad": ("squad.json",),
    "hotpotqa": ("hotpotqa.json",),
    "english_words": ("english_words.json",),
}
PLACES = ("auto", "hub", "builtin")
# data sets of the hub, none of which is a script
HUB = {
    "essays": ("baber/paul_graham_essays", None, "train"),
    "squad": ("rajpurkar/squad_v2", None, "validation"),
    "hotpotqa": ("hotpotqa/hotpot_qa", "distractor", "validation"),
}


@dataclass(frozen=True)
class Sources:
    """Texts and their names: ``source`` ("hub", "builtin" or a folder's name) and ``sentences`` (how essays were split)."""

    corpora: Corpora
    source: str
    sentences: str

    def names(self) -> dict[str, str]:
        """What a results file says about them."""
        return {"source": self.source, "sentences": self.sentences}


def find_sources(place: str, tasks: Iterable[str], notice: Callable[[str], None]) -> Sources:
    """Return the texts for the tasks; place: "hub", "builtin", "auto" (the hub if it answers, else builtin) or a folder.

    A folder holds any of ``essays.txt`` (or .json), ``squad.json``, ``hotpotqa.json``, ``english_words.json``, also with ``.gz``.
    Raises ``ValueError`` for another place, ``OSError`` when the hub does not answer, ``ImportError`` without datasets.
    """
    check_corpora(place)
    needed = {corpus for task in tasks if (corpus := corpus_of(task)) is not None}
    if place == "auto":
        place = "hub" if needed and hub_answers() else "builtin"
        if needed and place == "builtin":
            notice(
                "the hub does not answer: substitutes for essays and questions; scores are not comparable with published ones"
            )
    if place == "hub":
        texts = {corpus: from_hub(corpus) for corpus in sorted(needed)}
    elif place == "builtin":
        texts = {"essays": substitutes.essay_words(), "squad": substitutes.squad(), "hotpotqa": substitutes.hotpotqa()}
    else:
        texts = from_folder(Path(place))
        place = Path(place).resolve().name
    split, sentences = punkt_sentences, "punkt"
    try:
        punkt_sentences("One. Two.")
    except (ImportError, LookupError):
        split, sentences = split_at_punctuation, "punctuation"
        if "essays" in needed:
            notice("nltk and its punkt_tab are not here: essays are split at punctuation, not as RULER splits them")
    return Sources(Corpora(**texts, split_sentences=split), place, sentences)


def check_corpora(place: str) -> None:
    """Raise ``ValueError`` for a place that ``find_sources`` does not know."""
    if place not in PLACES and not Path(place).is_dir():
        raise ValueError(f"corpora are auto, hub, builtin or a folder, got {place!r}")


def corpus_of(task: str) -> str | None:
    """Return the corpus that a task cannot be drawn without."""
    options: dict[str, Any] = getattr(TASKS[task].draw, "keywords", {})
    return "essays" if options.get("haystack") == "essay" else options.get("corpus")


def from_folder(folder: Path) -> dict[str, Any]:
    """Return the paths of the files that are there."""
    candidates = {
        corpus: [folder / f"{name}{gz}" for name in names for gz in ("", ".gz")] for corpus, names in FILES.items()
    }
    found = {corpus: next((path for path in paths if path.is_file()), None) for corpus, paths in candidates.items()}
    return {corpus: path for corpus, path in found.items() if path is not None}


def from_hub(corpus: str) -> Any:
    """Load a corpus from the hub, in the form that its file would have."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"texts of the hub need the package datasets: {how_to_install('eval')}") from error
    name, config, split = HUB[corpus]
    try:
        with quiet_data(datasets):
            rows = datasets.load_dataset(name, config, split=split)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise OSError(f"cannot load {name}: {error}; without a network use --corpora builtin or a folder") from error
    return FORMS[corpus](rows)


def essays_form(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Words of all essays."""
    return words_of(" ".join(row["text"] for row in rows))


def squad_form(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The file of SQuAD 2.0 from rows of one question each: articles by title, paragraphs by text, in the order of the rows."""
    articles: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        texts = row["answers"]["text"]
        question = {
            "question": row["question"],
            "answers": [{"text": one} for one in texts],
            "is_impossible": not texts,
        }
        articles.setdefault(row["title"], {}).setdefault(row["context"], []).append(question)
    return {
        "data": [
            {"title": title, "paragraphs": [{"context": context, "qas": qas} for context, qas in paragraphs.items()]}
            for title, paragraphs in articles.items()
        ]
    }


def hotpotqa_form(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The file of HotpotQA: titles and sentences of each paragraph side by side."""
    return [
        {
            "question": row["question"],
            "answer": row["answer"],
            "context": [list(pair) for pair in zip(row["context"]["title"], row["context"]["sentences"], strict=True)],
        }
        for row in rows
    ]


FORMS: dict[str, Callable[[Iterable[dict[str, Any]]], Any]] = {
    "essays": essays_form,
    "squad": squad_form,
    "hotpotqa": hotpotqa_form,
}

# SPDX-License-Identifier: Apache-2.0
"""RULER's tasks for lm-evaluation-harness, drawn and scored by ``mala_hf.ruler``: as the original does, which its own port does not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import datasets
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.utils import resolve_max_length
from transformers import AutoConfig, AutoTokenizer

from ..ruler.prompts import Prompter, uses_chat_template
from ..ruler.scoring import sample_score
from ..ruler.sources import find_sources
from ..ruler.tasks import find_task

PREFIX = "mala_ruler_"
TOKENIZER_KEYS = ("tokenizer", "pretrained", "model")  # model arguments that may name it, the first wins
HUB_OPTIONS = (
    "revision",
    "trust_remote_code",
    "subfolder",
    "gguf_file",
)  # model arguments that say which files are meant
RULER_SAMPLES = 500
logger = logging.getLogger("lm_eval.mala_ruler")  # lm_eval shows what its own loggers say


class RulerTask(ConfigurableTask):
    """The task ``mala_ruler_NAME``, with the metric ``score``, in percent; of several lengths also one for each, named by the number.

    ``metadata`` holds lm_eval's model arguments and ``--metadata``: the tokenizer, and ``max_seq_lengths`` (default [4096]),
    ``num_samples`` (500), ``seed`` (42), ``corpora`` ("auto", as in ``find_sources``) and ``chat_template`` (false; true leaves room
    for the one that ``--apply_chat_template`` adds). Raises ``ValueError`` for settings that are none, and what drawing raises.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._name = config["task"].removeprefix(PREFIX)
        metadata = config.get("metadata") or {}
        self._lengths = read_lengths(metadata.get("max_seq_lengths", [4096]))
        self._documents, texts = draw_documents(self._name, self._lengths, metadata)
        frame = {
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "input",
            "doc_to_target": "outputs",
            "gen_prefix": "answer_prefix",
            "generation_kwargs": {
                "do_sample": False,
                "temperature": 0.0,
                "max_gen_toks": find_task(self._name).answer_tokens,
                "until": [],
            },
            "metric_list": [],  # those below
            "metadata": {"version": 1} | metadata | {"texts": texts},
        }
        super().__init__(config={key: value for key, value in config.items() if key != "class"} | frame)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Hand over what was drawn."""
        self.dataset = {"test": datasets.Dataset.from_list(self._documents)}

    def process_results(self, doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float | None]:
        """Score an answer, under ``score`` and, of several lengths, its own."""
        score = 100 * sample_score(self._name, results[0], doc["outputs"])
        return {"score": score} | {
            name: score if length == doc["max_length"] else None for name, length in self._length_metrics.items()
        }

    def aggregation(self) -> dict[str, Callable[[Any], float]]:
        """Means; that of ``score`` is lm_eval's, which has its standard error."""
        return {"score": mean} | dict.fromkeys(self._length_metrics, mean_of_present)

    def higher_is_better(self) -> dict[str, bool]:
        """All are."""
        return dict.fromkeys(self.aggregation(), True)

    @property
    def _length_metrics(self) -> dict[str, int]:
        return {str(length): length for length in self._lengths} if len(self._lengths) > 1 else {}


def read_lengths(value: Any) -> list[int]:
    """Return the lengths, in order; ``ValueError`` unless they are positive numbers, each once."""
    lengths = [value] if isinstance(value, int) else value
    if (
        not isinstance(lengths, (list, tuple))
        or not lengths
        or not all(type(length) is int and length > 0 for length in lengths)
        or len(set(lengths)) < len(lengths)
    ):
        raise ValueError(f"max_seq_lengths are numbers of tokens, each once, got {value!r}")
    return sorted(lengths)


def draw_documents(
    name: str, lengths: Sequence[int], metadata: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the documents of a task, all lengths one after another, and where their texts are from."""
    find_task(name)
    tokenizer = find_tokenizer(metadata)
    check_positions(max(lengths), metadata, tokenizer)
    chat = uses_chat_template(tokenizer, "on" if metadata.get("chat_template", False) else "off")
    sources = find_sources(metadata.get("corpora", "auto"), [name], logger.warning)
    prompter = Prompter(tokenizer, chat)
    documents = []
    for length in lengths:
        samples = prompter.samples(
            name,
            length=length,
            num_samples=metadata.get("num_samples", RULER_SAMPLES),
            seed=metadata.get("seed", 42),
            corpora=sources.corpora,
        )
        documents += [
            {
                "index": sample.index,
                "max_length": length,
                "input": sample.input,
                "answer_prefix": sample.answer_prefix,
                "outputs": list(sample.outputs),
            }
            for sample in samples
        ]
    return documents, sources.names()


def find_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """Load the tokenizer that the model's arguments name, or take the one that they hold; ``ValueError`` where there is none."""
    found = next((metadata[key] for key in TOKENIZER_KEYS if metadata.get(key)), None)
    if found is None:
        raise ValueError("RULER's samples are measured in tokens: --model_args or --metadata must name a tokenizer")
    return AutoTokenizer.from_pretrained(found, **hub_options(metadata)) if isinstance(found, str) else found


def check_positions(length: int, metadata: Mapping[str, Any], tokenizer: Any) -> None:
    """Raise ``ValueError`` for a length beyond the model that the arguments name: lm_eval would cut the prompts."""
    limit = metadata.get("max_length") or metadata.get("max_position_embeddings")
    model = metadata.get("pretrained")
    if not limit and isinstance(model, str):
        limit = resolve_max_length(AutoConfig.from_pretrained(model, **hub_options(metadata)), tokenizer)
    if limit and length > limit:
        raise ValueError(
            f"length {length} is more than the model's {limit} tokens; --model_args max_length=N sets others"
        )


def hub_options(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that say which of a model's files are meant."""
    return {key: metadata[key] for key in HUB_OPTIONS if key in metadata}


def mean_of_present(scores: Sequence[float | None]) -> float:
    """Mean of the documents of one length; of none (``--limit`` may leave none) it is not a number."""
    present = [score for score in scores if score is not None]
    return fmean(present) if present else float("nan")

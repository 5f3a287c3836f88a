# SPDX-License-Identifier: Apache-2.0
"""The 13 tasks of RULER: samples of any length for any tokenizer, and the score of what a model answers.

An independent implementation of RULER's published task definitions (NVIDIA/RULER, Apache-2.0; Hsieh et al., "RULER: What's the Real
Context Size of Your Long-Context Language Models?", COLM 2024, https://arxiv.org/abs/2404.06654). Templates, parameters, answer
budgets, the order of the random draws and the metrics are RULER's, so that equal arguments give equal samples.

    >>> from mala_hf import ruler
    >>> samples = ruler.generate("niah_single_1", tokenizer=tokenizer, length=4096, num_samples=2)
    >>> predictions = [" ".join(sample.outputs) for sample in samples]  # a model's answers to sample.prompt, in its place
    >>> ruler.score("niah_single_1", predictions, [sample.outputs for sample in samples])  # percent
    100.0

An answer may have ``ruler.TASKS[sample.task].answer_tokens`` tokens.

Words and sentences come from the extra ``eval``; essays, SQuAD and HotpotQA from files of yours (``Corpora``), or as ``find_sources``
finds them. ``mala_hf.ruler.evaluation`` has a model answer the samples and keeps its answers: ``mala-hf ruler``.
"""

from .corpora import Corpora, punkt_sentences, split_at_punctuation
from .generation import Sample, generate
from .metrics import clean_prediction
from .scoring import score
from .sources import find_sources
from .tasks import TASKS, Task

__all__ = [
    "TASKS",
    "Corpora",
    "Sample",
    "Task",
    "clean_prediction",
    "find_sources",
    "generate",
    "punkt_sentences",
    "score",
    "split_at_punctuation",
]

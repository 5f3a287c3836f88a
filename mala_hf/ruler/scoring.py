# SPDX-License-Identifier: Apache-2.0
"""The score of a task, or of one of its samples: predictions cleaned and compared with their references."""

from __future__ import annotations

from collections.abc import Sequence

from .metrics import clean_prediction, mean_percent
from .tasks import find_task


def score(task: str, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the score of a task in percent, rounded to two decimals as RULER does: one prediction and its references per sample.

    qa_1 and qa_2 count predictions that contain any reference; the others average the share of references that are contained.
    Raises ``ValueError`` for an unknown task, no samples, unequally many predictions and references, or a sample without references.
    """
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} samples")
    if not predictions:
        raise ValueError("nothing to score: no predictions")
    if isinstance(references[0], str) or not all(references):
        raise ValueError("each sample needs a list of at least one reference")
    pairs = zip(predictions, references, strict=True)
    return mean_percent([sample_score(task, prediction, some) for prediction, some in pairs])


def sample_score(task: str, prediction: str, references: Sequence[str]) -> float:
    """Return the score of one sample, from 0 to 1 and not rounded: its task's mean is ``score``. ``ValueError`` for an unknown task."""
    return find_task(task).metric(clean_prediction(prediction), references)

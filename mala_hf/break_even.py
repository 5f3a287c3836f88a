# SPDX-License-Identifier: Apache-2.0
"""Where the time of attention would go, estimated from counted multiply-adds.

Score discovery is counted in full, ``head_dim`` for each visible key slot; post-score work is ``v_head_dim`` for each retained one.
Softmax, memory traffic and launches are not counted, so this is no measurement.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class BreakEven:
    """An estimate; all numbers are ratios.

    Attributes:
        post_score_share_of_full: of full attention's operations, those after the scores: the most that MALA could save.
        post_score_share: the same of MALA's operations.
        operations_fraction: MALA's operations / full attention's.
        overhead: how much more time an operation of MALA's kernel may take than one of the full-attention kernel until nothing
            is gained; 1 / ``operations_fraction``.
    """

    post_score_share_of_full: float
    post_score_share: float
    operations_fraction: float
    overhead: float

    def to_dict(self) -> dict[str, float]:
        """Plain numbers, fit for JSON."""
        return asdict(self)


def break_even(retained_slots: float, visible_slots: float, head_dim: int, v_head_dim: int) -> BreakEven:
    """Estimate from key slots (per query or of all, as long as both are the same); ``ValueError`` unless 0 < retained <= visible."""
    if not 0 < retained_slots <= visible_slots:
        raise ValueError(f"retained slots must be above 0 and at most {visible_slots}, got {retained_slots}")
    discovery, post_score = visible_slots * head_dim, retained_slots * v_head_dim
    full = visible_slots * (head_dim + v_head_dim)
    done = discovery + post_score
    return BreakEven(v_head_dim / (head_dim + v_head_dim), post_score / done, done / full, full / done)

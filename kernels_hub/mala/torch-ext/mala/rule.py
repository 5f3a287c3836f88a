# SPDX-License-Identifier: Apache-2.0
"""The rule as Triton functions, used by every kernel.

Limits and what is compared with them are in log2 units: natural logs times log2(e). Only ``online_softmax_step`` scales scores itself.
"""

import os

import triton
import triton.language as tl

# A tile at its limit is retained, and rounding must not undo that: with equal scores every tile of the backward is at its limit.
# The forward's slack is the larger, so that the backward's support stays inside the forward's.
FORWARD_SLACK = tl.constexpr(2.0**-18)
BACKWARD_SLACK = tl.constexpr(2.0**-20)
# a row maximum in log2 units: rounding a smaller one moves log2(p) by less than 2**4, and from there on different scores lie more than
# that apart
HUGE = tl.constexpr(2.0**28)


@triton.jit
def log2_threshold(visible_keys, tau):
    """log2(tau / L_q), capped at 0; -inf for tau = 0, which skips nothing."""
    return tl.log2(tl.minimum(tau / tl.maximum(visible_keys, 1).to(tl.float32), 1.0))


@triton.jit
def reaches_limit(tile_max, limit_log2):
    """Rows that constrain and reach their limit; a tile_max of -inf (no legal key) does not constrain, one of NaN does."""
    return (tile_max != float("-inf")) & ~(tile_max < limit_log2)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter reduces by a function of one's own number by number

    @triton.jit
    def largest_of_rows(scores):
        """The largest of each row of (rows, keys); NaN where one is: tl.max would pass over it, and a tile be skipped unseen."""
        return tl.where(tl.max((scores != scores).to(tl.int32), 1) > 0, float("nan"), tl.max(scores, 1))
else:

    @triton.jit
    def largest_of_rows(scores):
        """The largest of each row of (rows, keys); NaN where one is: tl.max would pass over it, and a tile be skipped unseen."""
        return tl.reduce(scores, 1, _larger)


@triton.jit
def is_any(rows):
    """True if one of the rows is."""
    # as one row of a matrix: Triton 3.7 cannot compile the plain reduction for compute capability 10.0
    return tl.max(tl.max(rows.to(tl.int32)[None, :], 1), 0) > 0


@triton.jit
def is_tile_retained(tile_max, limit_log2):
    """True if some constraining row reaches its limit."""
    return is_any(reaches_limit(tile_max, limit_log2))


@triton.jit
def limit_of(normalizer_log2, threshold_log2, row_exists, SLACK: tl.constexpr):
    """A row's limit: log2(retained mass * tau / L_q), less what rounding may add; +inf for rows that do not exist."""
    limit = normalizer_log2 + threshold_log2 - SLACK * (1.0 + tl.abs(normalizer_log2))
    return tl.where(row_exists, limit, float("inf"))


@triton.jit
def _scaled(row_max, to_log2):
    """``row_max * to_log2`` and the scale; beside a huge row_max the scale is the power of two below, whose products are exact.

    A weight takes one fused operation, ``score * scale - row_max * scale``, in which only the row's product was rounded: by up to
    2**-24 of it, and from HUGE on p could overflow float16. Two different scores lie more than 2**4 apart there, so that with a scale
    up to twice too small the smaller one's weight stays below 2**-8.
    """
    power = tl.exp2(tl.floor(tl.log2(to_log2)))
    is_huge = tl.abs(row_max) * to_log2 >= HUGE
    # of two products, or the compiler would fuse the row's instead and multiply every score
    return tl.where(is_huge, row_max * power, row_max * to_log2), tl.where(is_huge, power, to_log2)


@triton.jit
def online_softmax_step(scores, to_log2, tile_max, row_max, row_sum, CAN_BE_EMPTY: tl.constexpr):
    """p (BLOCK_M, BLOCK_N), the decay of earlier sums, and the new row_max, row_sum.

    ``scores * to_log2`` is in log2 units, and so are maxima times ``to_log2``.
    """
    new_max = tl.maximum(row_max, tile_max)
    shift = new_max
    if CAN_BE_EMPTY:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    scaled, scale = _scaled(shift, to_log2)
    p = tl.exp2(scores * scale[:, None] - scaled[:, None])
    decay = tl.exp2((row_max - shift) * to_log2)
    return p, decay, new_max, row_sum * decay + tl.sum(p, 1)

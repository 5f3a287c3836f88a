# SPDX-License-Identifier: Apache-2.0
"""What is guaranteed, on thousands of small random and adversarial inputs.

Scores are drawn themselves (q = scores, k = identity, scale 1), so that any matrix of scores is an input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from helpers import RETAINED, SKIPPED, by_key
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mala_hf.ops import mala_attn_func, reference, reference_decode

THOROUGH = settings(
    max_examples=1500, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
QUICK = settings(THOROUGH, max_examples=250)
SLACK = 1e-9


@dataclass(frozen=True)
class Problem:
    """Scores (M, N) of one head, what is legal, and the numbers of the rule."""

    scores: Tensor
    v: Tensor
    legal: Tensor
    tau: float
    tile: tuple[int, int]
    sink: Tensor | None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.scores, torch.eye(self.scores.shape[1], dtype=torch.float64), self.v, self.legal

    @property
    def numbers(self) -> dict:
        return {"tau": self.tau, "softmax_scale": 1.0, "tile": self.tile, "sink": self.sink}

    def __repr__(self) -> str:
        m, n = self.scores.shape
        return f"Problem({m} x {n}, tau={self.tau}, tile={self.tile}, sink={self.sink}, legal={int(self.legal.sum())})"


def _scores(kind: str, m: int, n: int, tau: float, generator: torch.Generator) -> Tensor:
    gauss = torch.randn(m, n, generator=generator, dtype=torch.float64)
    if kind == "constant":
        return torch.zeros(m, n, dtype=torch.float64)
    if kind == "near the threshold":  # contributions of the visiting order close to tau / L of a first weight 1
        scores = math.log(min(max(tau, 1e-3) / n, 1.0)) + 0.02 * gauss
        scores[:, -1] = 0.0
        return scores
    if kind == "growing with distance":  # each earlier key outweighs what came before
        return torch.arange(n, 0, -1, dtype=torch.float64) * 0.7 + 0.1 * gauss
    if kind == "one key in the distance":
        scores = gauss
        scores[:, 0] += 12.0
        return scores
    if kind == "rows that disagree":
        return gauss + 9.0 * (torch.randint(2, (m, n), generator=generator))
    return {"flat": 0.1, "ordinary": 1.0, "peaked": 4.0, "one-hot": 60.0}[kind] * gauss


KINDS = (
    "flat", "ordinary", "peaked", "one-hot", "constant", "near the threshold", "growing with distance",
    "one key in the distance", "rows that disagree",
)  # fmt: skip


@st.composite
def problems(draw, max_rows: int = 9) -> Problem:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    m, n = draw(st.integers(1, max_rows)), draw(st.integers(1, 40))
    tau = draw(st.sampled_from([0.0, 0.1, 0.9, 1.0, 1.0, 1.0, 3.0, 30.0, 1e5]))
    legal = reference.legal_pairs(m, n, draw(st.sampled_from([(-1, 0), (-1, -1), (7, 0), (5, 2)])))
    holes = draw(st.sampled_from(["none", "random", "keys", "rows"]))
    if holes == "random":
        legal &= torch.rand(m, n, generator=generator) < 0.6
    elif holes == "keys":
        legal &= torch.rand(1, n, generator=generator) < 0.6
    elif holes == "rows":
        legal &= torch.rand(m, 1, generator=generator) < 0.6
    return Problem(
        scores=_scores(draw(st.sampled_from(KINDS)), m, n, tau, generator),
        v=torch.randn(n, 2, generator=generator, dtype=torch.float64),
        legal=legal,
        tau=tau,
        tile=(draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4, 8]))),
        sink=draw(st.sampled_from([None, torch.tensor(1.5).double(), torch.tensor(-math.inf).double()])),
    )


def _check_bounds(problem: Problem, result: reference.HeadResult) -> None:
    _, _, v, legal = problem.operands
    full_out, full_lse, p = reference.full_attention_head(*problem.operands, softmax_scale=1.0, sink=problem.sink)
    omitted = reference.omitted_mass_head(p, result.tiles, problem.tile)
    skipped_keys = (by_key(result.tiles == SKIPPED, problem.tile, legal) & legal).sum(1)
    visible = legal.sum(1)

    certified = result.certificate / (1 + result.certificate)
    x = (problem.tau / visible.clamp(min=1)).clamp(max=1.0) * skipped_keys
    assert (omitted <= certified + SLACK).all()
    assert (certified <= x / (1 + x) + SLACK).all()

    largest = v.norm(dim=1).expand_as(legal).masked_fill(~legal, 0.0).amax(1)
    assert ((full_out - result.out).norm(dim=1) <= 2 * omitted * largest + SLACK).all()
    assert (result.lse <= full_lse + SLACK).all()
    assert (result.certificate >= 0).all()

    for x in (result.out, result.certificate):
        assert x.isfinite().all()
    blind = visible == 0
    assert not result.out[blind].any()
    sink = -math.inf if problem.sink is None else float(problem.sink)
    assert (result.lse[blind] == sink).all()
    assert (result.lse[~blind] > -math.inf).all()


def _tiles_with_legal_pairs(problem: Problem) -> Tensor:
    """(M, k_tiles): does the row see a key of the tile?"""
    block_n = problem.tile[1]
    padded = torch.nn.functional.pad(problem.legal, (0, -problem.legal.shape[1] % block_n))
    return padded.unflatten(1, (-1, block_n)).any(2)


@THOROUGH
@given(problems())
def test_omitted_mass_and_output_error_stay_within_certificate_and_bound(problem):
    result = reference.forward_head(*problem.operands, **problem.numbers)
    _check_bounds(problem, result)
    for row, sees in enumerate(_tiles_with_legal_pairs(problem)):
        if sees.any():
            first_visited = int(sees.nonzero().max())
            assert result.tiles[row // problem.tile[0], first_visited] == RETAINED
    if problem.tau == 0:
        assert not (result.tiles == SKIPPED).any()


@THOROUGH
@given(problems(max_rows=3), st.integers(2, 6))
def test_the_bounds_hold_for_merged_splits(problem, num_splits):
    result = reference_decode.split_head(*problem.operands, num_splits=num_splits, **problem.numbers)
    _check_bounds(problem, result)


@THOROUGH
@given(problems(), st.sampled_from([0.3, 1.0, 4.0]))
def test_backward_support_is_nested_in_forward_and_shrinks_as_tau_grows(problem, factor):
    result = reference.forward_head(*problem.operands, **problem.numbers)
    zeros = torch.zeros_like(result.out)

    def backward_support(tau: float) -> Tensor:
        numbers = {**problem.numbers, "tau": tau}
        return reference.backward_head(*problem.operands, result.out, result.lse, zeros, **numbers)[-1]

    support = backward_support(problem.tau)
    assert not (support & (result.tiles != RETAINED)).any()
    other = backward_support(problem.tau * factor)
    wide, narrow = (support, other) if factor > 1 else (other, support)
    assert not (narrow & ~wide).any()


@QUICK
@given(problems())
def test_the_blockwise_form_decides_and_computes_the_same(problem):
    expected = reference.forward_head(*problem.operands, **problem.numbers)
    scores, k, v, legal = problem.operands
    out, lse, work = mala_attn_func(
        scores[None, :, None], k[None, :, None], v[None, :, None],
        tau=problem.tau, softmax_scale=1.0, tile=problem.tile, mask=legal[None, None],
        sinks=None if problem.sink is None else problem.sink[None], impl="blockwise", return_lse=True, return_work=True,
    )  # fmt: skip
    tiles, ties = work.tiles[0, 0], (expected.margin.abs() < 1e-9)
    if not ties.any():
        assert torch.equal(tiles, expected.tiles)
        torch.testing.assert_close(out[0, :, 0], expected.out)
        torch.testing.assert_close(lse[0, 0], expected.lse)
        torch.testing.assert_close(work.certificate[0, 0], expected.certificate)
        omitted = reference.omitted_mass_head(
            reference.full_attention_head(*problem.operands, softmax_scale=1.0, sink=problem.sink)[2],
            tiles,
            problem.tile,
        )
        assert (omitted <= work.omitted_mass_bound[0, 0] + SLACK).all()


@QUICK
@given(
    st.integers(0, 2**31),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from([(-1, 0), (-1, -1), (6, 3)]),
)
@pytest.mark.parametrize("decode", ["single", "two_pass"])
@pytest.mark.parametrize("impl", ["blockwise", "reference"])
def test_padding_never_changes_a_result(impl, decode, seed, rows, keys, left, right, window):
    """A sequence inside a longer tensor (padding holds NaN) gives, bit for bit, what it gives alone."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (3 * torch.randn(1, n, 1, 8, generator=generator).double() for n in (rows, keys, keys))

    def padded(x: Tensor, before: int, after: int) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, 0, before, after), value=math.nan)

    options = {
        "window": window,
        "tile": (4, 4),
        "impl": impl,
        "decode": decode,
        "return_lse": True,
        "return_work": True,
    }
    out, lse, work = mala_attn_func(q, k, v, **options)
    lengths = {"leftpad_k": left, "seqused_k": left + keys, "seqused_q": rows}
    long_out, long_lse, long_work = mala_attn_func(
        padded(q, 0, right), padded(k, left, right), padded(v, left, right),
        **options, **{name: torch.tensor([length]) for name, length in lengths.items()},
    )  # fmt: skip
    assert torch.equal(long_out[:, :rows], out)
    assert torch.equal(long_lse[..., :rows], lse)
    assert torch.equal(long_work.certificate[..., :rows], work.certificate)
    assert torch.equal(long_work.work_fraction, work.work_fraction)
    assert not long_out[:, rows:].any()

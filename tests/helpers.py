# SPDX-License-Identifier: Apache-2.0
"""How results are judged: float64 truth of the rule, a same-precision baseline, and retained maps up to stated ties.

Nothing here comes from the package but the reference's HeadResult, whose margin says how close each decision was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from calls import Call, Head, heads
from torch import Tensor

from mala_hf.ops import reference

NOT_VISIBLE, SKIPPED, RETAINED = 0, 1, 2
EPS_32 = torch.finfo(torch.float32).eps
# a score is a float32 sum of products: its error is a few roundings of |q| |k| softmax_scale
TIE_ROUNDINGS = 8
# what implementations lower a limit by, so that rounding undoes no nesting, in roundings of 1 + |normalizer|
SLACK_ROUNDINGS = 32
# what a result may lose beyond twice the baseline's error: roundings of its largest value, in the computing precision
FLOOR_ROUNDINGS = 16


def precision_of(dtype: torch.dtype) -> float:
    """The rounding of the computing precision: float64 for float64 inputs, else float32."""
    return torch.finfo(torch.float64).eps if dtype == torch.float64 else EPS_32


def numbers_of(call: Call) -> dict:
    """tau, softmax_scale, tile, softcap of a call, as the reference takes them."""
    options = call.options
    return {
        "tau": options["tau"],
        "softmax_scale": options.get("softmax_scale") or call.q.shape[-1] ** -0.5,
        "tile": options["tile"],
        "softcap": options["softcap"],
    }


def operands(call: Call, head: Head, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q (M, D), k (N, D), v (N, E) of one head in ``dtype``."""
    q, k, v = (x if call.is_packed else x[head.batch] for x in (call.q, call.k, call.v))
    return q[head.rows, head.head].to(dtype), k[head.keys, head.kv_head].to(dtype), v[head.keys, head.kv_head].to(dtype)


def of_head(x: Tensor, call: Call, head: Head, rows_dim_last: bool = False) -> Tensor:
    """A head's rows of ``out`` (.., rows, heads, E), or of ``lse`` and the like (.., heads, rows)."""
    x = x if call.is_packed else x[head.batch]
    return x[head.head, head.rows] if rows_dim_last else x[head.rows, head.head]


def sink_of(call: Call, head: Head) -> Tensor | None:
    sinks = call.options.get("sinks")
    return None if sinks is None else sinks[head.head].double()


def by_key(tiles: Tensor, tile: tuple[int, int], legal: Tensor) -> Tensor:
    """A tile map (q_tiles, k_tiles) as a map (M, N) of pairs."""
    return tiles.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[: legal.shape[0], : legal.shape[1]]


def scores_of(q: Tensor, k: Tensor, legal: Tensor, softmax_scale: float, softcap: float) -> Tensor:
    scores = (q * softmax_scale) @ k.T
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return scores.masked_fill(~legal, -math.inf)


@dataclass
class Attention:
    """Attention of one head over given tiles: out (M, E), lse (M,), certificate (M,) of the tiles left out.

    ``reach``: what the terms of out sum up to without signs, at most.
    """

    out: Tensor
    lse: Tensor
    certificate: Tensor
    reach: float


def attention_over(call: Call, head: Head, retained: Tensor, dtype: torch.dtype = torch.float64) -> Attention:
    """Plain softmax over the pairs of ``retained`` tiles; p and v meet in ``dtype``, softmax is in float32 at least."""
    numbers = numbers_of(call)
    q, k, v = operands(call, head, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scores = scores_of(q, k, head.legal, numbers["softmax_scale"], numbers["softcap"]).to(wide)  # (M, N)
    kept = by_key(retained, numbers["tile"], head.legal)
    lse = torch.logsumexp(scores.masked_fill(~kept, -math.inf), 1)
    sink = sink_of(call, head)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.to(wide).expand_as(lse))
    shift = torch.where(lse > -math.inf, lse, 0)
    p = torch.exp(scores - shift[:, None]) * kept
    certificate = torch.zeros_like(lse)
    block_n = numbers["tile"][1]
    for start in range(0, scores.shape[1], block_n):
        keys = slice(start, start + block_n)
        left_out = head.legal[:, keys] & ~kept[:, keys]
        tile_max = scores[:, keys].masked_fill(~left_out, -math.inf).amax(1)
        certificate += left_out.sum(1) * torch.exp(tile_max - shift)
    reach = p @ v.abs().to(wide)
    return Attention(p.to(dtype) @ v, lse, certificate, float(reach.max()) if reach.numel() else 0.0)


def score_size(call: Call, head: Head) -> float:
    """The largest |q| |k| softmax_scale of a head: roundings of scores are relative to it."""
    q, k, _ = operands(call, head, torch.float64)
    if not len(q) or not len(k):
        return 1.0
    return 1.0 + float(q.norm(dim=1).max() * k.norm(dim=1).max()) * numbers_of(call)["softmax_scale"]


def reference_head(call: Call, head: Head, dtype: torch.dtype = torch.float64) -> reference.HeadResult:
    """The reference's answer for one head."""
    sink = sink_of(call, head)
    return reference.forward_head(
        *operands(call, head, dtype), head.legal, sink=None if sink is None else sink.to(dtype), **numbers_of(call)
    )


def assert_same_tiles(got: Tensor, expected: reference.HeadResult, tie_nats: float, context: str) -> None:
    """Equal maps; a tile may differ only where it is a query tile's first to differ, and its decision was a tie.

    What follows a tie in visiting order (earlier keys) stands on another normalizer and is not compared.
    """
    wrong_visibility = (got == NOT_VISIBLE) != (expected.tiles.to(got.device) == NOT_VISIBLE)
    assert not wrong_visibility.any(), f"{context}: visible tiles differ at {wrong_visibility.nonzero().tolist()[:5]}"
    for q_tile, (mine, theirs) in enumerate(zip(got.tolist(), expected.tiles.tolist(), strict=True)):
        first = next((k_tile for k_tile in reversed(range(len(mine))) if mine[k_tile] != theirs[k_tile]), None)
        if first is not None:
            margin = abs(float(expected.margin[q_tile, first]))
            assert margin <= tie_nats, (
                f"{context}: query tile {q_tile}, key tile {first} is {mine[first]}, the reference says "
                f"{theirs[first]} by {margin:.3g} nats (a tie is {tie_nats:.3g})"
            )


def assert_near(
    name: str, got: Tensor, truth: Tensor, baseline: Tensor, floor: float = 1.0, reach: float | None = None
) -> None:
    """The error against float64 truth is at most twice that of PyTorch in the same precision, at worst and in all.

    ``floor`` is in units of FLOOR_ROUNDINGS roundings of the largest value, or of ``reach``, from which values may have cancelled.
    """
    assert got.isfinite().eq(truth.isfinite()).all(), f"{name}: not finite where it should be, or the reverse"
    finite, precision = truth.isfinite(), precision_of(got.dtype)
    got, truth, baseline = (x.double()[finite] for x in (got, truth, baseline))
    if not got.numel():
        return
    error, allowed = (got - truth).abs(), (baseline - truth).abs()
    floor = floor * FLOOR_ROUNDINGS * precision * (float(truth.abs().max()) if reach is None else reach)
    assert error.max() <= 2 * allowed.max() + floor, (
        f"{name}: worst error {error.max():.3g}, baseline's {allowed.max():.3g}"
    )
    root = math.sqrt(got.numel())
    assert error.norm() <= 2 * allowed.norm() + floor * root, (
        f"{name}: error {error.norm():.3g}, baseline's {allowed.norm():.3g}"
    )


def check_forward(call: Call, out: Tensor, lse: Tensor, work) -> int:
    """Everything a forward returns, against the rule. Returns the number of skipped tiles."""
    dtype = call.q.dtype
    outside_out, outside_lse = torch.ones_like(out[..., 0], dtype=torch.bool), torch.ones_like(lse, dtype=torch.bool)
    assert out.dtype == dtype
    skipped = 0
    for head in heads(call):
        context = f"{call.case.id}, sequence {head.sequence}, head {head.head}"
        size = score_size(call, head)
        q_tiles, k_tiles = (-(-n // block) for n, block in zip(head.legal.shape, call.options["tile"], strict=True))
        tiles = work.tiles[head.sequence, head.head]
        assert not tiles[q_tiles:].any(), f"{context}: tiles beyond the rows"
        assert not tiles[:, k_tiles:].any(), f"{context}: tiles beyond the keys"
        tiles = tiles[:q_tiles, :k_tiles]
        precision = precision_of(dtype)
        expected = reference_head(call, head)
        finite = expected.lse[expected.lse.isfinite()]
        slack = SLACK_ROUNDINGS * precision * (1.0 + float(finite.abs().max())) if finite.numel() else 0.0
        assert_same_tiles(tiles, expected, TIE_ROUNDINGS * precision * size + slack, context)
        truth = attention_over(call, head, tiles == RETAINED)
        same = attention_over(call, head, tiles == RETAINED, dtype)
        # the kernel's products add head_dim terms one after the other, the baseline's in blocks; all weights are off by what the
        # normalizer is
        off = 1.0 + float(truth.lse[truth.lse.isfinite()].abs().max()) if truth.lse.isfinite().any() else 1.0
        floor = {torch.float64: size + off, torch.float32: max(math.sqrt(call.q.shape[-1]), off)}.get(dtype, 1.0)
        assert_near(f"{context}: out", of_head(out, call, head), truth.out, same.out, floor, truth.reach)
        # scores stay in float32 whatever the inputs' dtype, and so must lse and certificate
        wide = same if dtype == torch.float64 else attention_over(call, head, tiles == RETAINED, torch.float32)
        got_lse, got_certificate = of_head(lse, call, head, True), of_head(work.certificate, call, head, True)
        assert_near(
            f"{context}: lse", got_lse, truth.lse, wide.lse, size, off
        )  # a sum of max and log, which may cancel
        finite = truth.lse.isfinite()
        assert_near(
            f"{context}: certificate", got_certificate[finite], truth.certificate[finite], wide.certificate[finite],
            size + off,
        )  # fmt: skip
        of_head(outside_out, call, head).fill_(False)
        of_head(outside_lse, call, head, True).fill_(False)
        skipped += int((tiles == SKIPPED).sum())
    check_rows_without_keys(call, out[outside_out], lse, outside_lse)
    return skipped


def check_rows_without_keys(call: Call, out: Tensor, lse: Tensor, outside: Tensor) -> None:
    """Rows that belong to no sequence, or see no key by alignment: zeros, and lse is -inf or the sink."""
    assert not out.any(), "rows that see no key are not zero"
    sinks = call.options.get("sinks")
    empty = lse.new_full(lse.shape[-2:-1], -math.inf) if sinks is None else sinks.to(lse.dtype)
    expected = empty[:, None].expand_as(lse)[outside]
    # the kernels turn a sink into log2 units and back
    torch.testing.assert_close(lse[outside], expected, rtol=4 * EPS_32, atol=0, msg="lse of rows that see no key")


def run_kernel(call: Call):
    """out, lse, work of the Triton forward."""
    return call.run("triton", return_lse=True, return_work=True)


def assert_same_bits(results, others) -> None:
    """Two (out, lse, work) that must not differ in any bit."""
    (out, lse, work), (other, other_lse, other_work) = results, others
    assert torch.equal(out, other)
    assert torch.equal(lse, other_lse)
    assert torch.equal(work.tiles, other_work.tiles)
    assert torch.equal(work.certificate, other_work.certificate)


def random_gradient(call: Call, seed: int = 7) -> Tensor:
    """do, shaped like the output."""
    shape = (*call.q.shape[:-1], call.v.shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(call.q)


def independent_tiles(q: Tensor, k: Tensor, legal: Tensor, tau: float, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Retained tiles of forward and backward, bool (q_tiles, k_tiles), in another form than the package's.

    Tile maxima and tile masses once for all pairs; then key tile by key tile, every query tile at a time.
    """
    block_m, block_n = tile
    scores = (q @ k.T * q.shape[1] ** -0.5).masked_fill(~legal, -math.inf)
    scores = torch.nn.functional.pad(scores, (0, -len(k) % block_n, 0, -len(q) % block_m), value=-math.inf)
    scores = scores.view(-1, block_m, scores.shape[1] // block_n, block_n)  # (Q, Bm, T, Bn)
    tile_max, tile_mass = scores.amax(-1), scores.logsumexp(-1)  # (Q, Bm, T)
    visible = scores.isfinite().sum((2, 3))
    threshold = torch.log((tau / visible.clamp(min=1)).clamp(max=1.0)).to(scores.dtype)
    normalizer = torch.full_like(threshold, -math.inf)
    forward = torch.zeros(tile_max.shape[0], tile_max.shape[2], dtype=torch.bool)
    for t in reversed(range(tile_max.shape[2])):
        legal_rows = tile_max[:, :, t] > -math.inf
        forward[:, t] = ((tile_max[:, :, t] >= normalizer + threshold) & legal_rows).any(1)
        joined = torch.logaddexp(normalizer, tile_mass[:, :, t])
        normalizer = torch.where(forward[:, t, None], joined, normalizer)
    backward = ((tile_max >= (normalizer + threshold)[..., None]) & (tile_max > -math.inf)).any(1)
    return forward, backward

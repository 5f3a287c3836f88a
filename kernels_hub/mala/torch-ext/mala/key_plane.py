# SPDX-License-Identifier: Apache-2.0
"""Keys in INT8 beside the cache, with a certified bound of what that loses: a decode that reads it learns which exact keys it needs.

A key k is kept as ``k_hat = scale * quantized``, scale = max |k| / 127, and a number ``residual`` for which, whatever the query,

    |q k - q k_hat|  <=  |q| residual                                 (2-norms)

residual is |k - k_hat|, and besides it what float32 may round away: in this file, and in both products of head_dim terms.

A row q of a decode is met with it as ``q_hat = unit * units``, whole numbers of 15 bits, unit = max |q| / 32258: two INT8 digits, so
that the product is one of INT8 numbers. No coordinate is off by more than half a unit, and none of k_hat is above 127 scale, so that

    |q k - q_hat k_hat|  <=  |q| residual + unit scale 127 head_dim / 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

LARGEST = 127.0
SMALLEST_KEY = 2.0**-100  # below it a key is kept as zero, and all of it is residual
# of the two float32 products, per term and for some terms more; of sums of squares and roots; of squares below float32's range
PRODUCT_ROUNDING, MORE_TERMS = 2.0**-22, 16
NORM_ROUNDING = 2.0**-14
LOST_SQUARES = 2.0**-62
SOFTCAP_ROUNDING = 2.0**-20  # of tanh, relative to the softcap
LARGEST_COVERED = 2.0**50  # of numbers in q and k: whatever is made of them is finite
# a row of q: two INT8 digits of each coordinate, DIGIT_BASE high + low
DIGIT_BASE = 254
LARGEST_UNITS = LARGEST * DIGIT_BASE
DIGITS_ERROR = 0.52 * LARGEST  # half a unit and its rounding, times the plane's largest number
SMALLEST_SCALE = 2.0**-120  # of a row's scores: float32 has all of its digits there


@dataclass(frozen=True)
class KeyPlane:
    """Keys 0 to keys - 1 of each KV head in INT8: 1/4 of what bfloat16 keys and values of that head_dim take, and 8 bytes a key.

    Attributes:
        quantized: int8 (batch, num_kv_heads, keys, head_dim), last dimension contiguous.
        scales: float32 (batch, num_kv_heads, keys), last dimension contiguous.
        residuals: like ``scales``; inf for a key of which the plane says nothing: it holds a NaN, an infinity, or a number above 2^50.
    """

    quantized: Tensor
    scales: Tensor
    residuals: Tensor

    @classmethod
    def empty(
        cls, batch: int, num_kv_heads: int, keys: int, head_dim: int, device: torch.device | str | None = None
    ) -> KeyPlane:
        """Room for so many keys, not yet written: see :func:`quantize_keys`."""
        numbers = (batch, num_kv_heads, keys)
        return cls(
            torch.empty(*numbers, head_dim, dtype=torch.int8, device=device),
            torch.empty(numbers, dtype=torch.float32, device=device),
            torch.empty(numbers, dtype=torch.float32, device=device),
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All there is."""
        return self.quantized, self.scales, self.residuals

    @property
    def nbytes(self) -> int:
        """Bytes of the keys that are covered, not of a larger buffer behind them."""
        return sum(x.nbytes for x in self.tensors)

    def first(self, keys: int) -> KeyPlane:
        """A view of the first ``keys`` keys."""
        return KeyPlane(*(x[:, :, :keys] for x in self.tensors))


def check_key_plane(
    plane: Any, batch: int, num_kv_heads: int, keys: Optional[int], head_dim: int, device: torch.device
) -> None:
    """``ValueError`` unless the plane is one of so many keys, one for one; keys None: of any number."""
    tensors = [getattr(plane, name, None) for name in ("quantized", "scales", "residuals")]
    if not all(isinstance(x, Tensor) for x in tensors):
        raise ValueError(f"key_plane must be a KeyPlane, got {type(plane).__name__}")
    numbers = (batch, num_kv_heads, plane.quantized.shape[2] if keys is None and plane.quantized.ndim == 4 else keys)
    expected = ((*numbers, head_dim), torch.int8), (numbers, torch.float32), (numbers, torch.float32)
    for name, x, (shape, dtype) in zip(
        ("quantized", "scales", "residuals"), (plane.quantized, plane.scales, plane.residuals), expected
    ):
        if tuple(x.shape) != shape or x.dtype != dtype or x.device != device:
            raise ValueError(
                f"key_plane.{name} must be {dtype} {shape} on {device}, got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
        if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"key_plane.{name}'s last dimension must be contiguous, got strides {x.stride()}")
    if plane.scales.stride() != plane.residuals.stride():
        raise ValueError("key_plane.scales and key_plane.residuals must have the same strides")


def quantized(k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """quantized (..., head_dim), scales (...), residuals (...) of k (..., head_dim): what the kernel computes, in PyTorch."""
    k = k.float()
    largest = k.abs().amax(-1)
    covered = largest <= LARGEST_COVERED  # not so for a NaN
    k = k.where(covered[..., None], 0)
    largest = largest.where(covered, 0)
    scales = largest * (1 / LARGEST)
    inverse = torch.where(largest > SMALLEST_KEY, torch.full_like(largest, LARGEST) / largest, 0)
    rounded = (k * inverse[..., None] + 0.5).floor()
    lost = (k - rounded * scales[..., None]).square().sum(-1).sqrt()
    residuals = residual_bound(lost, k.square().sum(-1).sqrt(), k.shape[-1])
    return rounded.to(torch.int8), scales, residuals.where(covered, float("inf"))


def residual_bound(lost: Any, norm: Any, head_dim: int) -> Any:
    """The residual of keys whose computed |k - k_hat| and |k| are these."""
    rounding = (head_dim + MORE_TERMS) * PRODUCT_ROUNDING
    return (lost + norm * rounding + head_dim**0.5 * LOST_SQUARES) * (1 + NORM_ROUNDING)


def score_bounds(q: Tensor, plane: tuple[Tensor, ...], softmax_scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Between which numbers each score (..., R, N) lies; (-inf, inf) of keys and rows that are not covered.

    q (..., R, D) in float32 or float64, which is computed in; plane: quantized (..., N, D), scales (..., N), residuals (..., N).
    """
    quantized, scales, residuals = (x.to(q.dtype) for x in plane)
    units, to_score, norm = row_units(q, softmax_scale)
    scores = units @ quantized.mT * scales[..., None, :]
    error = norm[..., None] * residuals[..., None, :] + (q.shape[-1] * DIGITS_ERROR) * scales[..., None, :]
    lower, upper = ((scores + sign * error) * to_score[..., None] for sign in (-1, 1))
    if softcap:
        lower, upper = (
            torch.where(x.isfinite(), softcap * (torch.tanh(x / softcap) + sign * SOFTCAP_ROUNDING), x)
            for x, sign in ((lower, -1), (upper, 1))
        )
    return lower, upper


def row_units(q: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q (..., D) in whole units; and (...) each: the score of one unit times 1, and at least |q| in units, inf where not covered."""
    largest = q.abs().amax(-1)
    largest = largest.where(largest <= LARGEST_COVERED, float("inf"))  # a NaN is not
    size = largest.clamp(min=SMALLEST_KEY)
    to_score = size * (1 / LARGEST_UNITS) * softmax_scale
    covered = (to_score >= SMALLEST_SCALE) & (to_score <= LARGEST_COVERED)
    units = q.where(covered[..., None], 0) * (LARGEST_UNITS / size)[..., None]
    norm = (units.square().sum(-1).sqrt() + 1) * (1 + NORM_ROUNDING)
    return (units + 0.5).floor(), to_score.where(covered, 1), norm.where(covered, float("inf"))

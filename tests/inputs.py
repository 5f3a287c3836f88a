# SPDX-License-Identifier: Apache-2.0
"""Inputs for the kernels: families on which the rule has something to decide, and cases that vary what surrounds it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

CAPTURED = Path(__file__).parent / "data" / "smollm2_layer19_kv1.safetensors"


@dataclass(frozen=True)
class Shape:
    """Sizes of one call on (batch, seqlen, heads, head_dim) tensors."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int


def _randn(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, generator=generator)


def _noise(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    s = shape
    return (
        _randn(generator, s.batch, s.seqlen_q, s.num_heads, s.head_dim),
        _randn(generator, s.batch, s.seqlen_k, s.num_kv_heads, s.head_dim),
        _randn(generator, s.batch, s.seqlen_k, s.num_kv_heads, s.v_head_dim),
    )


def _q_positions(shape: Shape) -> Tensor:
    """The key that each query row is aligned with; rows before the first key share it."""
    return (torch.arange(shape.seqlen_q) + shape.seqlen_k - shape.seqlen_q).clamp(min=0)


def _strength(shape: Shape, nats: float) -> float:
    """The length of q and k along a shared unit direction that makes a default-scaled score of ``nats``."""
    return math.sqrt(nats * math.sqrt(shape.head_dim))


def flat(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian: almost nothing can be skipped."""
    return _noise(shape, generator)


def peaked(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Topics of 24 tokens that come back: a query scores 14 nats on keys of its topic, little elsewhere."""
    q, k, v = _noise(shape, generator)
    num_topics = 4
    topics, _ = torch.linalg.qr(_randn(generator, shape.head_dim, num_topics))  # orthonormal columns
    order = torch.randint(num_topics, (math.ceil(max(shape.seqlen_k, 1) / 24) + 1,), generator=generator)
    topic_of = order.repeat_interleave(24)
    direction = topics.T * _strength(shape, 14.0)
    q = 0.5 * q + direction[topic_of[_q_positions(shape)]][None, :, None]
    k = 0.5 * k + direction[topic_of[: shape.seqlen_k]][None, :, None]
    return q, k, v


def sink_heavy(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The first key, visited last, takes most mass: forward keeps nearly everything, backward little."""
    q, k, v = _noise(shape, generator)
    direction = torch.zeros(shape.head_dim)
    direction[0] = _strength(shape, 12.0)
    q = 0.5 * q + direction
    k = 0.5 * k
    k[:, 0] += direction
    return q, k, v


def needle(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The local neighbourhood is strong, and one key far back matters to every later row."""
    q, k, v = _noise(shape, generator)
    there = torch.zeros(shape.head_dim)
    there[-1] = 1.0
    angle = torch.arange(shape.seqlen_k)[:, None] * torch.tensor([0.3, 0.07, 0.017, 0.004])  # as RoPE: near keys agree
    local = torch.zeros(shape.seqlen_k, shape.head_dim)
    local[:, :8] = torch.cat([angle.cos(), angle.sin()], 1) / 2
    strength = _strength(shape, 10.0)
    q = 0.2 * q + strength * (local[_q_positions(shape)] if shape.seqlen_k else 0)[None, :, None] + strength * there
    k = 0.2 * k + strength * local[None, :, None]
    k[:, shape.seqlen_k // 8] += strength * there
    return q, k, v


def captured(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Real post-RoPE activations (tests/data/README.md), at most 2048 rows of head_dim up to 64."""
    data = {name: x.float() for name, x in load_file(CAPTURED).items()}  # (heads, 2048, 64)

    def take(name: str, rows: Tensor, heads: int, dim: int) -> Tensor:
        source = data[name]
        per_head = [
            source[head % len(source)].roll(-64 * (head // len(source)), 0)[rows, :dim] for head in range(heads)
        ]
        return torch.stack(per_head, 1)

    keys, rows = torch.arange(shape.seqlen_k), _q_positions(shape)
    q = torch.stack([take("q", rows + 97 * b, shape.num_heads, shape.head_dim) for b in range(shape.batch)])
    k = torch.stack([take("k", keys + 97 * b, shape.num_kv_heads, shape.head_dim) for b in range(shape.batch)])
    v = torch.stack([take("v", keys + 97 * b, shape.num_kv_heads, shape.v_head_dim) for b in range(shape.batch)])
    return q, k, v


def outlier_channels(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Peaked, with one key channel 40 times the others (as in many real models)."""
    q, k, v = peaked(shape, generator)
    k[..., -1] = 40.0 + k[..., -1]
    q[..., -1] += 1.0
    return q, k, v


def huge_norms(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of hundreds of nats: attention is one-hot, the exponentials underflow."""
    q, k, v = _noise(shape, generator)
    return 12 * q, 12 * k, v


def constant_keys(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Every key is the same, so every score of a row is: uniform attention, nothing may be skipped at tau = 1."""
    q, k, v = _noise(shape, generator)
    return q, k[:, :1].expand_as(k).contiguous(), v


def equal_scores(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """All scores are exactly zero."""
    q, k, v = _noise(shape, generator)
    return torch.zeros_like(q), k, v


def near_threshold(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """For rows that see all keys: the last 16 weigh 1 each, all others are within a few percent of the threshold."""
    q, k, v = _noise(shape, generator)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = math.sqrt(shape.head_dim)
    recent = 16
    groups = -(-shape.seqlen_k // recent)
    wobble = 0.05 * _randn(generator, shape.batch, groups, shape.num_kv_heads)
    k[..., 0] = math.log(recent / max(shape.seqlen_k, 1)) + wobble.repeat_interleave(recent, 1)[:, : shape.seqlen_k]
    k[:, -recent:, :, 0] = 0.0
    return q, k, v


Family = Callable[[Shape, torch.Generator], tuple[Tensor, Tensor, Tensor]]
FAMILIES: dict[str, Family] = {
    family.__name__: family
    for family in (
        peaked, flat, sink_heavy, needle, captured, outlier_channels, huge_norms, constant_keys, equal_scores,
        near_threshold,
    )
}  # fmt: skip
# scores beyond what float16 inputs hold, or ties that rounding decides
NOT_IN_16_BIT = ("huge_norms", "near_threshold")


@dataclass(frozen=True)
class Case:
    """One call. ``id`` names what differs from the default, so that a failing test says what it ran.

    layout: "fixed"; "padded" (left and right, by lengths); "cache" (keys longer than their content); "packed" (with
    empty sequences). mask: None, "keys", "full" or "per head". sinks: None, "learned" or "none" (-inf). strided: q, k
    and v are views with gaps.
    """

    family: str = "peaked"
    seqlen_q: int = 100
    seqlen_k: int = -1  # -1: seqlen_q
    batch: int = 1
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64
    v_head_dim: int = -1  # -1: head_dim
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: str | None = None
    mask: str | None = None
    layout: str = "fixed"
    strided: bool = False
    tau: float = 1.0
    tile: tuple[int, int] | None = (16, 16)
    softmax_scale: float | None = None

    @property
    def id(self) -> str:
        default = Case()
        words = [self.family]
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name == "family" or value == getattr(default, name):
                continue
            text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words.append(f"{name}={text}".replace(" ", "_"))
        return "-".join(words)

    @property
    def shape(self) -> Shape:
        return Shape(
            self.batch,
            self.seqlen_q,
            self.seqlen_q if self.seqlen_k < 0 else self.seqlen_k,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.head_dim if self.v_head_dim < 0 else self.v_head_dim,
        )

    def with_(self, **changes) -> Case:
        return replace(self, **changes)


# everything that surrounds the rule, each on an input where much is skipped
CASES = [
    Case(),
    Case(seqlen_q=1, seqlen_k=97),
    Case(seqlen_q=3, seqlen_k=131),
    Case(seqlen_q=37, seqlen_k=150),
    Case(seqlen_q=90, seqlen_k=41),
    Case(seqlen_q=63, seqlen_k=111, causal=False),
    Case(seqlen_q=1, seqlen_k=1),
    Case(seqlen_q=129, tile=(32, 16)),
    Case(seqlen_q=129, tile=(16, 32)),
    Case(num_heads=3, num_kv_heads=3),
    Case(num_heads=4, num_kv_heads=2),
    Case(num_heads=4, num_kv_heads=1, seqlen_q=50),
    Case(num_heads=5, num_kv_heads=1, seqlen_q=50),
    Case(num_heads=14, num_kv_heads=2, seqlen_q=34),
    Case(num_heads=8, num_kv_heads=1, seqlen_q=34),
    *(Case(head_dim=head_dim, seqlen_q=70) for head_dim in (32, 40, 72, 80, 96, 112, 128, 192, 256)),
    Case(head_dim=192, v_head_dim=128, seqlen_q=70),
    Case(head_dim=40, v_head_dim=72, seqlen_q=70),
    Case(window=(30, -1)),
    Case(window=(0, -1)),
    Case(window=(17, 5), causal=False),
    Case(window=(-1, 9), causal=False),
    Case(window=(20, -1), seqlen_q=20, seqlen_k=120),
    Case(softcap=20.0),
    Case(sinks="learned"),
    Case(sinks="none"),
    Case(sinks="learned", window=(40, -1), softcap=30.0, num_heads=4, num_kv_heads=2),
    Case(layout="padded", batch=3),
    Case(layout="padded", batch=3, causal=False, window=(20, 7)),
    Case(layout="cache", batch=3, seqlen_q=1, seqlen_k=140),
    Case(layout="cache", batch=2, seqlen_q=9, seqlen_k=140, num_heads=4, num_kv_heads=2),
    Case(layout="packed", batch=5),
    Case(layout="packed", batch=5, causal=False, sinks="learned"),
    Case(layout="packed", batch=4, seqlen_q=20, seqlen_k=110),
    Case(mask="keys", batch=2),
    Case(mask="full"),
    Case(mask="per head", batch=2, causal=False),
    Case(mask="full", window=(40, -1), sinks="learned"),
    Case(batch=3, num_heads=4, num_kv_heads=2, seqlen_q=40),
    Case(strided=True, batch=2, num_heads=4, num_kv_heads=2),
    Case(tau=0.0),
    Case(tau=0.1),
    Case(tau=10.0),
    Case(tau=1e6),
    Case(softmax_scale=0.3, head_dim=32),
]  # fmt: skip
FAMILY_CASES = [Case(family=name, seqlen_q=160, causal=name != "near_threshold") for name in FAMILIES]
EMPTY_CASES = [
    Case(seqlen_q=0, seqlen_k=20),
    Case(seqlen_q=20, seqlen_k=0, family="flat"),
    Case(batch=0, family="flat"),
    Case(layout="packed", batch=1, seqlen_q=0, seqlen_k=0, family="flat"),
]


def ids(cases: list[Case]) -> list[str]:
    return [case.id for case in cases]

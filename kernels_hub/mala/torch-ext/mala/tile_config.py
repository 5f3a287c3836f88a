# SPDX-License-Identifier: Apache-2.0
"""Tiles shipped for each (head_dim, dtype, query length): plain data, no tuning at run time.

BLOCK_M and BLOCK_N belong to the rule's definition (a tile is skipped only if every row agrees); num_warps and num_stages to speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

DECODE_ROWS = 16  # the smallest row count of a matrix product; queries this short get a tile of their own


@dataclass(frozen=True)
class TileConfig:
    """One launch shape: BLOCK_M query rows x BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def tile(self) -> tuple[int, int]:
        """(BLOCK_M, BLOCK_N)."""
        return self.block_m, self.block_n

    def with_tile(self, tile: tuple[int, int]) -> TileConfig:
        """The same launch shape for another tile."""
        return replace(self, block_m=tile[0], block_n=tile[1])


# padded head_dim (of q or v, the larger) -> launch shape
PREFILL_16BIT = {
    32: TileConfig(64, 128, 4, 3),
    64: TileConfig(64, 128, 4, 3),
    128: TileConfig(64, 128, 4, 2),
    256: TileConfig(64, 64, 4, 2),
}
PREFILL_32BIT = {
    32: TileConfig(64, 64, 4, 2),
    64: TileConfig(64, 64, 4, 2),
    128: TileConfig(64, 32, 8, 2),
    256: TileConfig(32, 32, 4, 1),
}
DECODE_16BIT = {
    32: TileConfig(DECODE_ROWS, 128, 4, 3),
    64: TileConfig(DECODE_ROWS, 128, 4, 3),
    128: TileConfig(DECODE_ROWS, 128, 4, 2),
    256: TileConfig(DECODE_ROWS, 64, 4, 2),
}
DECODE_32BIT = {dim: TileConfig(DECODE_ROWS, 32, 4, 2) for dim in (32, 64, 128, 256)}


@dataclass(frozen=True)
class Launch:
    """``step``: rows or keys of a tile that one program or one iteration takes; it divides the tile."""

    step: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class BackwardConfig:
    """Launch shapes of the backward's kernels. ``score`` takes ``rows_per_score`` rows of neighbouring query tiles at once."""

    rows_per_score: int
    score: Launch
    score_saved: Launch
    query: Launch
    key: Launch


BACKWARD_16BIT = {
    32: BackwardConfig(128, Launch(128, 8, 3), Launch(128, 4, 3), Launch(64, 4, 2), Launch(64, 4, 2)),
    64: BackwardConfig(128, Launch(128, 8, 3), Launch(128, 4, 3), Launch(64, 4, 2), Launch(64, 4, 2)),
    128: BackwardConfig(128, Launch(128, 8, 2), Launch(128, 4, 3), Launch(64, 4, 2), Launch(64, 4, 2)),
    256: BackwardConfig(128, Launch(64, 8, 2), Launch(64, 4, 2), Launch(32, 8, 1), Launch(32, 8, 1)),
}
# the matrix products of Ampere and Ada hold their operands in registers, and AMD's shared memory is 64 KiB
BACKWARD_16BIT_BEFORE_HOPPER = {
    32: BackwardConfig(128, Launch(128, 8, 3), Launch(128, 4, 3), Launch(64, 4, 2), Launch(64, 4, 2)),
    64: BackwardConfig(128, Launch(128, 8, 3), Launch(128, 4, 3), Launch(64, 4, 2), Launch(32, 4, 2)),
    128: BackwardConfig(128, Launch(128, 8, 2), Launch(128, 4, 2), Launch(64, 8, 2), Launch(64, 8, 2)),
    256: BackwardConfig(128, Launch(64, 8, 2), Launch(64, 4, 2), Launch(32, 8, 1), Launch(32, 8, 1)),
}
BACKWARD_32BIT = {
    32: BackwardConfig(64, Launch(64, 4, 2), Launch(64, 4, 2), Launch(32, 4, 1), Launch(32, 4, 1)),
    64: BackwardConfig(64, Launch(64, 4, 2), Launch(64, 4, 2), Launch(32, 4, 1), Launch(32, 4, 1)),
    128: BackwardConfig(64, Launch(32, 8, 2), Launch(32, 8, 1), Launch(32, 8, 1), Launch(32, 8, 1)),
    256: BackwardConfig(32, Launch(32, 4, 1), Launch(32, 4, 1), Launch(16, 8, 1), Launch(16, 8, 1)),
}


@dataclass(frozen=True)
class DecodeLaunch:
    """Keys of a decode tile, and how its keys are split: ``programs_per_sm`` programs, none with fewer than ``min_tiles`` tiles."""

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_tiles: int


MAX_DECODE_ROWS = 64  # of a tile: tokens x query heads of a KV head

DECODE_LAUNCH_16BIT = {
    32: DecodeLaunch(128, 4, 4, 4, 4),
    64: DecodeLaunch(128, 4, 4, 4, 4),
    128: DecodeLaunch(64, 4, 3, 4, 4),
    256: DecodeLaunch(64, 4, 2, 2, 4),
}
DECODE_LAUNCH_32BIT = {dim: DecodeLaunch(32, 4, 2, 2, 4) for dim in (32, 64, 128, 256)}


def decode_launch(head_dim: int, v_head_dim: int, dtype: torch.dtype) -> DecodeLaunch:
    """The shipped shape of a decode in two passes or in splits."""
    table = DECODE_LAUNCH_16BIT if dtype in (torch.float16, torch.bfloat16) else DECODE_LAUNCH_32BIT
    return table[max(padded_head_dim(head_dim), padded_head_dim(v_head_dim))]


@dataclass(frozen=True)
class DiscoveryConfig:
    """Launch shape of INT8 discovery: ``rows`` of neighbouring query tiles at once."""

    rows: int
    num_warps: int
    num_stages: int


DISCOVERY = DiscoveryConfig(128, 8, 3)


def backward_config(
    head_dim: int, v_head_dim: int, dtype: torch.dtype, tile: tuple[int, int], major: int
) -> BackwardConfig:
    """The shipped launch shapes, fitted to ``tile``, which the forward chose. ``major``: the GPU's compute capability."""
    table = BACKWARD_32BIT
    if dtype in (torch.float16, torch.bfloat16):
        table = BACKWARD_16BIT if major >= 9 else BACKWARD_16BIT_BEFORE_HOPPER
    config = table[max(padded_head_dim(head_dim), padded_head_dim(v_head_dim))]
    block_m, block_n = tile

    def fitted(launch: Launch) -> Launch:
        step = min(launch.step, block_n)
        assert block_n % step == 0, (
            "a step lies inside one tile of the forward, or its support would not hold the backward's"
        )
        return replace(launch, step=step)

    return replace(
        config,
        rows_per_score=max(config.rows_per_score, block_m),
        query=fitted(config.query),
        key=fitted(config.key),
    )


def padded_head_dim(head_dim: int) -> int:
    """The power of two, at least 32, that a kernel rounds head_dim up to."""
    return max(32, 1 << (head_dim - 1).bit_length())


def tile_config(head_dim: int, v_head_dim: int, dtype: torch.dtype, seqlen_q: int) -> TileConfig:
    """The shipped launch shape for these inputs; ``seqlen_q`` is the longest query sequence."""
    is_16bit = dtype in (torch.float16, torch.bfloat16)
    if seqlen_q <= DECODE_ROWS:
        table = DECODE_16BIT if is_16bit else DECODE_32BIT
    else:
        table = PREFILL_16BIT if is_16bit else PREFILL_32BIT
    return table[max(padded_head_dim(head_dim), padded_head_dim(v_head_dim))]

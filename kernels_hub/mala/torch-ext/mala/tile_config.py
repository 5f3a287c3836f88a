# SPDX-License-Identifier: Apache-2.0
"""Tiles shipped for each (head_dim, dtype, query length), and how each GPU runs them: plain data, no tuning at run time.

BLOCK_M and BLOCK_N belong to the rule's definition (a tile is skipped only if every row agrees), so they are the same on every GPU;
num_warps and num_stages belong to speed, and differ with the compute capability.
"""

from __future__ import annotations

import logging
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


# padded head_dim (of q or v, the larger) -> launch shape, measured on compute capability 9.0
PREFILL_16BIT = {
    32: TileConfig(64, 128, 4, 3),
    64: TileConfig(64, 128, 4, 3),
    128: TileConfig(64, 128, 4, 2),
    256: TileConfig(64, 64, 4, 2),
}
# (num_warps, num_stages) of the same tiles elsewhere: what shared memory and registers allow (``test_ahead_of_time.py``), not tuned
UNTUNED_PREFILL_16BIT = {
    (8, 0): {32: (4, 3), 64: (4, 3), 128: (8, 3), 256: (8, 3)},
    (8, 6): {32: (4, 3), 64: (8, 3), 128: (8, 2), 256: (8, 1)},
    (8, 9): {32: (4, 3), 64: (8, 3), 128: (8, 2), 256: (8, 1)},
    (10, 0): {32: (4, 3), 64: (4, 3), 128: (4, 2), 256: (4, 2)},
    (12, 0): {32: (4, 3), 64: (8, 3), 128: (8, 2), 256: (8, 1)},
}
MEASURED = (9, 0)
SHARED_BYTES = {  # that a program may take, by compute capability (CUDA programming guide)
    (8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024, (12, 0): 99 * 1024
}  # fmt: skip
SMALL_SHARED_BYTES, SMALL_SHARED_ROWS = (
    99 * 1024,
    32,
)  # where the backward of a head_dim above 128 has room for so many rows
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


REGISTERS = 65536  # of an NVIDIA multiprocessor
MAX_DECODE_ROWS = 64  # of a tile: tokens x query heads of a KV head

DECODE_LAUNCH_16BIT = {
    32: DecodeLaunch(128, 4, 4, 4, 4),
    64: DecodeLaunch(128, 4, 4, 4, 4),
    128: DecodeLaunch(64, 4, 3, 4, 4),
    256: DecodeLaunch(64, 4, 2, 2, 4),
}
DECODE_LAUNCH_32BIT = {dim: DecodeLaunch(32, 4, 2, 2, 4) for dim in (32, 64, 128, 256)}
# splits that retain every tile (tau = 0), same tiles: values are loaded ahead as keys are, so fewer stages. 128: of five shapes on an
# H200 the best at 8K, elsewhere at most 2.4 % behind, 1 % on average (results/decode_forms_h200.json). Others by the bytes of a stage
DENSE_DECODE_LAUNCH_16BIT = {
    32: DecodeLaunch(128, 4, 3, 4, 2),
    64: DecodeLaunch(128, 4, 2, 4, 2),
    128: DecodeLaunch(64, 4, 2, 4, 2),
    256: DecodeLaunch(64, 4, 2, 2, 2),
}


@dataclass(frozen=True)
class PlaneLaunch:
    """Keys of a step of the first pass over an INT8 plane, some tiles at once, and how it is split: as in ``DecodeLaunch``."""

    step: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_tiles: int
    # programs that have registers at once: of the next kernel, too, which starts before this one ends
    room_per_sm: int = 3

    @property
    def max_registers(self) -> int:
        """Of a thread, so that all of a multiprocessor's programs, and ``room_per_sm`` in all, run at once on an NVIDIA GPU."""
        programs = max(self.programs_per_sm, self.room_per_sm)
        return min(255, REGISTERS // (32 * self.num_warps * programs) // 8 * 8)


# padded head_dim -> launch shape. 128, on an H200: 2 programs are the fastest at batch 1 and as fast as 3 at batch 8
# (results/decode_splits_h200.json, decode_splits_listed_h200.json). Others by the compiled code: not measured
PLANE_LAUNCH = {
    32: PlaneLaunch(512, 4, 3, 3, 8),
    64: PlaneLaunch(512, 4, 3, 3, 8),
    128: PlaneLaunch(256, 4, 3, 2, 8),
    256: PlaneLaunch(128, 4, 3, 3, 8),
}


def plane_launch(head_dim: int, major: int) -> PlaneLaunch:
    """The shipped shape of the first pass over an INT8 plane, for an NVIDIA GPU's major compute capability; 0 elsewhere."""
    launch = PLANE_LAUNCH[padded_head_dim(head_dim)]
    return launch if major else replace(launch, step=launch.step // 2)  # AMD's shared memory is 64 KiB


def decode_launch(head_dim: int, v_head_dim: int, dtype: torch.dtype, is_dense: bool = False) -> DecodeLaunch:
    """The shipped shape of a decode in two passes or in splits; ``is_dense``: of splits that retain every tile, which are the same."""
    table = DECODE_LAUNCH_32BIT
    if dtype in (torch.float16, torch.bfloat16):
        table = DENSE_DECODE_LAUNCH_16BIT if is_dense else DECODE_LAUNCH_16BIT
    return table[max(padded_head_dim(head_dim), padded_head_dim(v_head_dim))]


@dataclass(frozen=True)
class DiscoveryConfig:
    """Launch shape of INT8 discovery: ``rows`` of neighbouring query tiles at once."""

    rows: int
    num_warps: int
    num_stages: int


DISCOVERY = DiscoveryConfig(128, 8, 3)


def backward_config(
    head_dim: int, v_head_dim: int, dtype: torch.dtype, tile: tuple[int, int], capability: tuple[int, int]
) -> BackwardConfig:
    """The shipped launch shapes, fitted to ``tile``, which the forward chose, for a GPU's compute capability; (0, 0) elsewhere."""
    table = BACKWARD_32BIT
    if dtype in (torch.float16, torch.bfloat16):
        table = BACKWARD_16BIT if capability >= (9, 0) else BACKWARD_16BIT_BEFORE_HOPPER
    dim = max(padded_head_dim(head_dim), padded_head_dim(v_head_dim))
    block_m, block_n = tile
    shared_bytes = SHARED_BYTES[listed_capability(capability)]
    if table is not BACKWARD_32BIT and dim > 128 and shared_bytes == SMALL_SHARED_BYTES and block_m > SMALL_SHARED_ROWS:
        raise ValueError(
            f"gradients of head_dim {max(head_dim, v_head_dim)} with tiles of {block_m} rows take more shared memory than this GPU's "
            f"{shared_bytes} bytes: pass tile=({SMALL_SHARED_ROWS}, 64)"
        )
    config = table[dim]

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


# each said once; no cached function: compilers trace this and warn of those
_nearest: dict[tuple[int, int], tuple[int, int]] = {}


def listed_capability(capability: tuple[int, int]) -> tuple[int, int]:
    """The compute capability whose entries run on a GPU: its own, else the nearest older one, said once; MEASURED for other vendors."""
    if capability == (0, 0) or capability in SHARED_BYTES:
        return MEASURED if capability == (0, 0) else capability
    if capability not in _nearest:
        nearest = max((one for one in SHARED_BYTES if one < capability), default=min(SHARED_BYTES))
        logging.getLogger(__name__).warning(
            "no launch shapes for compute capability %d.%d: those of %d.%d are used", *capability, *nearest
        )
        _nearest[capability] = nearest
    return _nearest[capability]


def tile_config(
    head_dim: int, v_head_dim: int, dtype: torch.dtype, seqlen_q: int, capability: tuple[int, int] = MEASURED
) -> TileConfig:
    """The shipped launch shape for these inputs on a GPU; ``seqlen_q`` is the longest query sequence. The tile is the same on each."""
    is_16bit = dtype in (torch.float16, torch.bfloat16)
    dim = max(padded_head_dim(head_dim), padded_head_dim(v_head_dim))
    if seqlen_q <= DECODE_ROWS:
        return (DECODE_16BIT if is_16bit else DECODE_32BIT)[dim]
    config = (PREFILL_16BIT if is_16bit else PREFILL_32BIT)[dim]
    listed = listed_capability(capability)
    if not is_16bit or listed == MEASURED:
        return config
    num_warps, num_stages = UNTUNED_PREFILL_16BIT[listed][dim]
    return replace(config, num_warps=num_warps, num_stages=num_stages)

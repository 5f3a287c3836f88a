# SPDX-License-Identifier: Apache-2.0
"""Every shipped launch shape compiles for the GPUs we name, within their shared memory and nearly without spilling."""

from __future__ import annotations

import pytest
import torch
from ahead_of_time import Finding, findings, may_not_wait
from launches import DECODE_FORMS, Launch

from mala_hf.ops.tile_config import (
    DECODE_16BIT,
    DECODE_32BIT,
    MEASURED,
    PREFILL_16BIT,
    PREFILL_32BIT,
    SHARED_BYTES,
    UNTUNED_PREFILL_16BIT,
    TileConfig,
    backward_config,
    tile_config,
)
from mala_hf.ops.tma import HAS_GLUON_FOR_HOPPER, TRITON_VERSION

# what a thread block may take, in bytes: by compute capability, and MI300's local data share
SHARED_LIMIT_BYTES = {"cuda:80": 163 * 1024, "cuda:90": 227 * 1024, "hip:gfx942": 64 * 1024}
ALL_LIMIT_BYTES = SHARED_LIMIT_BYTES | {f"cuda:{major}{minor}": limit for (major, minor), limit in SHARED_BYTES.items()}
# registers that a thread may keep in local memory; float32 products run without tensor cores and need more
SPILL_LIMIT_BYTES = {"bfloat16": 512, "float16": 512, "float32": 2048}
LARGEST_FLOAT32_SPILL_LIMIT_BYTES = 2560  # of head_dim 256 on 9.0, since row maxima keep NaN
# dk and dv take both accumulators; no launch shape of the backward is chosen on an MI300
HIP_BACKWARD_SPILL_LIMIT_BYTES = 1536
MASK_SPILL_LIMIT_BYTES = 2048  # a mask operand costs a tile of registers; padding and windows do without one

TABLES = {
    ("bfloat16", "prefill"): PREFILL_16BIT,
    ("bfloat16", "decode"): DECODE_16BIT,
    ("float32", "prefill"): PREFILL_32BIT,
    ("float32", "decode"): DECODE_32BIT,
}
SHIPPED = {
    (target, dtype): [
        Launch(target, head_dim, dtype, phase, use_tma=target == "cuda:90" and dtype != "float32")
        for (table_dtype, phase), table in TABLES.items()
        if table_dtype == dtype
        for head_dim in table
    ]
    for target in SHARED_LIMIT_BYTES
    for dtype in ("bfloat16", "float32")
}
HOPPER = [
    *(Launch("cuda:90", head_dim, use_hopper=True) for head_dim in PREFILL_16BIT),
    *(Launch("cuda:90", head_dim, use_hopper=True, features=True) for head_dim in (64, 128)),
    *(Launch("cuda:90", head_dim, use_hopper=True, taus=(0.0,)) for head_dim in (64, 128)),
    Launch("cuda:90", 64, use_hopper=True, taus=(0.0,), num_heads=16),  # enough for three query tiles a program
    Launch("cuda:90", 72, "float16", use_hopper=True),
    Launch("cuda:90", 192, v_head_dim=128, use_hopper=True),
    Launch("cuda:90", 128, v_head_dim=256, use_hopper=True),  # too wide for the registers of three warpgroups
]
VARIANTS = [
    Launch("cuda:80", 128, features=True),
    Launch("cuda:90", 128, features=True, use_tma=True),
    Launch("cuda:80", 128, features=True, phase="decode"),
    Launch("cuda:80", 128, mask=True),
    Launch("cuda:90", 64, mask=True, use_tma=True),
    Launch("cuda:90", 128),
    Launch("cuda:90", 128, phase="walk", use_tma=True),
    Launch("cuda:90", 128, phase="decode"),
    Launch("cuda:80", 72, "float16"),
    Launch("cuda:90", 192, v_head_dim=128, use_tma=True),
]


DISCOVERY = {
    **{
        target: [Launch(target, head_dim, phase=phase) for head_dim in (64, 128, 256) for phase in ("discover", "look")]
        for target in SHARED_LIMIT_BYTES
    },
    "cuda:90 hopper": [Launch("cuda:90", head_dim, phase="discover", use_hopper=True) for head_dim in (64, 128, 256)],
}
DECODE = {
    target: [
        Launch(target, head_dim, dtype, phase=phase, features=features)
        for head_dim, dtype, features in (
            (64, "bfloat16", True), (128, "bfloat16", False), (256, "bfloat16", False), (128, "float32", False)
        )
        for phase in DECODE_FORMS
    ] + [Launch(target, 128, phase="decode in splits", taus=(0.0,))]
    for target in SHARED_LIMIT_BYTES
}  # fmt: skip
# but for those of SHIPPED, BACKWARD and DISCOVERY
UNTUNED = [name for major, minor in UNTUNED_PREFILL_16BIT if (name := f"cuda:{major}{minor}") not in SHARED_LIMIT_BYTES]
# the backward's support, delta, dq, and dk with dv; discovery's keys, rows and pass; a decode's plane, passes and sum
NUM_KERNELS = {
    "backward": 4, "backward with support": 4, "discover": 3, "look": 2, "decode in two passes": 3,
    "decode in splits": 2, "decode in two passes from int8": 4,
}  # fmt: skip
# kernels of a decode that start while the one before still runs
CHAINED = ("score_tiles_kernel", "score_plane_kernel", "attend_retained_kernel", "combine_kernel")
# the backward's shapes, with every feature over a saved support and without any over the state alone
BACKWARD = {
    target: [
        *(
            Launch(target, head_dim, phase=phase, features=features, use_tma=target == "cuda:90" and not features)
            for head_dim in (64, 128, 256)
            for phase, features in (("backward", False), ("backward with support", True))
        ),
        *(Launch(target, head_dim, "float32", phase="backward") for head_dim in (64, 128, 256)),
        Launch(target, 128, phase="backward", mask=True),
    ]
    for target in SHARED_LIMIT_BYTES
}


needs_gluon = pytest.mark.skipif(not HAS_GLUON_FOR_HOPPER, reason="this Triton cannot compile the Hopper kernel")


def _complaints(launch: Launch, kernels: list[dict]) -> list[str]:
    complaints = []
    expected = NUM_KERNELS.get(launch.phase, 1)
    assert len(kernels) == expected, f"{launch.id}: {expected} kernels were expected"
    for found in (Finding(**kernel) for kernel in kernels):
        name = f"{launch.id} {found.kernel}"
        if found.shared_bytes > ALL_LIMIT_BYTES[launch.target]:
            complaints.append(f"{name} takes {found.shared_bytes} bytes of shared memory")
        if found.is_serialised:
            complaints.append(f"{name}: its matrix products wait for one another")
        if found.open_barriers:
            complaints.append(f"{name} leaves {found.open_barriers} barriers open")
        if "decode in" in launch.phase and launch.target == "cuda:90" and found.kernel in CHAINED and not found.waits:
            complaints.append(f"{name} starts while the kernel before runs, and does not wait for it")
        if found.may_not_wait:
            complaints.append(f"{name} may end without waiting for the kernel before")
        limit = MASK_SPILL_LIMIT_BYTES if launch.mask else SPILL_LIMIT_BYTES[launch.dtype]
        if (launch.target, launch.dtype, launch.head_dim) == ("cuda:90", "float32", 256):
            limit = LARGEST_FLOAT32_SPILL_LIMIT_BYTES
        if launch.target.startswith("hip") and launch.phase.startswith("backward"):
            limit = max(limit, HIP_BACKWARD_SPILL_LIMIT_BYTES)
        if found.spilled_bytes is None or found.spilled_bytes > limit:
            complaints.append(f"{name} spills {found.spilled_bytes} bytes a thread")
        if found.registers is None or found.registers * found.num_warps * 32 > 64 * 1024:
            complaints.append(f"{name} needs {found.registers} registers in each of {found.num_warps} warps")
    return complaints


def _assert_all_fit(launches: list[Launch]) -> None:
    results = findings(launches)
    complaints = [
        text for launch, kernels in zip(launches, results, strict=True) for text in _complaints(launch, kernels)
    ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(("target", "dtype"), SHIPPED, ids=str)
def test_every_shipped_launch_shape_compiles_and_fits(target, dtype):
    _assert_all_fit(SHIPPED[target, dtype])


@pytest.mark.parametrize("target", UNTUNED)
def test_the_untuned_launch_shapes_of_other_gpus_compile_and_fit(target):
    if target == "cuda:100" and TRITON_VERSION < (3, 6):
        pytest.skip("untried")
    has_descriptors = int(target.partition(":")[2]) >= 90
    launches = [Launch(target, head_dim, use_tma=has_descriptors) for head_dim in (64, 128, 256)]
    launches += [Launch(target, 128, phase="backward"), Launch(target, 128, phase="discover")]
    _assert_all_fit(launches)


def test_every_gpu_has_the_measured_tiles_and_an_unlisted_one_the_nearest_older_ones(caplog, monkeypatch):
    for capability in SHARED_BYTES:
        for head_dim in PREFILL_16BIT:
            assert tile_config(head_dim, head_dim, torch.bfloat16, 512, capability).tile == PREFILL_16BIT[head_dim].tile
    assert set(UNTUNED_PREFILL_16BIT) == set(SHARED_BYTES) - {MEASURED}
    assert not caplog.records
    monkeypatch.setattr("mala_hf.ops.tile_config._nearest", {})
    assert tile_config(128, 128, torch.bfloat16, 512, (12, 1)) == tile_config(128, 128, torch.bfloat16, 512, (12, 0))
    assert tile_config(64, 64, torch.bfloat16, 512, (12, 1)) == tile_config(64, 64, torch.bfloat16, 512, (12, 0))
    assert [record.getMessage() for record in caplog.records] == [
        "no launch shapes for compute capability 12.1: those of 12.0 are used"
    ]
    assert tile_config(64, 64, torch.bfloat16, 512, (0, 0)) == PREFILL_16BIT[64]  # another vendor's


@pytest.mark.parametrize("target", ["cuda:89", "cuda:120"])
def test_gradients_of_large_heads_ask_for_smaller_tiles_where_shared_memory_is_small(target):
    capability = divmod(int(target.partition(":")[2]), 10)
    with pytest.raises(ValueError, match=r"head_dim 256 with tiles of 64 rows .* pass tile=\(32, 64\)"):
        backward_config(256, 256, torch.bfloat16, (64, 64), capability)
    _assert_all_fit([Launch(target, 256, phase=phase, tile=(32, 64)) for phase in ("prefill", "backward")])


@pytest.mark.parametrize("target", BACKWARD)
def test_the_backward_compiles_and_fits(target):
    _assert_all_fit(BACKWARD[target])


@pytest.mark.parametrize("target", DECODE)
def test_decode_compiles_and_fits(target):
    _assert_all_fit(DECODE[target])


@pytest.mark.parametrize(
    "target", [pytest.param(target, marks=[pytest.mark.triton] * ("hopper" in target)) for target in DISCOVERY]
)
def test_discovery_compiles_and_fits(target):
    launches = DISCOVERY[target]
    if launches[0].use_hopper and not HAS_GLUON_FOR_HOPPER:
        pytest.skip("this Triton cannot compile the Hopper kernel")
    _assert_all_fit(launches)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ["mov.u32 %r1, %ctaid.x;", "griddepcontrol.wait;", "@%p1 bra $L__BB0_2;", "$L__BB0_2: // %done", "ret;"],
            False,
        ),
        (["@%p1 bra $L__BB0_2;", "griddepcontrol.wait;", "$L__BB0_2: // %done", "ret;"], True),
        (["@%p1 ret;", "griddepcontrol.wait;", "ret;"], True),
        # both ways of a branch lead to the wait, and nothing falls through an unconditional one
        (
            ["@!%p1 bra $L__BB0_1;", "bra.uni $L__BB0_2;", "$L__BB0_1:", "$L__BB0_2:", "griddepcontrol.wait;", "ret;"],
            False,
        ),
        (["ret;"], False),
    ],
)
def test_a_way_around_the_wait_for_the_kernel_before_is_found(lines, expected):
    assert may_not_wait("\n".join([".visible .entry kernel()", "{", *lines, "}"])) == expected


@pytest.mark.triton
@needs_gluon
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "block_n", "can_skip", "programs", "expected"),
    [
        (64, 64, 128, True, 1, 3),
        (128, 128, 128, True, 1, 3),
        (192, 128, 64, True, 1, 3),
        (64, 64, 128, False, 32, 3),
        (64, 64, 128, False, 31, 2),  # too few for eight multiprocessors
        (128, 128, 128, False, 32, 2),  # registers: weights wait in them
        (64, 128, 64, False, 32, 2),  # not measured
        (192, 64, 64, False, 32, 2),
        (256, 256, 64, True, 32, 2),  # shared memory
        (128, 256, 64, True, 32, 2),  # registers
        (64, 64, 256, True, 32, 2),
    ],
)
def test_hoppers_forward_takes_three_query_tiles_at_once_where_they_fit_and_fill_the_gpu(
    head_dim, v_head_dim, block_n, can_skip, programs, expected
):
    from mala_hf.ops.forward_hopper_launch import query_tiles_per_program

    q, v = (torch.empty(1, 192, programs, dim, dtype=torch.bfloat16) for dim in (head_dim, v_head_dim))
    assert query_tiles_per_program(q, v, TileConfig(64, block_n, 4, 2), can_skip) == expected


@pytest.mark.triton
@needs_gluon
def test_discovery_in_tiles_of_256_keys_which_hoppers_pass_does_not_compile_takes_the_portable_one():
    from mala_hf.ops.discover_hopper import supports

    q = torch.empty(1, 64, 1, 64, dtype=torch.bfloat16)
    assert [keys for keys in (32, 64, 128, 256) if supports(q, (64, keys))] == [32, 64, 128]
    _assert_all_fit([Launch("cuda:90", 64, phase="discover", tile=(64, 256))])


@pytest.mark.parametrize(
    "launches",
    [VARIANTS, pytest.param(HOPPER, marks=[needs_gluon, pytest.mark.triton])],
    ids=["portable", "hopper"],
)
def test_every_feature_compiles_and_fits(launches):
    _assert_all_fit(launches)


def test_a_growing_sequence_and_another_tau_compile_nothing_new():
    """Lengths, strides and tau are runtime values; only a stride that 8 does not divide asks for another kernel."""
    lengths = (1, 2, 15, 16, 17, 64, 100, 127, 128, 255, 256, 1000, 4096, 70000)
    launches = [
        Launch(
            "cuda:90", 128, phase=phase, features=features, use_hopper=hopper, seqlens_k=lengths, taus=(0.0, 0.5, 3.0)
        )
        for phase, hopper in (("prefill", False), ("prefill", True), ("decode", False))
        if HAS_GLUON_FOR_HOPPER or not hopper
        for features in (False, True)
    ]
    backward = [
        Launch("cuda:90", 128, phase=phase, features=features, seqlens_k=lengths, taus=(0.0, 0.5, 3.0))
        for phase in ("backward", "backward with support")
        for features in (False, True)
    ]
    counts = [len(kernels) for kernels in findings(launches + backward, compile_kernels=False)]
    # on Hopper tau = 0 has a loop of its own where nothing is reported
    expected = [2 if launch.use_hopper and not launch.features else 1 for launch in launches]
    assert counts == expected + [NUM_KERNELS["backward"]] * len(backward)

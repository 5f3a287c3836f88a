# SPDX-License-Identifier: Apache-2.0
"""The Hopper forward over candidates: whatever is in them besides the retained tiles, the bits are those of a search through all."""

from __future__ import annotations

import importlib

import pytest
import torch
from calls import build
from inputs import Case, ids
from test_discovery import arguments_of
from test_triton_gpu import is_hopper

from mala_hf.ops.forward import launch_forward
from mala_hf.ops.support_bits import pack_support, unpack_support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_hopper(), reason="the Hopper kernel needs compute capability 9.0 and Triton 3.6"),
]
CASES = [
    Case(seqlen_q=700, tile=(64, 128), num_heads=4, num_kv_heads=2, head_dim=128, batch=2),
    Case(seqlen_q=900, tile=(64, 128), family="captured", num_heads=3),
    Case(seqlen_q=4500, tile=(64, 128), family="needle", num_heads=2, num_kv_heads=1, head_dim=128),
    Case(seqlen_q=200, seqlen_k=140_000, tile=(64, 128), num_heads=2, num_kv_heads=1, head_dim=128),  # over 32 words
    Case(seqlen_q=777, seqlen_k=333, tile=(64, 128)),
    Case(seqlen_q=100, seqlen_k=901, tile=(64, 128), causal=False),
    Case(seqlen_q=640, tile=(64, 128), window=(200, -1), softcap=20.0, sinks="learned", head_dim=96),
    Case(seqlen_q=333, seqlen_k=777, tile=(64, 64), head_dim=256),
]


@pytest.mark.parametrize("added", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_candidates_give_the_bits_of_all_tiles(case, added, device):
    arguments = arguments_of(build(case, torch.bfloat16, device))
    out, lse, _, _, support = launch_forward(*arguments, return_work=False, save_support=True)
    retained = unpack_support(support, arguments[4].tile_grid(arguments[3].tile)[1])
    generator = torch.Generator(device=device).manual_seed(0)
    more = torch.rand(retained.shape, generator=generator, device=device) < added
    assert added == 0 or (more & ~retained).any()
    candidates = pack_support(retained | more)
    for saves in (False, True):
        found = launch_forward(
            *arguments, return_work=False, save_support=saves, candidates=candidates, use_hopper=True
        )
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], lse)
        assert not saves or torch.equal(found[4], support)


FOUND = [
    CASES[0],
    CASES[2],
    CASES[4].with_(seqlen_q=1300, seqlen_k=1500, head_dim=128),
    Case(seqlen_q=2500, tile=(64, 128)),
]


class Constants:
    """A kernel that notes the constants of its launches."""

    def __init__(self, kernel, noted: list[dict]):
        self.kernel, self.noted = kernel, noted

    def __getitem__(self, grid):
        return lambda *args, **constants: self.noted.append(constants) or self.kernel[grid](*args, **constants)


@pytest.mark.parametrize("walks", [False, True])
@pytest.mark.parametrize("case", FOUND, ids=ids(FOUND))
def test_int8_discovery_gives_the_fused_bits_whichever_kernel_walks(case, walks, device, monkeypatch):
    call = build(case, torch.bfloat16, device)
    fused = call.run("triton", discovery="fused", return_lse=True)
    launched: dict[str, list[dict]] = {}
    for module, name in (("forward_hopper_launch", "mala_forward_hopper"), ("discover_hopper", "discover_hopper")):
        place, noted = importlib.import_module(f"mala_hf.ops.{module}"), launched.setdefault(name, [])
        monkeypatch.setattr(place, f"{name}_kernel", Constants(getattr(place, f"{name}_kernel"), noted))
    monkeypatch.setattr(importlib.import_module("mala_hf.ops.forward_hopper_launch"), "WALKS_CANDIDATES", walks)
    found = call.run("triton", discovery="int8", return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(found, fused, strict=True))
    assert [one["IS_WALK"] for one in launched["mala_forward_hopper"]] == [True] * walks
    assert len(launched["discover_hopper"]) == 1

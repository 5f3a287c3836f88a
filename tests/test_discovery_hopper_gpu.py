# SPDX-License-Identifier: Apache-2.0
"""INT8 discovery on Hopper: tiles that the portable kernel finds among candidates have the bits of Hopper's search through all."""

from __future__ import annotations

import sys

import pytest
import torch
from calls import build
from inputs import Case, ids
from project import ROOT
from test_discovery import arguments_of
from test_triton_gpu import is_hopper

sys.path.append(str(ROOT / "scripts"))

import run_every_kernel

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
        found = launch_forward(*arguments, return_work=False, save_support=saves, candidates=candidates)
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], lse)
        assert not saves or torch.equal(found[4], support)


FOUND = [
    CASES[0],
    CASES[2],
    CASES[4].with_(seqlen_q=1300, seqlen_k=1500, head_dim=128),
    Case(seqlen_q=2500, tile=(64, 128)),
]


@pytest.mark.parametrize("case", FOUND, ids=ids(FOUND))
def test_int8_discovery_gives_the_bits_of_hoppers_search(case, device):
    call = build(case, torch.bfloat16, device)
    with run_every_kernel.counted_launches() as searched:
        fused = call.run("triton", discovery="fused", return_lse=True)
    with run_every_kernel.counted_launches() as discovered:
        found = call.run("triton", discovery="int8", return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(found, fused, strict=True))
    assert searched == {"mala_forward_hopper_kernel": 1}
    assert discovered["discover_hopper_kernel"] == discovered["mala_forward_kernel"] == 1
    assert "mala_forward_hopper_kernel" not in discovered

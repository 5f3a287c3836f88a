# SPDX-License-Identifier: Apache-2.0
"""What a GPU in use does to kernels: the same bits a thousand times, on dirty memory, odd addresses, many streams, in graphs."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from backward_calls import gradient_of, run_backward, run_forward, with_tile
from calls import NAN, Call, build
from decode_truth import DECODE, assert_decode
from gradients import check_backward
from helpers import check_forward
from inputs import Case, ids
from project import ROOT
from torch import Tensor

sys.path.append(str(ROOT / "scripts"))

from run_every_kernel import CALLS, Inputs

from mala_hf.ops import mala_attn_func, mala_attn_with_kvcache_func

pytestmark = pytest.mark.gpu

RUNS = 1000
FORMS = ("two_pass", "split")
DTYPE = torch.bfloat16


def results(name: str, device: str = "cuda", seed: int = 0, dtype: torch.dtype = DTYPE) -> list[Tensor]:
    """Outputs and gradients of one of the driver's calls."""
    return CALLS[name](Inputs(device, dtype, seed))


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def long_calls(device: str) -> dict:
    """Calls that fill the GPU: {name: function that returns tensors}."""
    training = build(Case(seqlen_q=4096, num_heads=8, num_kv_heads=2, head_dim=128, tile=None), DTYPE, device)
    forward, do = run_forward(training), gradient_of(training)
    step = build(Case(seqlen_q=1, seqlen_k=60000, num_heads=8, num_kv_heads=2, head_dim=128, tile=None), DTYPE, device)
    return {
        "forward": lambda: training.run("triton", return_lse=True),
        "backward": lambda: list(run_backward(training, forward, do).named().values()),
        "backward over its support": lambda: list(run_backward(training, forward, do, forward.support).named().values()),
        "decode, two passes": lambda: step.run("triton", decode="two_pass", return_lse=True),
        "decode, split": lambda: step.run("triton", decode="split", return_lse=True),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["forward", "backward", "backward over its support", "decode, two passes", "decode, split"]
)
def test_a_thousand_runs_give_the_same_bits(name, device, record_property):
    run = long_calls(device)[name]
    first = run()
    differ = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(RUNS - 1):
        differ += torch.stack([(one != other).any() for one, other in zip(run(), first, strict=True)]).any()
    record_property("runs", RUNS)
    assert int(differ) == 0


@pytest.mark.parametrize("name", CALLS)
def test_every_call_repeats_bit_for_bit(name, record_property):
    first = results(name)
    for _ in range(49):
        assert_equal(results(name), first)
    record_property("runs", 50)


def fill_freed_memory(byte: int) -> None:
    """Every block that the allocator may hand out next holds this byte; 0xFF makes NaN and -1, 0x7F huge numbers."""
    torch.cuda.empty_cache()
    sizes = [2**n for n in range(9, 27)]
    blocks = [torch.empty(n, dtype=torch.uint8, device="cuda").fill_(byte) for n in sizes for _ in range(12)]
    torch.cuda.synchronize()
    del blocks


@pytest.mark.parametrize("name", CALLS)
def test_what_freed_memory_holds_reaches_no_result(name):
    expected = results(name)
    for byte in (0xFF, 0x7F, 0x00):
        fill_freed_memory(byte)
        assert_equal(results(name), expected)


def moved(x: Tensor, by: int) -> Tensor:
    """The same values ``by`` elements into a storage that holds NaN (or -1) before and after them."""
    fill = NAN if x.is_floating_point() else (True if x.dtype == torch.bool else -1)
    storage = torch.full((x.numel() + by + 7,), fill, dtype=x.dtype, device=x.device)
    return storage[by : by + x.numel()].view(x.shape).copy_(x)


def moved_call(call: Call, by: int) -> Call:
    options = {name: moved(x, by) if isinstance(x, Tensor) else x for name, x in call.options.items()}
    return call.with_(q=moved(call.q, by), k=moved(call.k, by), v=moved(call.v, by), **options)


ODD = [
    Case(seqlen_q=300, tile=None, num_heads=4, num_kv_heads=2),
    Case(seqlen_q=300, tile=None, head_dim=72, window=(90, -1), softcap=20.0, sinks="learned"),
    Case(seqlen_q=200, tile=None, mask="per head", batch=2),
    Case(seqlen_q=200, tile=None, layout="padded", batch=3),
    Case(seqlen_q=200, tile=None, layout="packed", batch=5),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("by", [1, 3, 8])
@pytest.mark.parametrize("case", ODD, ids=ids(ODD))
def test_tensors_at_odd_addresses_give_the_rules_values_and_gradients(case, by, dtype, device):
    call = moved_call(with_tile(build(case, dtype, device)), by)
    check_forward(call, *call.run("triton", return_lse=True, return_work=True))
    forward = run_forward(call, return_work=True)
    do = moved(gradient_of(call), by)
    check_backward(call, forward, do, run_backward(call, forward, do))


@pytest.mark.parametrize("by", [1, 3, 8])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["fixed", "cache"])
def test_caches_at_odd_addresses_give_the_forms_values(layout, form, by, device):
    call = moved_call(build(DECODE.with_(layout=layout, batch=3, sinks="learned"), torch.float16, device), by)
    assert_decode(call, form, *call.run("triton", decode=form, num_splits=3, return_lse=True, return_work=True))


def test_calls_on_many_streams_at_once_do_not_meet(device):
    """Eight streams, each with inputs of its own, launched by turns without waiting."""
    streams = [torch.cuda.Stream() for _ in range(8)]
    expected = {(name, seed): results(name, seed=seed) for name in CALLS for seed in range(len(streams))}
    torch.cuda.synchronize()
    found = {}
    for name in CALLS:
        for seed, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[name, seed] = results(name, seed=seed)
    torch.cuda.synchronize()
    for key, tensors in expected.items():
        assert_equal(found[key], tensors)


def test_calls_from_many_threads_do_not_meet(device):
    names = ["forward", "forward and backward over its support", "decode, two passes", "decode, split", "packed"]
    expected = {(name, seed): results(name, seed=seed) for name in names for seed in range(6)}
    found: dict = {}

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                for name in names:
                    found[name, seed] = results(name, seed=seed)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key, tensors in expected.items():
        assert_equal(found[key], tensors)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_a_gpu_that_is_not_the_current_one_are_computed_there(name):
    torch.cuda.set_device(0)
    expected = results(name, "cuda:0")
    found = results(name, "cuda:1")
    assert torch.cuda.current_device() == 0
    assert all(x.device.index == 1 for x in found)
    assert_equal([x.cpu() for x in found], [x.cpu() for x in expected])


def captured(run) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of ``run`` and the tensors that its replays fill."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        filled = run()
    return graph, filled


@pytest.mark.parametrize("save_support", [False, True])
def test_a_cuda_graph_of_forward_and_backward_gives_the_bits_of_plain_calls(save_support, device):
    static = [x.requires_grad_() for x in Inputs(device, DTYPE).qkv(500, 500)]

    def run() -> list[Tensor]:
        out = mala_attn_func(*static, causal=True, save_support=save_support)
        return [out, *torch.autograd.grad(out, static, torch.ones_like(out))]

    graph, filled = captured(run)
    for seed in (1, 2):
        with torch.no_grad():
            for x, new in zip(static, Inputs(device, DTYPE, seed).qkv(500, 500), strict=True):
                x.copy_(new)
        graph.replay()
        assert_equal([x.detach() for x in filled], [x.detach() for x in run()])


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_cuda_graph_of_a_step_follows_a_cache_that_grows(form, in_pages, device):
    """Lengths, pages, the new token and the cache are read when the graph is replayed."""
    make = Inputs(device, DTYPE)
    q, k, v = make.qkv(1, 1)
    shape = (12, 64, 2, 64) if in_pages else (2, 384, 2, 64)
    caches = [make.tensor(*shape) for _ in range(2)]
    lengths, table = make.ints(300, 100), make.ints(3, 1, 7, 2, 5, 0, 9, 4, 8, 6, 11, 10).view(2, 6)
    options = {"block_table": table} if in_pages else {}

    def run(caches=caches) -> list[Tensor]:
        return [mala_attn_with_kvcache_func(q, *caches, k, v, cache_seqlens=lengths, decode=form, **options)]

    graph, filled = captured(run)
    for step in range(1, 40):
        lengths += 1
        for x, new in zip((q, k, v), Inputs(device, DTYPE, step).qkv(1, 1), strict=True):
            x.copy_(new)
        if step == 20:
            table.copy_(table.flip(0))
        plain_caches = [x.clone() for x in caches]
        graph.replay()
        assert_equal(filled, run(plain_caches))
        assert_equal(caches, plain_caches)


NEAR_LIMIT = 2**31 + 2**20  # elements


@pytest.mark.parametrize("form", [*FORMS, "single"])
@pytest.mark.parametrize("in_pages", [False, True])
def test_a_cache_of_more_than_2_to_the_31_elements_is_read_to_its_end(in_pages, form, device):
    """Two KV heads of 64: the last 300 keys lie behind 2**31 elements, those before do not count."""
    rows, page = NEAR_LIMIT // 128 // 64 * 64, 64
    small = Inputs(device, DTYPE)
    q, k, v = small.qkv(2, 320, batch=1)
    caches = []
    for x in (k, v):
        cache = torch.zeros(1, rows, 2, 64, dtype=DTYPE, device=device)
        cache[:, -320:] = x
        caches.append(cache)
    how = {"decode": form, "num_splits": 0 if form == "single" else 3, "impl": "triton", "return_lse": True}
    if not in_pages:
        lengths, left = (torch.tensor([n], device=device) for n in (rows, rows - 320))
        found = mala_attn_with_kvcache_func(q, *caches, cache_seqlens=lengths, leftpad_k=left, **how)
    else:
        pages = [x.view(-1, page, 2, 64) for x in caches]
        table = torch.arange(len(pages[0]) - 5, len(pages[0]), device=device)[None]
        found = mala_attn_with_kvcache_func(
            q, *pages, cache_seqlens=torch.tensor([320], device=device), block_table=table, **how
        )
    expected = mala_attn_with_kvcache_func(q, k, v, cache_seqlens=torch.tensor([320], device=device), **how)
    assert_equal(found, expected)

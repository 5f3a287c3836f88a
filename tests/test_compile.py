# SPDX-License-Identifier: Apache-2.0
"""torch.compile takes a training step whole, lengths vary without a compilation each, and the bits are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import SMALL_TILE, padding, tiny, tokens
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mala_hf
from mala_hf.ops import mala_attn_func, mala_attn_varlen_func, mala_attn_with_kvcache_func

# a compiler traces through caches and says so once in a process
pytestmark = pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")

OPTIONS = {"causal": True, "tile": (16, 16), "impl": "blockwise"}


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    monkeypatch.setattr(torch._dynamo.utils, "warn_once_cache", set())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable, backend: str = "aot_eager", **options) -> tuple[Callable, CompileCounterWithBackend]:
    """The function compiled without graph breaks, and the counter of its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def leaves(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(2 * torch.randn(*shape, generator=generator)).requires_grad_() for shape in shapes]


def assert_same_step(function: Callable, other: Callable, tensors: list[Tensor], *arguments) -> None:
    """Outputs and gradients agree in every bit."""
    outputs = [f(*tensors, *arguments) for f in (function, other)]
    assert torch.equal(*outputs)
    assert outputs[0].requires_grad
    steps = [torch.autograd.grad(out.square().sum(), tensors) for out in outputs]
    for gradient, expected in zip(*steps, strict=True):
        assert torch.equal(gradient, expected)


def fixed(q, k, v, sinks):
    return mala_attn_func(q, k, v, sinks=sinks, softcap=20.0, window=(60, -1), **OPTIONS) * 2


def packed(q, k, v, cu_seqlens, longest):
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return mala_attn_varlen_func(q, k, v, **lengths, **OPTIONS)


def padded(q, k, v, leftpad_k, seqused):
    return mala_attn_func(q, k, v, leftpad_k=leftpad_k, seqused_k=seqused, seqused_q=seqused, **OPTIONS)


def masked(q, k, v, mask):
    return mala_attn_func(q, k, v, mask=mask, **OPTIONS)


def test_lengths_that_change_do_not_compile_again():
    step, counter = compiled(fixed)
    for seqlen in (64, 100, 77, 130, 201):
        tensors = leaves((2, seqlen, 4, 16), (2, seqlen, 2, 16), (2, seqlen, 2, 16), (4,))
        assert_same_step(step, fixed, tensors)
    assert counter.frame_count == 2  # one length, then any


def test_packed_batches_that_change_do_not_compile_again():
    step, counter = compiled(packed)
    for lengths in ([40, 24], [70, 1, 30], [5, 0, 60, 50], [33, 34, 35, 36, 37]):
        total = sum(lengths)
        cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        tensors = leaves((total, 4, 16), (total, 2, 16), (total, 2, 16))
        assert_same_step(step, packed, tensors, cu_seqlens, max(lengths))
    assert counter.frame_count <= 3


def test_padded_and_masked_calls_compile():
    tensors = leaves((2, 70, 4, 16), (2, 70, 2, 16), (2, 70, 2, 16))
    lengths = torch.tensor([0, 20]), torch.tensor([70, 61])
    assert_same_step(compiled(padded)[0], padded, tensors, *lengths)
    mask = torch.rand(2, 1, 70, 70, generator=torch.Generator().manual_seed(0)) < 0.7
    assert_same_step(compiled(masked)[0], masked, tensors, mask)


def test_a_compiled_call_reports_lse_and_work():
    def attend(q, k, v):
        out, lse, work = mala_attn_func(q, k, v, return_lse=True, return_work=True, **OPTIONS)
        return out, lse, work.tiles, work.certificate, work.key_slots_per_query, work.support_bytes

    tensors = leaves((1, 90, 2, 16), (1, 90, 2, 16), (1, 90, 2, 16))
    for got, expected in zip(compiled(attend)[0](*tensors), attend(*tensors), strict=True):
        assert torch.equal(got, expected) if isinstance(got, Tensor) else got == expected > 0


def test_a_subset_of_gradients_compiles():
    q, k, v, sinks = leaves((1, 50, 2, 16), (1, 50, 2, 16), (1, 50, 2, 16), (2,))
    k.requires_grad_(False)
    steps = [torch.autograd.grad(f(q, k, v, sinks).sum(), (q, v, sinks)) for f in (compiled(fixed)[0], fixed)]
    for gradient, expected in zip(*steps, strict=True):
        assert torch.equal(gradient, expected)


def test_what_depends_on_values_is_checked_in_eager_only():
    q, k, v = leaves((2, 40, 2, 16), (2, 40, 2, 16), (2, 40, 2, 16))
    too_long = torch.tensor([0, 0]), torch.tensor([40, 90])
    with pytest.raises(ValueError, match=r"seqused_q must be between 0 and 40"):
        padded(q, k, v, *too_long)
    assert compiled(padded)[0](q, k, v, *too_long).isfinite().all()
    q, k, v = (x.detach().flatten(0, 1) for x in (q, k, v))
    falling = torch.tensor([0, 50, 30], dtype=torch.int32)
    with pytest.raises(ValueError, match="never fall"):
        packed(q, k, v, falling, 50)


def test_packed_sequences_of_unknown_length_are_refused():
    q, k, v = (x.detach() for x in leaves((40, 2, 16), (40, 2, 16), (40, 2, 16)))
    cu_seqlens = torch.tensor([0, 25, 40], dtype=torch.int32)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="pass max_seqlen_q"):
        compiled(packed)[0](q, k, v, cu_seqlens, None)


def test_bad_shapes_are_refused_while_compiling():
    q, k, v = leaves((1, 40, 3, 16), (1, 40, 2, 16), (1, 40, 2, 16))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="must divide that of query heads"):
        compiled(masked)[0](q, k, v, None)


def test_the_forward_is_exported_with_dynamic_lengths():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return mala_attn_func(q, k, v, **OPTIONS)

    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    shapes = {name: {1: seqlen} for name in "qkv"}
    with torch.no_grad():
        example = [x.detach() for x in leaves((1, 40, 2, 16), (1, 40, 2, 16), (1, 40, 2, 16))]
        program = torch.export.export(Attention(), tuple(example), dynamic_shapes=shapes)
        other = [x.detach() for x in leaves((1, 75, 2, 16), (1, 75, 2, 16), (1, 75, 2, 16))]
        assert torch.equal(program.module()(*other), mala_attn_func(*other, **OPTIONS))
    assert "mala_hf.forward" in str(program.graph)


@pytest.mark.slow
def test_inductor_gives_the_gradients_of_eager():
    step, counter = compiled(fixed, "inductor")
    for seqlen in (64, 100, 77):
        tensors = leaves((2, seqlen, 4, 16), (2, seqlen, 2, 16), (2, seqlen, 2, 16), (4,))
        assert_same_step(step, fixed, tensors)
    assert counter.frame_count == 2


def model_step(model, inputs: dict) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.transformers
def test_a_compiled_model_prints_no_warning(recwarn):
    """Of the shipped tile, which is looked up while compiling; in training, without gradients and padded."""
    model = mala_hf.patch_model(tiny("llama", attention="sdpa")).train()
    ids = tokens(2, 40)
    compiled(model)[0](input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with torch.no_grad():
        compiled(model.eval())[0](ids, use_cache=False)
        compiled(model)[0](ids, attention_mask=padding(40, (0, 40), (8, 40)), use_cache=False)
    assert [str(one.message) for one in recwarn] == []


def llama():
    model = tiny("llama", peaked=3, attention="mala").train()
    model.config.mala = {"tile": SMALL_TILE}
    return model


@pytest.mark.transformers
@pytest.mark.parametrize("layers", [{}, {"0": "sdpa"}], ids=["mala", "one layer dense"])
def test_a_model_trains_in_one_graph_whatever_the_length(layers):
    model = llama()
    model.config.mala["layers"] = layers
    whole, counter = compiled(model)
    for length in (30, 34, 41):
        inputs = {"input_ids": tokens(2, length), "labels": tokens(2, length)}
        (loss, gradients), (expected, exact) = model_step(whole, inputs), model_step(model, inputs)
        assert torch.equal(loss, expected)
        assert len(gradients) == len(exact) > 10
        for gradient, other in zip(gradients, exact, strict=True):
            assert torch.equal(gradient, other)
    assert counter.frame_count == 2


@pytest.mark.transformers
def test_a_model_compiled_with_a_square_mask_agrees_with_eager():
    """There, a compiler sees a mask that eager does without: the sums run in another order."""
    model = llama()
    model.config.mala["tau"] = 0.0
    arguments = {"input_ids": tokens(2, 30), "labels": tokens(2, 30), "use_cache": False}
    (_, gradients), (_, exact) = model_step(compiled(model)[0], arguments), model_step(model, arguments)
    for gradient, other in zip(gradients, exact, strict=True):
        assert (gradient - other).norm() <= 1e-4 * other.norm() + 1e-6


@pytest.mark.transformers
@pytest.mark.parametrize("blocks", [((0, 30), (8, 30)), ((0, 30), (0, 21))], ids=["left", "right"])
def test_a_model_compiles_with_padding_and_no_quadratic_mask(blocks, monkeypatch):
    """The step is eager's, bit for bit, where tiles are skipped too."""
    model, mask = llama(), padding(30, *blocks)
    arguments = {"input_ids": tokens(2, 30), "labels": tokens(2, 30), "attention_mask": mask}
    loss, gradients = model_step(model, arguments)
    monkeypatch.setattr("mala_hf.masks.sdpa_mask", None)  # what would make a square mask
    compiled_loss, compiled_gradients = model_step(compiled(model)[0], arguments)
    assert torch.equal(compiled_loss, loss)
    for gradient, other in zip(compiled_gradients, gradients, strict=True):
        assert torch.equal(gradient, other)
    with pytest.raises(RuntimeError, match="one contiguous block"), torch.no_grad():
        compiled(model, "eager")[0](**arguments | {"attention_mask": mask * (torch.arange(30) != 15)})


@pytest.mark.transformers
def test_a_compiled_layer_reads_a_padding_mask_without_its_values():
    model = llama()
    layer, mask = model.model.layers[0].self_attn, padding(30, (0, 30), (8, 30))
    x, angle = torch.randn(2, 30, 32), torch.rand(2, 30, 8)
    rotary = angle.cos(), angle.sin()

    def attend(mask):
        return layer(x, position_embeddings=rotary, attention_mask=mask)[0]

    whole, _ = compiled(attend)
    assert torch.equal(whole(mask), attend(mask))
    with pytest.raises(RuntimeError, match="one contiguous block"):
        whole(mask * (torch.arange(30) != 15))


@pytest.mark.transformers
def test_positions_that_show_a_packed_batch_are_refused_when_the_graph_runs():
    model = llama().eval()
    whole, _ = compiled(model, "eager")
    one, two = torch.arange(24)[None], torch.cat([torch.arange(10), torch.arange(14)])[None]
    with torch.no_grad():
        alone = model(tokens(1, 24), position_ids=one).logits
        assert torch.equal(whole(tokens(1, 24), position_ids=one).logits, alone)
        with pytest.raises(RuntimeError, match="pass cu_seq_lens_q"):
            whole(tokens(1, 24), position_ids=two)
        cu_seqlens = torch.tensor([0, 10, 24], dtype=torch.int32)
        lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 14, "max_length_k": 14}
        apart = model(tokens(1, 24), position_ids=two).logits
        assert torch.equal(whole(tokens(1, 24), position_ids=two, **lengths).logits, apart)
    assert not torch.allclose(apart, alone)


@pytest.mark.transformers
def test_recording_work_breaks_the_graph_or_is_refused():
    model = llama().eval()
    whole, parts = compiled(model, "eager")[0], torch.compile(model, backend="eager")
    with torch.no_grad(), mala_hf.record_work(model) as report:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="recording work reads values"):
            whole(tokens(2, 24))
        parts(tokens(2, 24))
    assert [work.rows for work in report.layers.values()] == [48, 48]


def test_a_call_that_writes_a_cache_compiles_and_reads_no_lengths():
    def attend(q, k_cache, v_cache, k, v, cache_seqlens):
        return mala_attn_with_kvcache_func(q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, **OPTIONS)

    with torch.no_grad():
        q, k, v, *caches = (x.detach() for x in leaves(*[(2, 3, 2, 16)] * 3, *[(2, 40, 2, 16)] * 2))
        twins = [cache.clone() for cache in caches]
        filled = torch.tensor([30, 17])
        whole, _ = compiled(attend)
        assert torch.equal(whole(q, *caches, k, v, filled), attend(q, *twins, k, v, filled))
    for cache, twin in zip(caches, twins, strict=True):
        assert torch.equal(cache, twin)

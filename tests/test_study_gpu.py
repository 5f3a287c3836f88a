# SPDX-License-Identifier: Apache-2.0
"""On a GPU the methods of the studies take other ways, routed queries and torch's FlashAttention: the same results as under a mask."""

import copy

import pytest
import torch

from mala_hf.studies.attention import masked_attention, window_attention
from mala_hf.studies.block_attention import block_mask
from mala_hf.studies.moba import chosen_blocks, moba_attention
from mala_hf.studies.recall_model import METHODS, attention_layer
from mala_hf.studies.recall_train import Cell, Recipe, train_cell

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def tensors(batch, seqlen, num_heads, num_kv_heads, head_dim=64):
    generator = torch.Generator(CUDA).manual_seed(0)
    shapes = ((batch, seqlen, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    return [
        torch.randn(shape, generator=generator, device=CUDA, dtype=torch.bfloat16).requires_grad_() for shape in shapes
    ]


def assert_near(found, exact, rounded):
    """As near to float32 as bfloat16 under a mask is, or twice as far."""
    for x, y, z in zip(found, exact, rounded, strict=True):
        assert (x.float() - y).norm() <= 2 * (z.float() - y).norm() + 1e-3 * y.norm()


def with_gradients(attention, inputs, do):
    out = attention(*inputs)
    return out, *torch.autograd.grad(out, inputs, do.to(out.dtype))


@pytest.mark.parametrize(("seqlen", "heads"), [(1024, (4, 4)), (1000, (4, 2)), (640, (16, 1))])
def test_routed_queries_give_what_the_mask_gives(seqlen, heads):
    inputs = tensors(2, seqlen, *heads)
    allowed = block_mask(chosen_blocks(*inputs[:2], 64, 4), seqlen, 64)
    do = torch.randn_like(inputs[0])
    routed = with_gradients(lambda q, k, v: moba_attention(q, k, v, block=64, topk=4), inputs, do)

    def masked(q, k, v):
        groups = q.shape[2] // k.shape[2]
        return masked_attention(q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2), allowed)

    exact = with_gradients(masked, [x.detach().float().requires_grad_() for x in inputs], do)
    assert_near(routed, exact, with_gradients(masked, inputs, do))


def test_the_window_is_the_last_keys():
    inputs = tensors(2, 600, 4, 4)
    pairs = torch.ones(600, 600, dtype=torch.bool, device=CUDA)
    allowed, do = pairs.tril() & pairs.triu(-99), torch.randn_like(inputs[0])

    def masked(q, k, v):
        return masked_attention(q, k, v, allowed)

    found = with_gradients(lambda q, k, v: window_attention(q, k, v, 100), inputs, do)
    exact = with_gradients(masked, [x.detach().float().requires_grad_() for x in inputs], do)
    assert_near(found, exact, with_gradients(masked, inputs, do))


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_on_the_gpu_is_the_layer_on_the_cpu(method):
    torch.manual_seed(0)
    layer, _ = attention_layer(method, 128, 1024, 512)
    x = torch.randn(1, 1024, 128)
    with torch.no_grad():
        expected = layer.eval()(x)
        with torch.autocast("cuda", torch.bfloat16):
            found = copy.deepcopy(layer).to(CUDA)(x.to(CUDA)).float().cpu()
    far = (found - expected).flatten(0, 1).norm(dim=1) / expected.flatten(0, 1).norm(dim=1)
    # rounding moves a choice of blocks or tokens at some queries
    assert far.median() < 0.03


@pytest.mark.parametrize("method", METHODS)
def test_the_largest_run_fits(method):
    recipe = Recipe(short_steps=3, steps=3, test_sequences=8)
    torch.cuda.reset_peak_memory_stats()
    row = train_cell(Cell(method, 8192, 512, 0), recipe, CUDA)
    assert 0 <= row["accuracy"] <= 1
    print(f"{method}: {row['seconds']:.1f} s, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")

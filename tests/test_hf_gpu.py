# SPDX-License-Identifier: Apache-2.0
"""The fused kernels under Transformers, on a GPU: bfloat16 models with padding, windows, softcaps, sinks, caches and packing.

Each is compared with the blockwise form of the same rule on the CPU in float32, beside eager attention in the GPU's own dtype.
"""

from __future__ import annotations

import pytest
import torch
from models import DECODERS, attention, clone, logits, padding, tiny, tokens

import mala_hf

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LENGTH = 300
POSITIONS = torch.cat([torch.arange(n) for n in (130, 1, 169)])[None]
INPUTS = {
    "plain": {"input_ids": tokens(2, LENGTH)},
    "left": {"input_ids": tokens(2, LENGTH), "attention_mask": padding(LENGTH, (0, LENGTH), (77, LENGTH))},
    "right": {"input_ids": tokens(2, LENGTH), "attention_mask": padding(LENGTH, (0, LENGTH), (0, 201))},
    "holes": {
        "input_ids": tokens(2, LENGTH),
        "attention_mask": padding(LENGTH, (0, LENGTH), (3, LENGTH)) * (torch.arange(LENGTH) % 50 != 7),
    },
    "packed": {"input_ids": tokens(1, LENGTH), "position_ids": POSITIONS},
}


def on_gpu(inputs: dict) -> dict:
    return {name: x.cuda() for name, x in inputs.items()}


def ask_every_expert(model):
    """A router that chooses would turn a rounding into another expert."""
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = module.num_experts
    return model


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("family", DECODERS)
def test_a_bfloat16_forward_is_as_close_to_float32_as_eager(family, kind):
    model, inputs = ask_every_expert(clone(tiny(family))), INPUTS[kind]
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    # not eager's: eager GPT-OSS attends across packed sequences
    exact = logits(model, "mala", inputs, tau=0)[real]
    gpu = clone(model).cuda().bfloat16()
    with mala_hf.record_work(gpu) as report:
        out = logits(gpu, "mala", on_gpu(inputs), tau=0, discovery="fused").cpu()
    assert {impl for layer in report.layers.values() for impl in layer.impls} == {"triton"}
    error = (out[real] - exact).norm()
    baseline = (logits(gpu, "eager", on_gpu(inputs)).cpu() - logits(model, "eager", inputs))[real].norm()
    assert error <= 1.2 * baseline


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt_oss"])
def test_float32_generation_equals_eager(family, cache):
    """A static cache makes Transformers compile the decoding step by itself."""
    model = tiny(family).cuda()
    inputs = on_gpu({"input_ids": tokens(2, 40), "attention_mask": padding(40, (0, 40), (9, 40))})
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    expected = model.generate(**inputs, **options)
    with attention(model, "mala", tau=0):
        assert model.generate(**inputs, **options).tolist() == expected.tolist()


def test_autocast_trains_on_the_gpu():
    model = tiny("qwen3").cuda().train()
    ids = tokens(2, LENGTH).cuda()
    gradients = []
    for name in ("eager", "mala"):
        model.zero_grad()
        with attention(model, name, tau=0), torch.autocast("cuda", dtype=torch.bfloat16):
            model(ids, labels=ids).loss.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert (gradients[1] - gradients[0]).norm() < 0.05 * gradients[0].norm()


def test_skipping_on_the_gpu_equals_the_blockwise_form():
    model = tiny("llama", peaked=4)
    inputs, tile = INPUTS["left"], [16, 16]
    real = inputs["attention_mask"].bool()
    expected = logits(model, "mala", inputs, tile=tile)
    gpu = clone(model).cuda()
    with mala_hf.record_work(gpu) as report:
        out = logits(gpu, "mala", on_gpu(inputs), tile=tile).cpu()
    assert report.work_fraction < 1
    assert (out - expected)[real].norm() < 1e-2 * expected[real].norm()

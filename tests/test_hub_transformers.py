# SPDX-License-Identifier: Apache-2.0
"""The Kernel Hub artifact as an attention implementation: what "mala" computes, through Transformers' FlashAttention wrapper."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from models import DECODERS, NOISE, WINDOW, attention, padding, tiny, tokens
from torch.testing import assert_close
from transformers.utils import is_kernels_available

pytest.importorskip("kernels")
if not is_kernels_available():
    pytest.skip("this Transformers wants another release of kernels", allow_module_level=True)

from kernels import get_kernel

pytestmark = pytest.mark.transformers

REPOSITORY = "mala-hf/mala-flash-attn"
LENGTH, NEW = 40, 6
# GPT-OSS lists the kernels that it accepts; layers of Qwen2-MoE tell no FlashAttention their window
FAMILIES = [family for family in DECODERS if family not in ("gpt_oss", "qwen2_moe")]
PADDED = {"left": ((0, LENGTH), (9, LENGTH)), "right": ((0, LENGTH), (0, 28))}


@pytest.fixture(autouse=True)
def kernel(hub_kernel, monkeypatch):
    """The artifact, where Transformers finds it under its name; tau is 1 before and after."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPOSITORY}={hub_kernel}")
    loaded = get_kernel(REPOSITORY, version=1)
    yield loaded
    loaded.set_default_tau(1.0)


def on_kernel(model):
    """A copy of the model that runs on the artifact."""
    copied = copy.deepcopy(model)
    copied.set_attn_implementation(REPOSITORY, allow_all_kernels=True)
    return copied


def logits(model, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_gives_the_logits_of_mala(family):
    """Windows, softcaps and grouped heads arrive."""
    model, ids = tiny(family, peaked=3), tokens(2, LENGTH)
    with attention(model, "mala"):
        expected = logits(model, input_ids=ids)
    assert_close(logits(on_kernel(model), input_ids=ids), expected, **NOISE)
    assert LENGTH > WINDOW


@pytest.mark.parametrize("side", PADDED)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_padded_batch_gives_the_logits_of_mala(family, side):
    model, ids, mask = tiny(family, peaked=3), tokens(2, LENGTH), padding(LENGTH, *PADDED[side])
    with attention(model, "mala"):
        expected = logits(model, input_ids=ids, attention_mask=mask)
    got = logits(on_kernel(model), input_ids=ids, attention_mask=mask)
    assert_close(got[mask.bool()], expected[mask.bool()], **NOISE)


def test_from_pretrained_loads_it_by_name(tmp_path, kernel):
    tiny("llama", peaked=3).save_pretrained(tmp_path)
    load = hf.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path, attn_implementation=REPOSITORY, allow_all_kernels=True)
    assert model.config._attn_implementation == REPOSITORY
    ids = tokens(2, 300)
    expected = logits(load(tmp_path, attn_implementation="mala"), input_ids=ids)
    assert_close(logits(model, input_ids=ids), expected, **NOISE)


def test_its_default_tau_is_that_of_the_model(kernel):
    model, ids = tiny("llama", peaked=1.5), tokens(1, 400)
    outs = {}
    for tau in (0.0, 1.0, 300.0):
        kernel.set_default_tau(tau)
        with attention(model, "mala", tau=tau):
            expected = logits(model, input_ids=ids)
        outs[tau] = logits(on_kernel(model), input_ids=ids)
        assert_close(outs[tau], expected, **NOISE)
    assert not torch.allclose(outs[300.0], outs[0.0], atol=1e-3)
    with attention(model, "eager"):
        assert_close(outs[0.0], logits(model, input_ids=ids), **NOISE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("blocks", [((0, LENGTH), (0, LENGTH)), PADDED["left"]], ids=["plain", "left"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_it_generates_the_tokens_of_mala(family, blocks, cache):
    model, ids, mask = tiny(family, peaked=3), tokens(2, LENGTH), padding(LENGTH, *blocks)
    options = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": cache}
    with attention(model, "mala"):
        expected = model.generate(ids, attention_mask=mask, **options)
    assert on_kernel(model).generate(ids, attention_mask=mask, **options).tolist() == expected.tolist()


def test_packed_sequences_stay_apart():
    model = tiny("llama", peaked=3)
    ids, positions = tokens(1, 30), torch.cat([torch.arange(13), torch.arange(17)])[None]
    parts = [logits(on_kernel(model), input_ids=part) for part in ids.split([13, 17], 1)]
    packed = logits(on_kernel(model), input_ids=ids, position_ids=positions)
    assert_close(packed, torch.cat(parts, 1), **NOISE)


GRAPHS = [False, pytest.param(None, marks=pytest.mark.gpu, id="as Transformers decides")]


@pytest.mark.parametrize("use_cuda_graph", GRAPHS)
def test_continuous_batching_generates_the_same_tokens(use_cuda_graph):
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where there is a GPU, Transformers batches on it alone
    model = tiny("llama", peaked=3).to(device)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (20, 7, 13)]
    # left alone, its warm-up plans for all of the GPU's memory: minutes for a model as small as this one
    config = hf.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64, use_cuda_graph=use_cuda_graph)
    outputs = on_kernel(model).generate_batch(
        prompts, max_new_tokens=NEW, progress_bar=False, continuous_batching_config=config
    )
    got = {tuple(out.prompt_ids): out.generated_tokens for out in outputs.values()}
    with attention(model, "mala"):
        for prompt in prompts:
            out = model.generate(torch.tensor([prompt], device=device), max_new_tokens=NEW, do_sample=False)
            assert got[tuple(prompt)] == out[0, len(prompt) :].tolist()


def test_it_trains_with_the_gradients_of_mala():
    ids, mask = tokens(2, LENGTH), padding(LENGTH, *PADDED["right"])
    gradients = []
    for name in ("mala", REPOSITORY):
        model = tiny("llama", peaked=3).train()
        model = on_kernel(model) if name == REPOSITORY else model
        model.config._attn_implementation = name
        model(ids, attention_mask=mask, labels=ids.where(mask.bool(), -100)).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, **NOISE)
        assert gradient.any()


def test_dropout_is_refused_while_training():
    model = tiny("llama")
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="dropout"):
        on_kernel(model.train())(tokens(1, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_on_a_gpu_it_runs_the_triton_kernels(family, kernel):
    model, mask = tiny(family, peaked=3).to("cuda", torch.bfloat16), padding(300, (0, 300), (77, 300)).cuda()
    inputs = {"input_ids": tokens(2, 300).cuda(), "attention_mask": mask}
    with attention(model, "mala"):
        expected = logits(model, **inputs)[mask.bool()]
    with attention(model, "eager"):
        eager = logits(model, **inputs)[mask.bool()]
    got = logits(on_kernel(model), **inputs)[mask.bool()]
    assert (got - expected).norm() <= (eager - expected).norm() + 1e-6  # less than another order of sums makes
    q = torch.randn(1, 300, 4, 16, device="cuda", dtype=torch.bfloat16)
    assert kernel.mala_attn_func(q, q, q, discovery="fused", return_work=True)[1].impl == "triton"


@pytest.mark.parametrize("blocks", [None, PADDED["left"]], ids=["plain", "left"])
def test_a_compiled_model_gives_the_same_logits(blocks):
    """Padding breaks the graph in Transformers' own wrapper, which reads values; without, it is one graph."""
    model, ids = on_kernel(tiny("llama", peaked=3).bfloat16()), tokens(2, LENGTH)
    mask = None if blocks is None else padding(LENGTH, *blocks)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=blocks is None)
    assert torch.equal(
        logits(compiled, input_ids=ids, attention_mask=mask), logits(model, input_ids=ids, attention_mask=mask)
    )
    torch._dynamo.reset()

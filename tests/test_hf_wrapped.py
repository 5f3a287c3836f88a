# SPDX-License-Identifier: Apache-2.0
"""Models that something wraps, quantises, compiles or spreads over devices: patched, run and restored like any other."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook
from models import SMALL, SMALL_TILE, clone, logits, tiny, tokens
from torch import nn

import mala_hf
from mala_hf import MalaConfig, mala_attention, patch_model, record_work, unpatch_model

pytestmark = pytest.mark.transformers

LENGTH = 30
SETTINGS = MalaConfig(tau=1.0, tile=tuple(SMALL_TILE), layers={-1: {"heads": {0: 0.1}}})


def llama():
    """As wide as a block of 4-bit weights."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SMALL, "hidden_size": 64, "intermediate_size": 64}))


def in_bits(model, folder, **bits):
    """The model as bitsandbytes loads it; integer weights, each with a scale for each row or block."""
    pytest.importorskip("bitsandbytes")
    model.save_pretrained(folder / "whole")
    attention, quantization = model.config._attn_implementation, hf.BitsAndBytesConfig(**bits)
    return hf.AutoModelForCausalLM.from_pretrained(
        folder / "whole", quantization_config=quantization, device_map="cpu", attn_implementation=attention
    )


def in_8_bits(model, folder):
    return in_bits(model, folder, load_in_8bit=True)


def in_4_bits(model, folder):
    return in_bits(model, folder, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def with_lora(model, folder):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    return peft.get_peft_model(model, config).eval()


def with_prompt_tuning(model, folder):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM")).eval()


def in_8_bits_with_lora(model, folder):
    return with_lora(in_8_bits(model, folder), folder)


def compiled(model, folder):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager")


def compiled_with_lora(model, folder):
    return compiled(with_lora(model, folder), folder)


def offloaded_to_cpu(model, folder):
    return cpu_offload(model, execution_device=torch.device("cpu"))


def offloaded_to_disk(model, folder):
    disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    return model


def mapped_to_devices(model, folder):
    where = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "disk"}
    where |= {"model.rotary_emb": "cpu", "lm_head": "disk"}
    return dispatch_model(model, where, main_device="cpu", offload_dir=str(folder), force_hooks=True)


FORMS = [
    in_8_bits, in_4_bits, with_lora, with_prompt_tuning, in_8_bits_with_lora, compiled, compiled_with_lora,
    offloaded_to_cpu, offloaded_to_disk, mapped_to_devices,
]  # fmt: skip
# what each form does to the model of ``tiny`` besides the attention
SAME_WEIGHTS = (compiled, offloaded_to_cpu, offloaded_to_disk, mapped_to_devices)


@torch.no_grad()
def run(model) -> torch.Tensor:
    return model(input_ids=tokens(1, LENGTH), use_cache=False).logits


@pytest.mark.parametrize("form", FORMS)
def test_patching_and_unpatching_restores_the_logits_bit_by_bit(form, tmp_path):
    model = form(tiny(llama, peaked=4, attention="sdpa"), tmp_path)
    before = run(model)
    assert patch_model(model, SETTINGS) is model
    patched = run(model)
    assert not torch.allclose(patched, before, atol=1e-3)
    with mala_attention(model, tau=0):
        torch.testing.assert_close(run(model), before, atol=2e-4, rtol=1e-4)
    assert torch.equal(run(model), patched)
    assert unpatch_model(model) is model
    assert torch.equal(run(model), before)
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "mala")


@pytest.mark.parametrize("form", SAME_WEIGHTS)
def test_it_computes_what_the_plain_model_computes(form, tmp_path):
    plain = tiny(llama, peaked=4)
    model = patch_model(form(clone(plain), tmp_path), SETTINGS)
    expected = logits(plain, "mala", {"input_ids": tokens(1, LENGTH)}, **SETTINGS.to_dict())
    torch.testing.assert_close(run(model), expected)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in (compiled, compiled_with_lora)])
def test_its_work_is_recorded(form, tmp_path):
    model = patch_model(form(tiny(llama, peaked=4), tmp_path), SETTINGS)
    with record_work(model) as work:
        run(model)
    assert list(work.layers) == [0, 1]
    assert work.work_fraction < 1


@pytest.mark.parametrize("form", [with_lora, in_8_bits_with_lora])
def test_adapters_train_through_mala(form, tmp_path):
    model = patch_model(form(tiny(llama, peaked=4), tmp_path), SETTINGS).train()
    ids = tokens(2, LENGTH)
    model(input_ids=ids, labels=ids).loss.backward()
    trained = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained
    assert all(grad is not None and grad.abs().max() > 0 for grad in trained.values())
    assert all("lora" in name for name in trained)


@pytest.mark.parametrize("form", [with_lora, offloaded_to_disk, mapped_to_devices, in_8_bits])
def test_it_generates_the_same_tokens_at_tau_zero(form, tmp_path):
    model = form(tiny(llama), tmp_path)
    options = {"input_ids": tokens(2, 12), "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**options)
    with mala_attention(model, tau=0):
        assert model.generate(**options).tolist() == expected.tolist()


def test_a_merged_adapter_keeps_the_setting():
    pytest.importorskip("peft")
    model = patch_model(with_lora(tiny(llama, peaked=4), None), SETTINGS)
    expected = run(model)
    merged = model.merge_and_unload()
    assert merged.config._attn_implementation == "mala"
    torch.testing.assert_close(run(merged), expected, atol=2e-4, rtol=1e-4)


def test_offloaded_weights_are_where_they_were(tmp_path):
    model = patch_model(offloaded_to_disk(tiny(llama), tmp_path), SETTINGS)
    run(model)
    unpatch_model(model)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert isinstance(model.model.layers[0].self_attn.q_proj._hf_hook, AlignDevicesHook)


def test_a_device_map_of_from_pretrained(tmp_path):
    plain = tiny(llama, peaked=4)
    plain.save_pretrained(tmp_path / "model")
    where = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu"}
    where |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="mala", device_map=where, offload_folder=tmp_path / "offload"
    )
    expected = logits(plain, "mala", {"input_ids": tokens(1, LENGTH)})
    assert model.hf_device_map["model.layers.0"] == "disk"
    torch.testing.assert_close(run(model), expected)


def test_what_holds_no_model_or_two_is_refused():
    for nothing in (nn.Linear(2, 2), None, "model"):
        with pytest.raises(ValueError, match="takes a Transformers model"):
            patch_model(nothing)
    pair = nn.ModuleList([tiny(llama), tiny(llama)])
    with pytest.raises(ValueError, match="2 of them"):
        patch_model(pair)
    with pytest.raises(ValueError, match="2 of them"):
        mala_hf.unpatch_model(pair)

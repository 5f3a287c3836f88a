# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of each supported family, and the few things that every Transformers test does with them.

Shrunk values carry the original in a comment. Windows are shorter than the test sequences, so that they matter.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import contextmanager

import torch
import transformers as hf
from torch import Tensor

import mala_hf

VOCABULARY = 97  # 32000 to 262144
WINDOW = 12  # 512 to 4096
SMALL_TILE = [4, 4]  # 64 x 64 for float32; small enough that short tests have tiles to skip
# Transformers 5.24 renamed the argument of every model
CACHE = "cache" if "cache" in inspect.signature(hf.LlamaForCausalLM.forward).parameters else "past_key_values"
NOISE = {"atol": 2e-4, "rtol": 1e-4}  # float32 noise of two orders of summation, after two layers of large weights

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,  # 2048 to 4096
    "intermediate_size": 48,  # 8192 to 14336
    "num_hidden_layers": 2,  # 16 to 36
    "num_attention_heads": 4,  # 16 to 64
    "num_key_value_heads": 2,  # 8
    "max_position_embeddings": 512,  # 32768 to 131072
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
HEAD_DIM = {"head_dim": 16}  # 64 to 256
KINDS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}  # 128, 8, 768


def _llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, rms_norm_eps=1e-6))


def _qwen2():
    return hf.Qwen2ForCausalLM(
        hf.Qwen2Config(
            **SMALL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, layer_types=KINDS[::-1]
        )
    )


def _qwen2_moe():
    config = hf.Qwen2MoeConfig(
        **SMALL, **EXPERTS, shared_expert_intermediate_size=24,  # 5632
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, layer_types=KINDS[::-1],
    )  # fmt: skip
    return hf.Qwen2MoeForCausalLM(config)


def _qwen3():
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL, **HEAD_DIM))


def _qwen3_moe():
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SMALL, **HEAD_DIM, **EXPERTS))


def _mistral():
    return hf.MistralForCausalLM(hf.MistralConfig(**SMALL, **HEAD_DIM, sliding_window=WINDOW))


def _gemma2():
    config = hf.Gemma2Config(
        **SMALL, **HEAD_DIM, sliding_window=WINDOW, layer_types=KINDS,
        attn_logit_softcapping=4.0,  # 50.0: with random weights only a small cap shows
        query_pre_attn_scalar=16,  # 256
    )  # fmt: skip
    return hf.Gemma2ForCausalLM(config)


def _gemma3():
    config = hf.Gemma3TextConfig(
        **SMALL, **HEAD_DIM, sliding_window=WINDOW, layer_types=KINDS, query_pre_attn_scalar=16
    )
    return hf.Gemma3ForCausalLM(config)


def _gpt_oss():
    config = hf.GptOssConfig(
        **SMALL, **HEAD_DIM, sliding_window=WINDOW, layer_types=KINDS,
        num_local_experts=4, num_experts_per_tok=2,  # 32 to 128, 4
    )  # fmt: skip
    model = hf.GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=1.0)
    return model


def _phi3():
    return hf.Phi3ForCausalLM(hf.Phi3Config(**SMALL))


def _phi4():
    """Phi-4 and Phi-4-mini are the Phi-3 class; the latter rotates part of each head."""
    return hf.Phi3ForCausalLM(hf.Phi3Config(**SMALL, partial_rotary_factor=0.5))


DECODERS: dict[str, Callable] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "phi3": _phi3,
    "phi4": _phi4,
}


def _encoder_sizes() -> dict:
    return {
        name: size
        for name, size in SMALL.items()
        if name not in ("num_key_value_heads", "eos_token_id", "bos_token_id")
    }


def bert():
    """A bidirectional encoder."""
    return hf.BertModel(hf.BertConfig(**_encoder_sizes(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def modernbert():
    """A bidirectional encoder with sliding windows on both sides."""
    config = hf.ModernBertConfig(
        **_encoder_sizes(), bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        local_attention=2 * WINDOW, global_attn_every_n_layers=2,  # 128, 3
    )  # fmt: skip
    return hf.ModernBertModel(config)


def bart():
    """An encoder-decoder with cross-attention."""
    config = hf.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2,  # 50265, 1024, 12, 12
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,  # 16, 16, 4096, 4096
        max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,  # 1024
        forced_eos_token_id=None, dropout=0.0,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config)


def tiny(build: Callable | str, *, peaked: float = 1.0, attention: str = "eager"):
    """A model in eval mode with seeded weights, large enough that attention decides the output.

    ``peaked`` multiplies what makes queries and keys: attention concentrates on few tokens, so that small tiles are skipped.
    """
    torch.manual_seed(0)
    model = (DECODERS[build] if isinstance(build, str) else build)().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
            if name.endswith(("q_proj.weight", "k_proj.weight", "query.weight", "key.weight")):
                weight *= peaked
            elif name.endswith(("qkv_proj.weight", "Wqkv.weight")):
                weight[: weight.shape[0] // 2] *= peaked
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                weight += peaked - 1
    model.set_attn_implementation(attention)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """int64 (batch, length); no padding token."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(length: int, *blocks: tuple[int, int]) -> Tensor:
    """int64 (batch, length): 1 for begin <= token < end of each sequence's block."""
    token = torch.arange(length)
    return torch.stack([((token >= begin) & (token < end)).long() for begin, end in blocks])


@contextmanager
def attention(model, name: str, **mala):
    """Another attention implementation and ``config.mala`` for a while, set by hand: the helpers of mala_hf have their own tests."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    model.config.mala = mala
    try:
        yield model
    finally:
        model.set_attn_implementation(before)
        del model.config.mala


def logits(model, name: str, inputs: dict, **mala) -> Tensor:
    """Float32 logits (or last hidden states) of one forward without cache."""
    cache = {} if model.config.model_type in ("bert", "modernbert") else {"use_cache": False}
    with torch.no_grad(), attention(model, name, **mala):
        return model(**inputs, **cache)[0].float()


def work_of(model, inputs: dict, **mala) -> mala_hf.WorkReport:
    """The work of one forward with "mala"."""
    with torch.no_grad(), attention(model, "mala", **mala), mala_hf.record_work(model) as report:
        model(**inputs, use_cache=False)
    return report


def clone(model):
    """A copy with its own config (models that share one share the attention choice)."""
    return copy.deepcopy(model)

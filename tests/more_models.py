# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of the families that only the table of families tests: further decoders, and vision-language models."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from models import HEAD_DIM, KINDS, SMALL, VOCABULARY, WINDOW
from torch import Tensor

IMAGE = 16  # pixels a side; 224 to 896
IMAGE_TOKEN = VOCABULARY - 1


def _mixtral():
    config = hf.MixtralConfig(**SMALL, **HEAD_DIM, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2)
    return hf.MixtralForCausalLM(config)


def _olmo2():
    return hf.Olmo2ForCausalLM(hf.Olmo2Config(**SMALL))


def _olmo3():
    return hf.Olmo3ForCausalLM(hf.Olmo3Config(**SMALL, sliding_window=WINDOW, layer_types=KINDS))


def _smollm3():
    """One layer with rotary positions, one without."""
    return hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**SMALL, no_rope_layers=[1, 0]))


def _smollm3_sliding():
    config = hf.SmolLM3Config(
        **SMALL, no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=WINDOW, layer_types=KINDS
    )
    return hf.SmolLM3ForCausalLM(config)


def _granite():
    return hf.GraniteForCausalLM(hf.GraniteConfig(**SMALL, attention_multiplier=0.2, residual_multiplier=0.5))


def _cohere2():
    """Sliding layers rotate, full ones have no positions."""
    return hf.Cohere2ForCausalLM(hf.Cohere2Config(**SMALL, **HEAD_DIM, sliding_window=WINDOW, layer_types=KINDS))


MORE_DECODERS: dict[str, Callable] = {
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "smollm3": _smollm3,
    "smollm3, sliding": _smollm3_sliding,
    "granite": _granite,
    "cohere2": _cohere2,
}


def _tower(config: type) -> dict:
    return config(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=IMAGE, patch_size=8
    )  # fmt: skip


def _llava():
    config = hf.LlavaConfig(
        vision_config=_tower(hf.CLIPVisionConfig), text_config=hf.LlamaConfig(**SMALL), image_token_index=IMAGE_TOKEN
    )
    return hf.LlavaForConditionalGeneration(config)


def _gemma3_vlm():
    """Tokens of one image see one another, also later ones."""
    text = hf.Gemma3TextConfig(**SMALL, **HEAD_DIM, sliding_window=WINDOW, layer_types=KINDS, query_pre_attn_scalar=16)
    config = hf.Gemma3Config(
        vision_config=_tower(hf.SiglipVisionConfig), text_config=text, image_token_id=IMAGE_TOKEN,
        boi_token_index=94, eoi_token_index=95, mm_tokens_per_image=4,  # 256
    )  # fmt: skip
    return hf.Gemma3ForConditionalGeneration(config)


QWEN_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 95,
    "vision_start_token_id": 94,
    "vision_end_token_id": 93,
}
QWEN_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


def _qwen2_vl():
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4}
    text = hf.Qwen2VLConfig().text_config.__class__(**SMALL, rope_parameters={**QWEN_ROPE, "mrope_section": [1, 1, 2]})
    return hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(vision_config=vision, text_config=text.to_dict(), **QWEN_TOKENS)
    )


def _qwen2_5_vl():
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
        "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    text = hf.Qwen2_5_VLConfig().text_config.__class__(
        **SMALL, rope_parameters={**QWEN_ROPE, "mrope_section": [1, 1, 2]}
    )
    return hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(vision_config=vision, text_config=text.to_dict(), **QWEN_TOKENS)
    )


def _qwen3_vl():
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    text = hf.Qwen3VLConfig().text_config.__class__(**SMALL, **HEAD_DIM, rope_parameters=QWEN_ROPE)
    return hf.Qwen3VLForConditionalGeneration(
        hf.Qwen3VLConfig(vision_config=vision, text_config=text.to_dict(), **QWEN_TOKENS)
    )


VISION_LANGUAGE: dict[str, Callable] = {
    "llava": _llava,
    "gemma3": _gemma3_vlm,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}


def image_inputs(model, length: int) -> dict[str, Tensor]:
    """One image of four tokens among ``length``."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (1, length), generator=generator)
    ids[0, 5:9] = IMAGE_TOKEN
    ids[0, 4] = 94
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.model_type.startswith("qwen"):
        patch = 3 * 2 * 4 * 4  # channels, frames, pixels
        inputs["pixel_values"] = torch.randn(16, patch, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
    else:
        inputs["pixel_values"] = torch.randn(1, 3, IMAGE, IMAGE, generator=generator)
        if model.config.model_type == "gemma3":
            inputs["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    return inputs

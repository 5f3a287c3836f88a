# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama as a GGUF file, written as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tiny_model import byte_tokenizer, tiny_llama
from torch import Tensor

# names of one block's weights there and in Transformers
BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_gguf(path: Path) -> Path:
    """Write ``tiny_llama()`` with its byte tokenizer, in float32."""
    model = tiny_llama()
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = byte_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(vocabulary))
    writer.add_token_scores([0.0] * len(vocabulary))  # in place of merges, of which a byte tokenizer has none
    names = dict(OUTER)
    for block in range(config.num_hidden_layers):
        names |= {f"blk.{block}.{theirs}": f"model.layers.{block}.{ours}" for theirs, ours in BLOCK.items()}
    for theirs, ours in names.items():
        weight = weights[f"{ours}.weight"]
        if "attn_q" in theirs or "attn_k" in theirs:
            weight = interleaved(weight, config.head_dim)
        writer.add_tensor(f"{theirs}.weight", np.ascontiguousarray(weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """The rows of each head in the order of llama.cpp's rotary embedding, which pairs neighbours."""
    heads, columns = weight.shape[0] // head_dim, weight.shape[1]
    return weight.view(heads, 2, head_dim // 2, columns).transpose(1, 2).reshape(weight.shape)

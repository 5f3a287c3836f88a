# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama and a byte tokenizer, in memory or as a checkpoint folder."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 256


def tiny_llama(positions: int = 512, layers: int = 2) -> LlamaForCausalLM:
    """Four query heads, two key/value heads, head_dim 32.

    Queries look for keys like their own, so a run of one token attends to itself.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        key_weight = layer.self_attn.k_proj.weight.detach().view(2, 1, 32, 128)
        layer.self_attn.q_proj.weight.data.copy_(key_weight.expand(2, 2, 32, 128).reshape(128, 128))
    return model


def runs_of_tokens(length: int, run: int = 64, seed: int = 1) -> torch.Tensor:
    """Token ids (1, length) in runs of one token each, on which ``tiny_llama`` attends sparsely."""
    tokens = torch.randint(VOCABULARY, (length // run + 1,), generator=torch.Generator().manual_seed(seed))
    return tokens.repeat_interleave(run)[None, :length]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, no special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: n for n, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save_tiny_checkpoint(folder: Path, **settings: int) -> Path:
    """Write model and tokenizer into the folder as ``from_pretrained`` reads them."""
    tiny_llama(**settings).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder

# SPDX-License-Identifier: Apache-2.0
"""Write a random Llama whose attention is peaked, its byte tokenizer, and a text to run it on: for timing where no model is at hand.

    python scripts/random_llama.py FOLDER --layers 4 --characters 400000

Queries look for keys like their own, so a token attends to the tokens that are the same; FOLDER/text.txt consists of runs of one
character. What comes out of the model means nothing.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 256  # bytes
RUN = 128  # characters
DEVIATION = (
    0.03  # of query and key weights: with 2048 inputs of size 1 equal tokens score about 20, others 0 with deviation 2
)
ROPE_THETA = 500000.0
CHARACTERS = "".join(map(chr, range(ord("!"), ord("~") + 1)))


def peaked_llama(
    layers: int, num_heads: int, num_kv_heads: int, head_dim: int, positions: int, device: torch.device | str = "cpu"
) -> LlamaForCausalLM:
    """A random Llama, hidden size num_heads * head_dim, bfloat16 weights."""
    torch.manual_seed(0)
    hidden = num_heads * head_dim
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_theta=ROPE_THETA,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).bfloat16()
    for layer in model.model.layers:
        keys = layer.self_attn.k_proj.weight.data
        keys.normal_(0.0, DEVIATION * (2048 / hidden) ** 0.5)
        by_head = keys.view(num_kv_heads, 1, head_dim, hidden).expand(-1, num_heads // num_kv_heads, -1, -1)
        layer.self_attn.q_proj.weight.data.copy_(by_head.reshape(hidden, hidden))
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, no special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: n for n, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def text_of_runs(characters: int) -> str:
    """So many characters, ``RUN`` times one and then another."""
    chosen = random.Random(0)
    return "".join(chosen.choice(CHARACTERS) * RUN for _ in range(-(-characters // RUN)))[:characters]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, nargs=2, default=[16, 8], metavar=("QUERY", "KV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--characters", type=int, default=400000, help="length of the text and of the positions")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    model = peaked_llama(options.layers, *options.heads, options.head_dim, options.characters, options.device)
    model.save_pretrained(options.folder)
    byte_tokenizer().save_pretrained(options.folder)
    (options.folder / "text.txt").write_text(text_of_runs(options.characters), "ascii")


if __name__ == "__main__":
    main()

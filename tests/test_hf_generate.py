# SPDX-License-Identifier: Apache-2.0
"""Generation: the same tokens as eager attention at tau = 0, whatever the cache and the strategy."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from models import CACHE, DECODERS, NOISE, SMALL_TILE, attention, bart, clone, padding, tiny, tokens
from torch.testing import assert_close

pytestmark = pytest.mark.transformers

PROMPT, NEW = 20, 8
BLOCKS = {
    "plain": ((0, PROMPT), (0, PROMPT)),
    "left": ((0, PROMPT), (7, PROMPT)),
}
STRATEGIES = {
    "beam search": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 6},
    "without cache": {"use_cache": False},
}


def generated(
    model, name: str, ids: torch.Tensor, mask: torch.Tensor | None = None, mala: dict | None = None, **options
):
    """New tokens (batch, NEW) and their scores (batch, NEW, vocabulary) with greedy choice."""
    with attention(model, name, **(mala or {})):
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True,
            **options,
        )  # fmt: skip
    return out.sequences[:, -NEW:], torch.stack(out.logits, 1)


def assert_same_generation(model, ids, mask=None, **options):
    sequences, scores = generated(model, "mala", ids, mask, {"tau": 0}, **options)
    expected, expected_scores = generated(model, "eager", ids, mask, **options)
    assert sequences.tolist() == expected.tolist()
    assert_close(scores, expected_scores, **NOISE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("family", DECODERS)
def test_greedy_generation_equals_eager(family, blocks, cache):
    ids, mask = tokens(2, PROMPT), padding(PROMPT, *BLOCKS[blocks])
    assert_same_generation(tiny(family), ids, mask, cache_implementation=cache)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt_oss"])
def test_every_strategy_generates_the_tokens_of_eager(family, strategy):
    batch = 1 if strategy == "prompt lookup" else 2
    ids = tokens(batch, PROMPT)
    ids[:, 10:] = ids[:, :10]  # something to look up
    mask = padding(PROMPT, *[(0, PROMPT), (7, PROMPT)][-batch:])
    model = tiny(family)
    options = STRATEGIES[strategy]
    expected, _ = generated(model, "eager", ids, mask, **options)
    assert generated(model, "mala", ids, mask, {"tau": 0}, **options)[0].tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_assisted_generation_equals_eager(family):
    model, assistant = tiny(family), tiny(family)
    torch.manual_seed(1)
    for weight in assistant.parameters():  # an assistant that errs now and then
        weight.data += 0.05 * torch.randn_like(weight)
    ids = tokens(1, PROMPT)
    expected, _ = generated(model, "eager", ids, assistant_model=assistant)
    with attention(assistant, "mala", tau=0):
        assert (
            generated(model, "mala", ids, None, {"tau": 0}, assistant_model=assistant)[0].tolist() == expected.tolist()
        )


@pytest.mark.parametrize("cache_class", [hf.DynamicCache, hf.StaticCache])
@pytest.mark.parametrize("turns", [(20, 16), (5, 31), (5, 4, 27), (30, 2, 4)], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma2", "gpt_oss"])
def test_a_conversation_continues_from_its_cache(family, turns, cache_class):
    """Later turns have more keys than queries: their rows see the whole prefix."""
    model, ids = tiny(family), tokens(2, 36)
    size = {"max_cache_len": 50} if cache_class is hf.StaticCache else {}
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with attention(model, "mala", tau=0):
            cache = cache_class(config=model.config, **size)
            out = torch.cat([model(turn, **{CACHE: cache}).logits for turn in ids.split(turns, 1)], 1)
    assert_close(out, expected, **NOISE)


def test_a_mask_shorter_than_the_cache_means_what_it_means_to_eager():
    model, ids = tiny("llama"), tokens(2, 30)
    outs = []
    for name in ("eager", "mala"):
        with torch.no_grad(), attention(model, name, tau=0):
            cache = hf.DynamicCache(config=model.config)
            model(ids[:, :20], **{CACHE: cache})
            outs.append(model(ids[:, 20:], attention_mask=torch.ones(2, 10), **{CACHE: cache}).logits)
    assert_close(outs[1], outs[0], **NOISE)


@pytest.mark.parametrize("cache_class", [hf.DynamicCache, hf.StaticCache])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_oss"])
def test_decoding_goes_on_after_right_padding_that_becomes_a_hole(family, cache_class):
    model, ids = tiny(family), tokens(2, PROMPT + 2)
    mask = padding(PROMPT + 2, (0, PROMPT + 2), (0, PROMPT + 2))
    mask[1, 14:PROMPT] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    steps = [slice(0, PROMPT), slice(PROMPT, PROMPT + 1), slice(PROMPT + 1, PROMPT + 2)]
    size = {"max_cache_len": 50} if cache_class is hf.StaticCache else {}

    def decoded(name: str) -> torch.Tensor:
        with torch.no_grad(), attention(model, name, tau=0):
            cache = cache_class(config=model.config, **size)
            outs = [
                model(
                    ids[:, step], attention_mask=mask[:, : step.stop], position_ids=positions[:, step], **{CACHE: cache}
                )
                for step in steps
            ]
        return torch.cat([out.logits for out in outs[1:]], 1)

    assert_close(decoded("mala"), decoded("eager"), **NOISE)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_left_padded_prompt_generates_what_it_generates_alone_where_tiles_are_skipped(family):
    model, ids = tiny(family, peaked=4), tokens(2, PROMPT)
    mala = {"tau": 1.0, "tile": SMALL_TILE}
    batch = generated(model, "mala", ids, padding(PROMPT, (0, PROMPT), (7, PROMPT)), mala)
    alone = generated(model, "mala", ids[1:, 7:], None, mala)
    assert batch[0][1].tolist() == alone[0][0].tolist()
    assert_close(batch[1][1], alone[1][0], **NOISE)
    assert (generated(model, "eager", ids[1:, 7:])[1] - alone[1]).abs().max() > 1e-3


def test_an_encoder_decoder_generates_the_tokens_of_eager():
    model = tiny(bart)
    for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        assert_same_generation(clone(model), tokens(2, PROMPT), padding(PROMPT, (0, PROMPT), (0, 14)), **options)

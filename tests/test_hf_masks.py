# SPDX-License-Identifier: Apache-2.0
"""Which mask the layers get, and what the adapter makes of any mask: honoured or refused."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from models import NOISE, attention, logits, padding, tiny, tokens
from torch.testing import assert_close
from transformers.masking_utils import (
    chunked_causal_mask_function,
    create_causal_mask,
    create_sliding_window_causal_mask,
    sdpa_mask,
)

from mala_hf import masks
from mala_hf.masks import mala_mask
from mala_hf.ops import hf as adapter
from mala_hf.ops import hf_visible
from mala_hf.ops.hf import mala_attention_forward
from mala_hf.ops.hf_mask import read_padding

pytestmark = pytest.mark.transformers

LENGTH = 40


def seen_masks(model, inputs: dict, monkeypatch) -> list:
    """The mask that each layer's attention function gets."""
    seen = []

    def spy(module, query, key, value, attention_mask=None, **kwargs):
        seen.append(attention_mask)
        return mala_attention_forward(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(hf.AttentionInterface._global_mapping, "mala", spy)
    with torch.no_grad(), attention(model, "mala", tau=0):
        model(**inputs)
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt_oss", "mistral"])
def test_plain_causal_and_sliding_layers_need_no_mask(family, monkeypatch):
    inputs = {"input_ids": tokens(2, LENGTH), "attention_mask": padding(LENGTH, (0, LENGTH), (0, LENGTH))}
    assert seen_masks(tiny(family), inputs, monkeypatch) == [None, None]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt_oss", "mistral"])
def test_padded_layers_get_one_row_per_sequence(family, monkeypatch):
    inputs = {"input_ids": tokens(2, LENGTH), "attention_mask": padding(LENGTH, (0, LENGTH), (9, LENGTH))}
    for mask in seen_masks(tiny(family), inputs, monkeypatch):
        assert mask.dtype == torch.bool
        assert mask.shape == (2, LENGTH)


def test_a_layer_that_is_not_told_its_window_gets_a_square_mask(monkeypatch):
    full, sliding = seen_masks(tiny("qwen2_moe"), {"input_ids": tokens(1, LENGTH)}, monkeypatch)
    assert full is None
    assert sliding.shape == (1, 1, LENGTH, LENGTH)


def test_holes_get_a_square_mask(monkeypatch):
    mask = padding(LENGTH, (0, LENGTH), (0, LENGTH))
    mask[1, 5] = 0
    seen = seen_masks(tiny("llama"), {"input_ids": tokens(2, LENGTH), "attention_mask": mask}, monkeypatch)
    assert seen[0].shape == (2, 1, LENGTH, LENGTH)


def test_padding_is_read_once_for_all_layers(monkeypatch):
    """Each read is a device synchronisation."""
    reads = []

    def spy(mask):
        reads.append(mask)
        return read_padding(mask)

    for module in (masks, hf_visible):
        monkeypatch.setattr(module, "read_padding", spy)
    logits(tiny("llama"), "mala", {"input_ids": tokens(2, LENGTH), "attention_mask": padding(LENGTH, (0, 40), (9, 40))})
    assert len(reads) == 1


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("kind", ["bool", "float", "minus infinity"])
def test_a_square_mask_of_the_user_is_all_that_applies(family, kind):
    """Not even the layer's window comes on top: the mask already says everything."""
    model, ids = tiny(family), tokens(2, LENGTH)
    allowed = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed |= torch.eye(LENGTH, dtype=torch.bool)
    lowest = -torch.inf if kind == "minus infinity" else torch.finfo(torch.float32).min
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, lowest)
    expected = logits(model, "eager", {"input_ids": ids, "attention_mask": additive})
    mask = allowed if kind == "bool" else additive
    assert_close(logits(model, "mala", {"input_ids": ids, "attention_mask": mask}, tau=0), expected, **NOISE)


def test_a_square_mask_of_a_longer_cache_is_cut_to_the_keys():
    mask = torch.rand(2, 1, 6, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(call(mask), call(mask[..., :6]))


def test_the_prefill_of_a_static_cache_needs_no_lengths_per_sequence(monkeypatch):
    calls = []
    real = adapter.mala_attn_func
    monkeypatch.setattr(
        adapter, "mala_attn_func", lambda *tensors, **options: calls.append(options) or real(*tensors, **options)
    )
    with attention(tiny("llama"), "mala") as model:
        model.generate(tokens(2, LENGTH), max_new_tokens=2, cache_implementation="static")
    assert "seqused_k" not in calls[0]


def test_an_additive_bias_is_refused():
    mask = torch.zeros(1, 1, LENGTH, LENGTH)
    mask[..., 3] = -0.5
    with pytest.raises(ValueError, match="no additive attention bias"):
        logits(tiny("llama"), "mala", {"input_ids": tokens(1, LENGTH), "attention_mask": mask})


def test_a_float_mask_written_to_between_forwards_is_read_again():
    model, ids = tiny("llama"), tokens(1, LENGTH)
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((LENGTH, LENGTH), lowest).triu(1)[None, None]
    first = logits(model, "mala", {"input_ids": ids, "attention_mask": mask})
    mask[..., :5] = lowest
    mask[..., 0] = 0
    assert (logits(model, "mala", {"input_ids": ids, "attention_mask": mask}) - first).abs().max() > 1e-3


def call(mask, *, causal: bool = True, lengths=(6, 6), **kwargs) -> torch.Tensor:
    """The adapter itself: (2, seqlen_q, 4, 8)."""
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.is_causal = causal
    query = torch.randn(2, 4, lengths[0], 8, generator=generator)
    key, value = torch.randn(2, 2, 2, lengths[1], 8, generator=generator)
    return mala_attention_forward(module, query, key, value, mask, **kwargs)[0]


def test_an_unmarked_padding_mask_is_checked_by_the_adapter():
    assert_close(call(padding(6, (0, 6), (2, 6)))[1, 2:], call(padding(6, (0, 6), (2, 6)).bool())[1, 2:])
    with pytest.raises(ValueError, match="contiguous block"):
        call(torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1]]))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 6),
        torch.ones(2, 7, dtype=torch.bool),
        torch.ones(2, 6, 6, dtype=torch.bool),
        torch.ones(2, 1, 6, 6, dtype=torch.long),
    ],
    ids=["float", "longer than the keys", "three dimensions", "integer square"],
)
def test_a_mask_of_no_known_kind_is_refused(mask):
    with pytest.raises(ValueError, match="mask must be"):
        call(mask)


def test_a_padding_mask_of_a_bidirectional_layer_hides_keys_only():
    out = call(padding(6, (0, 6), (0, 4)), causal=False, scaling=0.3)
    square = padding(6, (0, 6), (0, 4)).bool()[:, None, None, :].expand(2, 1, 6, 6)
    assert_close(out, call(square, scaling=0.3))
    assert (out - call(None, causal=False, scaling=0.3))[1].abs().max() > 1e-3


def test_more_causal_rows_than_keys_are_refused():
    with pytest.raises(ValueError, match="no meaning"):
        call(None, lengths=(7, 6))


def test_rows_that_see_nothing_are_zero():
    out = call(torch.zeros(2, 1, 6, 6, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))


def config_of(model_type: str) -> hf.PreTrainedConfig:
    config = hf.AutoConfig.for_model(model_type)
    config._attn_implementation = "mala"
    return config


def test_a_pattern_that_is_added_to_the_causal_one_becomes_a_square_mask():
    config = config_of("llama")
    embeddings = torch.empty(1, 6, 0)
    name = (
        {"past_key_values": None} if "past_key_values" in create_causal_mask.__code__.co_varnames else {"cache": None}
    )
    mask = create_causal_mask(
        config, embeddings, None, **name, or_mask_function=lambda batch, head, q, kv: (q < 3) & (kv < 3)
    )  # fmt: skip
    assert mask.shape == (1, 1, 6, 6)
    assert mask[0, 0, :3, :3].all()
    assert not mask[0, 0, 4, 5]


def test_a_caller_that_wants_the_mask_itself_gets_it():
    config = config_of("mistral")
    config.sliding_window = 4
    embeddings = torch.empty(1, 6, 0)
    name = (
        {"past_key_values": None} if "past_key_values" in create_causal_mask.__code__.co_varnames else {"cache": None}
    )
    for create in (create_causal_mask, create_sliding_window_causal_mask):
        assert create(config, embeddings, None, **name, allow_is_causal_skip=False).shape == (1, 1, 6, 6)


def test_chunked_attention_becomes_a_square_mask():
    config = hf.Llama4TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attention_chunk_size=8, num_local_experts=2, pad_token_id=0,
    )  # fmt: skip
    model = tiny(lambda: hf.Llama4ForCausalLM(config))
    inputs = {"input_ids": tokens(2, LENGTH), "attention_mask": padding(LENGTH, (0, LENGTH), (9, LENGTH))}
    real = inputs["attention_mask"].bool()
    assert_close(logits(model, "mala", inputs, tau=0)[real], logits(model, "eager", inputs)[real], **NOISE)


def test_an_unknown_pattern_over_a_cache_longer_than_its_content_is_never_none():
    """SDPA's own mask function says None here and means top-left alignment."""
    chunked = chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int))
    shape = {"batch_size": 1, "q_length": 6, "kv_length": 10, "mask_function": chunked, "local_size": 64}
    assert sdpa_mask(**shape) is None
    assert torch.equal(mala_mask(**shape)[0, 0], torch.ones(6, 10, dtype=torch.bool).tril())


def test_a_compiled_mask_function_needs_no_values():
    compiled = torch.compile(lambda **arguments: mala_mask(**arguments, config=None), fullgraph=True, backend="eager")
    shape = {"batch_size": 2, "q_length": 6, "kv_length": 6}
    assert compiled(**shape) is None
    mask = padding(6, (0, 6), (2, 6)).bool()
    assert torch.equal(compiled(**shape, attention_mask=mask), mask)
    longer = compiled(**shape | {"kv_length": 8}, q_offset=2, attention_mask=padding(8, (0, 8), (2, 8)).bool())
    assert_close(longer[1, 0, 1], torch.tensor([False, False, True, True, False, False, False, False]))


REFUSED = {
    "xglm": lambda: hf.XGLMForCausalLM(
        hf.XGLMConfig(vocab_size=97, d_model=32, ffn_dim=32, num_layers=1, attention_heads=2)
    ),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=2)),
    "gptj": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(vocab_size=97, n_embd=32, n_layer=1, n_head=2, rotary_dim=4)),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_would_run_dense_without_a_word_is_refused_at_its_first_forward(family):
    model = REFUSED[family]().eval()
    if model._can_set_attn_implementation():
        pytest.skip(f"{family} asks the attention interface in transformers {hf.__version__}")
    model.config._attn_implementation = "mala"
    with pytest.raises(ValueError, match="computes its own attention"):
        model(tokens(1, 5))

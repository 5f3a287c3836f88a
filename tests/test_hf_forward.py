# SPDX-License-Identifier: Apache-2.0
"""One forward of every supported family: what the model computes with "mala", with and without padding."""

from __future__ import annotations

import pytest
import torch
from models import DECODERS, NOISE, SMALL_TILE, bart, bert, logits, modernbert, padding, tiny, tokens, work_of
from torch.testing import assert_close

pytestmark = pytest.mark.transformers

LENGTH = 40
MASKS = {
    "plain": None,
    "left": padding(LENGTH, (0, LENGTH), (11, LENGTH)),
    "right": padding(LENGTH, (0, LENGTH), (0, 29)),
    "both": padding(LENGTH, (5, 33), (0, 1)),
    "holes": padding(LENGTH, (0, LENGTH), (3, LENGTH)) * (torch.arange(LENGTH) % 9 != 5),
}


def inputs_of(mask: str) -> tuple[dict, torch.Tensor]:
    """Model inputs, and which outputs belong to a token."""
    inputs = {"input_ids": tokens(2, LENGTH)}
    if MASKS[mask] is None:
        return inputs, torch.ones(2, LENGTH, dtype=torch.bool)
    return {**inputs, "attention_mask": MASKS[mask]}, MASKS[mask].bool()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("family", [*DECODERS, bert, modernbert])
def test_tau_zero_equals_eager_attention(family, mask):
    model = tiny(family)
    inputs, real = inputs_of(mask)
    assert_close(logits(model, "mala", inputs, tau=0)[real], logits(model, "eager", inputs)[real], **NOISE)


@pytest.mark.parametrize("mask", ["plain", "left", "holes"])
@pytest.mark.parametrize("family", DECODERS)
def test_mala_equals_the_reference_where_tiles_are_skipped(family, mask):
    model = tiny(family, peaked=4)
    inputs, real = inputs_of(mask)
    out = logits(model, "mala", inputs, tile=SMALL_TILE)
    assert_close(out[real], logits(model, "mala_reference", inputs, tile=SMALL_TILE)[real], **NOISE)
    assert work_of(model, inputs, tile=SMALL_TILE).work_fraction < 1
    assert (out - logits(model, "mala", inputs, tau=0))[real].abs().max() > 1e-3


@pytest.mark.parametrize("block", [(11, LENGTH), (0, 29), (5, 33)], ids=["left", "right", "both"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt_oss", "mistral"])
def test_a_padded_sequence_equals_the_same_sequence_alone(family, block):
    model = tiny(family, peaked=4)
    ids, (begin, end) = tokens(3, LENGTH), block
    mask = padding(LENGTH, (0, LENGTH), block, (0, 0))
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    batch = logits(
        model, "mala", {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids}, tile=SMALL_TILE
    )
    alone = {"input_ids": ids[1:2, begin:end]}
    assert_close(batch[1, begin:end], logits(model, "mala", alone, tile=SMALL_TILE)[0], **NOISE)
    assert work_of(model, alone, tile=SMALL_TILE).work_fraction < 1


def test_a_left_padded_batch_of_one_equals_the_sequence_alone():
    model = tiny("llama")
    ids, mask = tokens(1, LENGTH), padding(LENGTH, (7, LENGTH))
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    assert_close(logits(model, "mala", batch)[0, 7:], logits(model, "mala", {"input_ids": ids[:, 7:]})[0], **NOISE)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_half_padded_bfloat16_is_finite_and_as_close_as_eager(family):
    model = tiny(family)
    inputs = {"input_ids": tokens(2, LENGTH), "attention_mask": padding(LENGTH, (0, LENGTH), (LENGTH // 2, LENGTH))}
    real = inputs["attention_mask"].bool()
    exact = logits(model, "eager", inputs)[real]
    model.bfloat16()
    out = logits(model, "mala", inputs, tau=0)
    assert out.isfinite().all()
    error, baseline = ((x[real] - exact).norm() for x in (out, logits(model, "eager", inputs)))
    assert error <= 1.2 * baseline


@pytest.mark.parametrize("name", ["mala", "mala_reference"])
def test_an_encoder_decoder_equals_eager_in_encoder_decoder_and_cross_attention(name):
    model = tiny(bart)
    inputs = {
        "input_ids": tokens(2, LENGTH),
        "attention_mask": padding(LENGTH, (0, LENGTH), (0, 23)),
        "decoder_input_ids": tokens(2, 9, seed=1),
    }
    assert_close(logits(model, name, inputs, tau=0), logits(model, "eager", inputs), **NOISE)
    assert len(work_of(model, inputs).layers) == 6


def test_an_encoder_decoder_with_a_padded_decoder_equals_eager():
    model = tiny(bart)
    inputs = {
        "input_ids": tokens(2, 12),
        "decoder_input_ids": tokens(2, 9),
        "decoder_attention_mask": padding(9, (0, 9), (0, 5)),
    }
    real = inputs["decoder_attention_mask"].bool()
    assert_close(logits(model, "mala", inputs, tau=0)[real], logits(model, "eager", inputs)[real], **NOISE)


def test_a_decoder_made_bidirectional_attends_to_both_sides():
    model = tiny("llama")
    inputs = {"input_ids": tokens(2, LENGTH), "is_causal": False}
    out = logits(model, "mala", inputs, tau=0)
    assert_close(out, logits(model, "sdpa", inputs), **NOISE)
    assert (out - logits(model, "mala", {"input_ids": inputs["input_ids"]}, tau=0)).abs().max() > 1e-2


def test_a_window_shorter_than_the_sequence_changes_the_output():
    model = tiny("mistral")
    inputs = {"input_ids": tokens(1, LENGTH)}
    windowed = logits(model, "mala", inputs, tau=0)
    model.config.sliding_window = None
    assert (windowed - logits(model, "mala", inputs, tau=0))[:, 12:].abs().max() > 1e-2


def test_what_lies_in_a_masked_place_changes_nothing():
    model = tiny("llama", peaked=4)
    mask, ids = padding(LENGTH, (0, LENGTH), (11, LENGTH)), tokens(2, LENGTH)
    other = torch.where(mask.bool(), ids, tokens(2, LENGTH, seed=5))
    first, second = (
        logits(model, "mala", {"input_ids": x, "attention_mask": mask}, tile=SMALL_TILE) for x in (ids, other)
    )
    assert torch.equal(first[mask.bool()], second[mask.bool()])


@pytest.mark.parametrize("mask", ["plain", "left"])
def test_a_compiled_model_computes_the_same(mask):
    model, (inputs, real) = tiny("qwen2", peaked=4), inputs_of(mask)
    expected = logits(model, "mala", inputs, tau=0)
    model.config.mala = {"tau": 0}
    model.set_attn_implementation("mala")
    with torch.no_grad():
        out = torch.compile(model, backend="eager")(**inputs, use_cache=False).logits
    assert_close(out[real], expected[real], **NOISE)

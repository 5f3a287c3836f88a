# SPDX-License-Identifier: Apache-2.0
"""Packed sequences never see one another, however Transformers announces them; what only looks packed is left alone."""

from __future__ import annotations

import pytest
import torch
from models import NOISE, SMALL_TILE, attention, logits, tiny, tokens, work_of
from torch.testing import assert_close

from mala_hf.ops.hf_mask import PACKING_DTYPE, read_positions

pytestmark = pytest.mark.transformers

LENGTHS = [17, 1, 22, 9]
TOTAL = sum(LENGTHS)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
CU_SEQLENS = torch.tensor([0, 17, 18, 40, TOTAL], dtype=torch.int32)
FLASH = {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS, "max_length_q": 22, "max_length_k": 22}
ANNOUNCED = {
    "positions": {"position_ids": POSITIONS, "use_cache": False},
    "positions beside a cache": {"position_ids": POSITIONS, "use_cache": True},
    "boundaries": {"position_ids": POSITIONS, "use_cache": False, **FLASH},
    "boundaries beside a cache": {"position_ids": POSITIONS, "use_cache": True, **FLASH},
    "positions from two": {"position_ids": POSITIONS + 2, "use_cache": True},
}
FAMILIES = ["llama", "qwen2", "qwen2_moe", "mistral", "gemma2", "gpt_oss", "phi3"]


def run(model, ids: torch.Tensor, inputs: dict, **mala) -> torch.Tensor:
    with torch.no_grad(), attention(model, "mala", **mala):
        return model(ids, **inputs).logits


@pytest.mark.parametrize("announced", ANNOUNCED)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_equal_each_sequence_alone(family, announced):
    if family == "qwen2_moe" and announced.startswith("positions") and ANNOUNCED[announced]["use_cache"]:
        pytest.skip(
            "its sliding layers need a square mask, which Transformers makes without the packing if there is a cache"
        )
    model, ids = tiny(family), tokens(1, TOTAL)
    alone = [logits(model, "eager", {"input_ids": part}) for part in ids.split(LENGTHS, 1)]
    assert_close(run(model, ids, ANNOUNCED[announced], tau=0), torch.cat(alone, 1), **NOISE)


@pytest.mark.parametrize("announced", ANNOUNCED)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_packing_changes_no_skip(family, announced):
    model, ids = tiny(family, peaked=4), tokens(1, TOTAL)
    alone = [logits(model, "mala", {"input_ids": part}, tile=SMALL_TILE) for part in ids.split(LENGTHS, 1)]
    assert_close(run(model, ids, ANNOUNCED[announced], tile=SMALL_TILE), torch.cat(alone, 1), **NOISE)
    assert work_of(model, {"input_ids": ids, "position_ids": POSITIONS}, tile=SMALL_TILE).work_fraction < 1


def test_a_packed_batch_needs_no_square_mask():
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

    config = LlamaConfig()
    config._attn_implementation = "mala"
    embeddings = torch.empty(1, TOTAL, 0)
    name = "past_key_values" if "past_key_values" in create_causal_mask.__code__.co_varnames else "cache"
    mask = create_causal_mask(config, embeddings, None, **{name: None}, position_ids=POSITIONS)
    assert mask.dtype == PACKING_DTYPE
    assert mask.shape == (1, TOTAL)


def test_several_packed_rows_stay_apart():
    model, ids = tiny("llama"), tokens(2, TOTAL)
    position_ids = torch.cat([POSITIONS, torch.arange(TOTAL)[None]])
    out = run(model, ids, {"position_ids": position_ids, "use_cache": False}, tau=0)
    alone = torch.cat([logits(model, "eager", {"input_ids": part}) for part in ids[:1].split(LENGTHS, 1)], 1)
    assert_close(out, torch.cat([alone, logits(model, "eager", {"input_ids": ids[1:]})]), **NOISE)


def test_packed_gradients_equal_those_of_each_sequence_alone():
    ids = tokens(1, TOTAL)
    gradients = []
    for packed in (True, False):
        model = tiny("llama", attention="mala")
        parts = (
            [(ids, {"position_ids": POSITIONS, "use_cache": False})]
            if packed
            else [(x, {}) for x in ids.split(LENGTHS, 1)]
        )
        sum(model(x, **more).logits.square().sum() for x, more in parts).backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, atol=1e-3 * other.abs().max().item(), rtol=1e-3)


@pytest.mark.parametrize(
    "positions",
    [[5, 6, 7, 8], [0, 1, 3, 4], [0, 1, 2, 2], [3, 2, 1, 0], [0, 1, 5, 6], [1, 1, 0, 1], [0, 1, 1, 2]],
    ids=str,
)
def test_positions_that_are_no_packing_are_left_alone(positions):
    """Also where the upstream rule (any step that is not one) sees a boundary: a doubt is no reason to cut."""
    assert read_positions(torch.tensor([positions])) is None


def test_packing_is_read_from_positions():
    packing = read_positions(POSITIONS + 3)
    assert packing.cu_seqlens.tolist() == CU_SEQLENS.tolist()
    assert packing.max_seqlen == 22


def adapter_output(position_ids: torch.Tensor | None, batch: int = 1, **kwargs) -> torch.Tensor:
    from mala_hf.ops.hf import mala_attention_forward

    query, key, value = torch.randn(3, batch, 2, TOTAL, 8, generator=torch.Generator().manual_seed(0))
    return mala_attention_forward(torch.nn.Module(), query, key, value, None, position_ids=position_ids, **kwargs)[0]


def test_boundaries_need_no_positions_and_no_longest_sequence():
    packed = adapter_output(POSITIONS)
    assert torch.equal(adapter_output(None, **FLASH), packed)
    assert torch.equal(adapter_output(None, cu_seq_lens_q=CU_SEQLENS, cu_seq_lens_k=CU_SEQLENS), packed)


def test_positions_of_other_shapes_are_ignored():
    plain = adapter_output(None)
    for position_ids in (POSITIONS.expand(3, 1, -1), POSITIONS.expand(2, -1), POSITIONS[:, :9]):
        assert torch.equal(adapter_output(position_ids), plain)
    assert (adapter_output(POSITIONS) - plain).abs().max() > 1e-2


def test_only_a_batch_of_one_is_packed():
    assert torch.equal(adapter_output(POSITIONS, batch=2), adapter_output(None, batch=2))
    with pytest.raises(ValueError, match="batch of 1"):
        adapter_output(None, batch=2, **FLASH)


def test_positions_written_to_between_forwards_are_read_again():
    position_ids = POSITIONS.clone()
    packed = adapter_output(position_ids)
    position_ids.copy_(torch.arange(TOTAL))
    assert (adapter_output(position_ids) - packed).abs().max() > 1e-2


def test_padding_and_packing_together_are_refused():
    mask = torch.ones(1, TOTAL, dtype=torch.long)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="one of them"):
        run(tiny("llama"), tokens(1, TOTAL), {"attention_mask": mask, **FLASH})

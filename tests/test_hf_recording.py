# SPDX-License-Identifier: Apache-2.0
"""The work report: what it counts, over what, and what it says."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from models import SMALL_TILE, bart, padding, tiny, tokens
from torch.testing import assert_close

from mala_hf import MalaConfig, ops, patch_model, record_work
from mala_hf.ops import hf
from mala_hf.ops.hf_heads import HeadWork
from mala_hf.recorded_layer import LayerWork

pytestmark = pytest.mark.transformers


def recorded(model, *inputs: dict, **mala):
    model.config.mala = {"tile": SMALL_TILE, **mala}
    model.set_attn_implementation("mala")
    with torch.no_grad(), record_work(model) as report:
        for each in inputs:
            model(**each)
    return report


def attention_work(lengths: list[int]) -> list[ops.Work]:
    generator = torch.Generator().manual_seed(0)
    works = []
    for length in lengths:
        q, k, v = (3 * torch.randn(2, length, 2, 8, generator=generator) for _ in range(3))
        works.append(ops.mala_attn_func(q, k, v, causal=True, tile=(4, 4), return_work=True)[1])
    return works


@pytest.mark.parametrize(
    "wrong", [None, "model", torch.nn.Linear(2, 2)], ids=["None", "a name", "no Transformers model"]
)
def test_what_holds_no_transformers_model_is_refused_before_the_block_runs(wrong):
    with (
        pytest.raises(ValueError, match=f"takes a Transformers model.* got a {type(wrong).__name__}"),
        record_work(wrong),
    ):
        pytest.fail("the block ran")


def test_a_layers_numbers_are_means_over_all_rows_of_all_forwards():
    layer, works = LayerWork("attention", 0), attention_work([40, 24])
    for work in works:
        layer.add([HeadWork(work, 1.0, (0, 1), 2)])
    rows = torch.tensor([80.0, 48.0], dtype=torch.float64)
    assert layer.rows == 128
    for name in ("key_slots_per_query", "visible_slots_per_query"):
        each = torch.stack([getattr(work, name).double().mean(0) for work in works])
        assert_close(getattr(layer, name), (each * rows[:, None]).sum(0) / rows.sum())
    bounds = torch.cat([work.omitted_mass_bound.transpose(0, 1).flatten(1) for work in works], 1).double()
    assert_close(layer.omitted_mass_bound_mean, bounds.mean(1))
    exact = bounds.quantile(0.95, dim=1, interpolation="higher")
    assert (exact > 0).all()
    assert (layer.omitted_mass_bound_p95 >= bounds.quantile(0.95, dim=1, interpolation="lower")).all()
    assert (layer.omitted_mass_bound_p95 <= 1.06 * exact).all()
    assert (layer.work_fraction < 1).all()


def test_places_without_a_row_do_not_count():
    """Padding would pull the percentile down."""
    model, ids = tiny("llama", peaked=4), tokens(2, 40)
    mask = padding(40, (30, 40), (0, 40))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = recorded(model, {"input_ids": ids, "attention_mask": mask, "position_ids": positions}).layers[1]
    alone = recorded(model, {"input_ids": ids[:1, 30:]}, {"input_ids": ids[1:]}).layers[1]
    assert padded.rows == alone.rows == 50
    for name in ("key_slots_per_query", "omitted_mass_bound_mean", "omitted_mass_bound_p95"):
        assert_close(getattr(padded, name), getattr(alone, name), rtol=1e-3, atol=1e-6)


def test_generation_accumulates_prefill_and_decoding():
    model = tiny("llama", attention="mala")
    with record_work(model) as report:
        model.generate(tokens(2, 30), max_new_tokens=5, do_sample=False)
    assert report.layers[0].forwards == 5
    assert report.layers[0].rows == 2 * (30 + 4)
    assert len(report.layers[0].tiles) == 2


def test_only_the_models_own_layers_are_recorded_and_blocks_nest():
    one, other = (tiny("llama", attention="mala") for _ in range(2))
    with record_work(one) as outer:
        one(tokens(1, 9))
        with record_work(one) as inner, record_work(other) as elsewhere:
            one(tokens(1, 9))
            other(tokens(1, 5))
    one(tokens(1, 9))
    assert (outer.layers[0].forwards, inner.layers[0].forwards, elsewhere.layers[0].forwards) == (2, 1, 1)
    assert elsewhere.layers[0].rows == 5


def test_recording_stops_also_after_an_error():
    model = tiny("llama", attention="mala")
    with pytest.raises(KeyError), record_work(model):
        raise KeyError
    assert hf.recorders == []


def test_recording_changes_no_output():
    model = tiny("llama", peaked=4, attention="mala")
    plain = model(tokens(1, 30)).logits
    with record_work(model):
        assert torch.equal(model(tokens(1, 30)).logits, plain)


def test_a_report_says_per_layer_and_head_what_was_done():
    report = recorded(tiny("llama", peaked=4), {"input_ids": tokens(1, 60)}, layers={"0": "sdpa"}, tau=0.5)
    text = str(report)
    print(text)
    layer = report.layers[1]
    assert " ".join(f"{100 * fraction:.0f}" for fraction in layer.work_fraction.tolist()) in text
    assert all(said in text for said in ("4x4", "blockwise", "0.5", "dense", f"{layer.key_slots_per_query.mean():.1f}"))
    values = json.loads(json.dumps(report.to_dict()))
    assert [each["index"] for each in values["layers"]] == [0, 1]
    assert len(values["layers"][1]["work_fraction"]) == 4
    assert values["layers"][1]["tiles"] == [[4, 4]]
    assert 0 < values["work_fraction"] < 1


def test_layers_of_an_encoder_decoder_go_by_name():
    model = tiny(bart, attention="mala")
    with record_work(model) as report:
        model(tokens(1, 9), decoder_input_ids=tokens(1, 5))
    assert "model.decoder.layers.0.encoder_attn" in report.layers
    assert len(report.layers) == 6


def test_a_model_that_runs_something_else_has_an_empty_report_that_says_so():
    model = tiny("llama", attention="sdpa")
    with record_work(model) as report:
        model(tokens(1, 9))
    assert not report.layers
    assert str(report) == "no attention layer of this model ran MALA"


def test_packed_sequences_are_recorded():
    positions = torch.cat([torch.arange(30), torch.arange(20)])[None]
    report = recorded(
        tiny("llama", peaked=4), {"input_ids": tokens(1, 50), "position_ids": positions, "use_cache": False}
    )
    assert report.layers[0].rows == 50
    assert report.work_fraction < 1


def test_a_forward_in_another_thread_is_recorded():
    """Streaming runs generation in a thread of its own."""
    model = tiny("llama")
    model.set_attn_implementation("mala")
    with record_work(model) as report:
        thread = threading.Thread(target=lambda: model(tokens(1, 8)))
        thread.start()
        thread.join()
    assert len(report.layers) == 2


def test_rows_that_see_nothing_leave_a_readable_report():
    report = recorded(tiny("llama"), {"input_ids": tokens(1, 8), "attention_mask": torch.zeros(1, 8, dtype=torch.long)})
    assert report.work_fraction == 1.0
    assert "nan" not in str(report)


def test_training_reports_what_it_keeps_for_backward():
    model, ids = tiny("llama", peaked=4), tokens(2, 40)
    patch_model(model, MalaConfig(tile=(4, 4)))
    reports = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad), record_work(model) as report:
            model(ids)
            model(ids[:, :10])
        reports.append(report)
    # 2 sequences, 4 heads, 10 query tiles, one word of 4 bytes for 10 key tiles
    assert [work.support_bytes for work in reports[0].layers.values()] == [2 * 4 * 10 * 4] * 2
    assert str(reports[0]).endswith("blockwise; 640 bytes kept for backward")
    assert str(reports[1]).endswith("blockwise")

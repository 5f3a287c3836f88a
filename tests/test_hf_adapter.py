# SPDX-License-Identifier: Apache-2.0
"""The adapter called as a layer calls it: every argument that changes attention is honoured or refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from mala_hf.ops import hf
from mala_hf.ops.hf import mala_attention_forward, mala_reference_attention_forward

pytestmark = pytest.mark.transformers

NUM_HEADS, NUM_KV_HEADS, LENGTH, HEAD_DIM = 4, 2, 24, 8


class Config:
    """A model's config."""

    def __init__(self, **mala):
        self.mala = mala


class Layer(torch.nn.Module):
    """What an attention layer shows of itself."""

    def __init__(self, causal: bool | None = True, layer_idx: int | None = 0, **mala):
        super().__init__()
        self.config = Config(**{"tau": 0, **mala})
        self.layer_idx = layer_idx
        if causal is not None:
            self.is_causal = causal


def inputs(rows: int = LENGTH, v_head_dim: int = HEAD_DIM, batch: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (NUM_HEADS, rows, HEAD_DIM), (NUM_KV_HEADS, LENGTH, HEAD_DIM), (NUM_KV_HEADS, LENGTH, v_head_dim)
    return tuple(2 * torch.randn(batch, *shape, generator=generator) for shape in shapes)


def full(query, key, value, mask, **options) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True, **options).transpose(1, 2)


def band(rows: int, left: int, right: int) -> torch.Tensor:
    """Legal pairs of a window, the last row aligned with the last key."""
    distance = torch.arange(LENGTH) - (torch.arange(rows)[:, None] + LENGTH - rows)
    return (distance >= -left) & (distance <= right)


@pytest.mark.parametrize("forward", [mala_attention_forward, mala_reference_attention_forward])
@pytest.mark.parametrize("rows", [LENGTH, 7, 1])
@pytest.mark.parametrize("window", [None, 5])
def test_causal_and_windowed_rows_are_aligned_with_the_last_key(rows, window, forward):
    out, weights = forward(Layer(), *inputs(rows), None, sliding_window=window)
    assert weights is None
    assert out.shape == (2, rows, NUM_HEADS, HEAD_DIM)
    assert_close(out, full(*inputs(rows), band(rows, LENGTH if window is None else window - 1, 0)))


def test_the_causal_argument_wins_over_the_layer_and_the_layer_over_the_default():
    causal, everything = (full(*inputs(), band(LENGTH, LENGTH, right)) for right in (0, LENGTH))
    for layer, argument, expected in (
        (Layer(causal=True), None, causal),
        (Layer(causal=False), None, everything),
        (Layer(causal=None), None, causal),
        (Layer(causal=True), False, everything),
        (Layer(causal=False), True, causal),
    ):
        assert_close(mala_attention_forward(layer, *inputs(), None, is_causal=argument)[0], expected)


def test_a_window_of_a_bidirectional_layer_reaches_both_sides():
    out = mala_attention_forward(Layer(causal=False), *inputs(), None, sliding_window=5)[0]
    assert_close(out, full(*inputs(), band(LENGTH, 4, 4)))


def test_scaling_is_used_and_none_means_the_default():
    everything = band(LENGTH, LENGTH, 0)
    for scaling in (None, 0.1):
        out = mala_attention_forward(Layer(), *inputs(), None, scaling=scaling)[0]
        assert_close(out, full(*inputs(), everything, scale=scaling))


def weights_of(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~band(LENGTH, LENGTH, 0), -torch.inf).softmax(-1)


def scores_of(query, key, value) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = (x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for x in (key, value))
    return query @ key.mT * HEAD_DIM**-0.5, value


def test_softcap_bounds_the_scores():
    scores, value = scores_of(*inputs())
    expected = weights_of(1.5 * torch.tanh(scores / 1.5)) @ value
    assert_close(mala_attention_forward(Layer(), *inputs(), None, softcap=1.5)[0], expected.transpose(1, 2))


def test_attention_sinks_take_their_share_of_each_row():
    sinks = torch.tensor([-1.0, 0.0, 1.0, 3.0])
    scores, value = scores_of(*inputs())
    scores = scores.masked_fill(~band(LENGTH, LENGTH, 0), -torch.inf)
    with_sink = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(2, -1, LENGTH, 1)], -1).softmax(-1)
    expected = with_sink[..., :-1] @ value
    assert_close(mala_attention_forward(Layer(), *inputs(), None, s_aux=sinks)[0], expected.transpose(1, 2))


def test_values_may_be_wider_or_narrower_than_keys():
    for v_head_dim in (4, 20):
        out = mala_attention_forward(Layer(), *inputs(v_head_dim=v_head_dim), None)[0]
        assert_close(out, full(*inputs(v_head_dim=v_head_dim), band(LENGTH, LENGTH, 0)))


def test_views_of_a_fused_projection_are_taken_as_they_are():
    query, key, value = inputs()
    expected = mala_attention_forward(Layer(), query, key, value, None)[0]
    fused = torch.cat([x.transpose(1, 2).flatten(2) for x in (query, key, value)], -1)
    sizes = [x.shape[1] * HEAD_DIM for x in (query, key, value)]
    views = [x.unflatten(2, (-1, HEAD_DIM)).transpose(1, 2) for x in fused.split(sizes, -1)]
    assert_close(mala_attention_forward(Layer(), *views, None)[0], expected)
    strided = [x.mT.contiguous().mT for x in (query, key, value)]
    assert_close(mala_attention_forward(Layer(), *strided, None)[0], expected)


def test_query_and_key_left_in_float32_follow_the_value():
    query, key, value = inputs()
    out = mala_attention_forward(Layer(), query, key, value.bfloat16(), None)[0]
    assert out.dtype == torch.bfloat16
    rounded = mala_attention_forward(Layer(), query.bfloat16(), key.bfloat16(), value.bfloat16(), None)[0]
    assert torch.equal(out, rounded)


def test_under_autocast_everything_takes_its_dtype_and_scores_stay_in_float32():
    query, key, value = inputs()
    expected = mala_attention_forward(Layer(), *(x.bfloat16() for x in (query, key, value)), None)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for mixed in ((query, key, value.bfloat16()), (query, key, value)):
            out = mala_attention_forward(Layer(), *mixed, None)[0]
            assert torch.equal(out, expected)


def test_dropout_is_refused_with_what_to_set():
    with pytest.raises(ValueError, match=r"attention_dropout.* to 0"):
        mala_attention_forward(Layer(), *inputs(), None, dropout=0.1)


@pytest.mark.parametrize("name", ["position_bias", "indices", "block_indices", "sinks"])
def test_what_changes_attention_and_is_not_covered_is_refused(name):
    mala_attention_forward(Layer(), *inputs(), None, **{name: None})
    with pytest.raises(ValueError, match=name):
        mala_attention_forward(Layer(), *inputs(), None, **{name: torch.zeros(1)})


def test_other_arguments_are_ignored():
    out = mala_attention_forward(
        Layer(), *inputs(), None, use_cache=True, num_items_in_batch=torch.tensor(3), output_router_logits=True
    )[0]
    assert torch.equal(out, mala_attention_forward(Layer(), *inputs(), None)[0])


def test_asking_for_weights_warns_once_and_gives_none():
    hf._warn_no_weights.cache_clear()
    with pytest.warns(UserWarning, match="eager"):
        assert mala_attention_forward(Layer(), *inputs(), None, output_attentions=True)[1] is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mala_attention_forward(Layer(), *inputs(), None, output_attentions=True)


def test_distributed_tensors_are_refused():
    class DTensor(torch.Tensor):
        pass

    query, key, value = inputs()
    with pytest.raises(ValueError, match="local"):
        mala_attention_forward(Layer(), query.as_subclass(DTensor), key, value, None)


def test_an_integer_or_string_index_finds_a_layers_setting():
    for layers in ({1: 0.25}, {"1": 0.25}):
        assert hf.layer_settings(Layer(layer_idx=1, tau=2.0, layers=layers)).common.tau == 0.25
        assert hf.layer_settings(Layer(layer_idx=0, tau=2.0, layers=layers)).common.tau == 2.0
        assert hf.layer_settings(Layer(layer_idx=None, tau=2.0, layers=layers)).common.tau == 2.0


def test_a_layer_without_any_setting_has_tau_one():
    assert hf.layer_settings(torch.nn.Module()).common.tau == 1
    layer = Layer()
    del layer.config.mala
    assert hf.layer_settings(layer).common.tau == 1


@pytest.mark.parametrize(
    "mala",
    [{"tua": 1.0}, {"layers": {"0": "dense"}}, {"tau": -1.0}, {"tau": float("nan")}, {"tau": "1"}, {"tile": [3, 4]}],
)
def test_a_setting_that_means_nothing_is_an_error(mala):
    with pytest.raises(ValueError, match=r"config\.mala|tau|tile"):
        mala_attention_forward(Layer(**mala), *inputs(), None)


DENSE = {"layers": {"0": "sdpa"}}


@pytest.mark.parametrize("rows", [LENGTH, 7, 1])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", ["none", "left", "right", "square", "bidirectional"])
def test_a_dense_layer_sees_the_same_pairs(kind, window, rows):
    mask = None
    if kind in ("left", "right"):
        mask = torch.ones(2, LENGTH, dtype=torch.bool)
        mask[1, slice(0, 5) if kind == "left" else slice(LENGTH - 5, None)] = False
    elif kind == "square":
        mask = torch.rand(2, 1, rows, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.3
    options = {"sliding_window": window, "is_causal": kind != "bidirectional", "scaling": 0.2}
    expected = mala_attention_forward(Layer(), *inputs(rows), mask, **options)[0]
    assert_close(mala_attention_forward(Layer(**DENSE), *inputs(rows), mask, **options)[0], expected)


def test_a_dense_layer_keeps_packed_sequences_apart():
    cu_seqlens = torch.tensor([0, 5, 6, 20, LENGTH], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 14, "max_length_k": 14}
    for window in (None, 3):
        expected = mala_attention_forward(Layer(), *inputs(batch=1), None, sliding_window=window, **lengths)[0]
        assert_close(
            mala_attention_forward(Layer(**DENSE), *inputs(batch=1), None, sliding_window=window, **lengths)[0],
            expected,
        )


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"s_aux": torch.zeros(NUM_HEADS)}])
def test_a_dense_layer_without_what_it_needs_is_refused(options):
    with pytest.raises(ValueError, match="tau to 0"):
        mala_attention_forward(Layer(**DENSE), *inputs(), None, **options)


def test_gradients_reach_query_key_value_and_sinks():
    leaves = [x.requires_grad_() for x in (*inputs(), torch.zeros(NUM_HEADS))]
    scores, value = scores_of(*leaves[:3])
    scores = scores.masked_fill(~band(LENGTH, LENGTH, 0), -torch.inf)
    sinks = leaves[3].view(1, -1, 1, 1).expand(2, -1, LENGTH, 1)
    expected = (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value).transpose(1, 2)
    out = mala_attention_forward(Layer(), *leaves[:3], None, s_aux=leaves[3])[0]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    for gradient, truth in zip(
        torch.autograd.grad((out * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        assert_close(gradient, truth, atol=1e-4, rtol=1e-4)

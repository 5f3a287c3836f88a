# SPDX-License-Identifier: Apache-2.0
"""The mask of a step over a static cache is two numbers for each sequence, and means the square mask of those lengths."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
import transformers as hf
from models import padding
from torch.testing import assert_close

from mala_hf.masks import mala_mask
from mala_hf.ops.hf import mala_attention_forward
from mala_hf.ops.hf_mask import lengths_mask

pytestmark = pytest.mark.transformers


def step_mask(config, **arguments) -> torch.Tensor | None:
    sizes = {
        "batch_size": 2,
        "q_length": 1,
        "kv_length": 30,
        "q_offset": torch.tensor(20),
        "allow_is_causal_skip": False,
    }
    return mala_mask(**sizes | arguments, config=config)


def test_the_mask_of_a_static_step_is_two_numbers_for_each_sequence():
    config = hf.LlamaConfig()
    assert step_mask(config).tolist() == [[[[0, 21]]]] * 2
    blocks = padding(21, (0, 21), (7, 21)).bool()
    assert step_mask(config, attention_mask=blocks)[:, 0, 0].tolist() == [[0, 21], [7, 21]]
    is_padding = padding(21, (0, 21), (0, 20)).bool()  # the new token of the second is none
    assert step_mask(config, attention_mask=is_padding)[:, 0, 0].tolist() == [[0, 21], [0, 0]]
    hole = blocks & (torch.arange(21) != 9)
    assert step_mask(config, attention_mask=hole).shape == (2, 1, 1, 30)


def test_models_that_compute_with_the_mask_get_a_row_for_each_query():
    if "allow_is_causal_skip=False" not in inspect.getsource(sys.modules[hf.DogeForCausalLM.__module__]):
        pytest.skip("this Transformers has no switch for it")
    mask = step_mask(hf.DogeConfig())
    assert mask.dtype == torch.bool
    assert mask[0, 0, 0].tolist() == [True] * 21 + [False] * 9


@pytest.mark.parametrize("settings", [{}, {"layers": {"*": "sdpa"}}], ids=["mala", "dense"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("new", [1, 5])
def test_a_lengths_mask_means_the_square_mask_of_its_lengths(new, window, settings):
    """The second sequence begins among the new tokens, the third has none."""
    module = torch.nn.Module()
    module.config = type("Config", (), {"mala": {"tau": 0.0, **settings}, "num_hidden_layers": 1})
    module.layer_idx = 0
    generator = torch.Generator().manual_seed(0)
    query, (key, value) = (
        torch.randn(3, 4, new, 8, generator=generator),
        torch.randn(2, 3, 2, 30, 8, generator=generator),
    )
    begin, end = torch.tensor([4, 18, 0]), torch.tensor([21, 21, 0])
    position = end[:, None, None] - new + torch.arange(new)[:, None]
    index = torch.arange(30)
    square = (index <= position) & (index >= begin[:, None, None]) & (index < end[:, None, None])
    if window is not None:
        square &= index > position - window
    out, _ = mala_attention_forward(module, query, key, value, lengths_mask(begin, end), sliding_window=window)
    expected, _ = mala_attention_forward(module, query, key, value, square[:, None])
    assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert not out[2].any()


def test_a_lengths_mask_of_another_shape_or_use_is_refused():
    query, key, value = torch.zeros(3, 2, 4, 1, 8)
    for mask, more in (
        (torch.zeros(2, 1, 1, 3), {}),
        (torch.zeros(1, 1, 1, 2), {}),
        (torch.zeros(2, 1, 1, 2), {"is_causal": False}),
    ):
        with pytest.raises(ValueError, match="gives the lengths"):
            mala_attention_forward(torch.nn.Module(), query, key, value, mask.int(), **more)

# SPDX-License-Identifier: Apache-2.0
"""How a MalaCache is compared with the DynamicCache that it stands for."""

from __future__ import annotations

import torch
import transformers as hf

from mala_hf import MalaCache
from mala_hf.ops import quantize_keys


def assert_like(cache: MalaCache, expected: hf.DynamicCache) -> None:
    """Equal keys and values; and the plane is that of the keys."""
    assert cache.get_seq_length() == expected.get_seq_length()
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        if other.get_seq_length() == 0:
            assert layer.get_seq_length() == 0
            continue
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, other.values)
        again = quantize_keys(layer.keys.transpose(1, 2))
        for x, fresh in zip(layer._store.views()[2:], again.tensors, strict=True):
            assert torch.equal(x, fresh)

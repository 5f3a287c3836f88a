# SPDX-License-Identifier: Apache-2.0
"""Each bad input gives one clear ValueError that says what was got; nothing is silently ignored."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mala_hf.ops import mala_attn_func, mala_attn_varlen_func, mala_attn_with_kvcache_func


def _tensor(*shape: int, **options) -> torch.Tensor:
    return torch.randn(*shape, **options)


def _int(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


GOOD = {"q": (2, 5, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 16)}
MASK = torch.ones(2, 4, 5, 7, dtype=torch.bool)

BAD = {
    # tensors
    "q is not a tensor": ({"q": [[1.0]]}, "q must be a tensor"),
    "q has three dimensions": ({"q": _tensor(2, 5, 16)}, "q must have 4 dimensions"),
    "v has five dimensions": ({"v": _tensor(2, 7, 2, 16, 1)}, "v must have 4 dimensions"),
    "q is an integer tensor": ({"q": torch.zeros(2, 5, 4, 16, dtype=torch.int32)}, "torch.int32"),
    "k is float8": ({"k": _tensor(2, 7, 2, 16).to(torch.float8_e4m3fn)}, "float8"),
    "q is complex": ({"q": torch.zeros(2, 5, 4, 16, dtype=torch.complex64)}, "complex"),
    "k has another dtype": ({"k": _tensor(2, 7, 2, 16, dtype=torch.float64)}, "share a dtype"),
    "v has another dtype": ({"v": _tensor(2, 7, 2, 16).half()}, "share a dtype"),
    "k is on another device": ({"k": torch.empty(2, 7, 2, 16, device="meta")}, "on one device"),
    "v is on another device": ({"v": torch.empty(2, 7, 2, 16, device="meta")}, "on one device"),
    "the last dimension is strided": ({"q": _tensor(2, 5, 4, 32)[..., ::2]}, "last dimension must be contiguous"),
    "k and v differ in length": ({"v": _tensor(2, 8, 2, 16)}, "k and v must agree"),
    "k and v differ in heads": ({"v": _tensor(2, 7, 1, 16)}, "k and v must agree"),
    "q and k differ in batch": ({"q": _tensor(3, 5, 4, 16)}, "batch size"),
    "q and k differ in head_dim": ({"q": _tensor(2, 5, 4, 32)}, "share head_dim"),
    "head counts do not divide": ({"q": _tensor(2, 5, 3, 16)}, "must divide.* 3 and 2"),
    "fewer query heads than key heads": ({"q": _tensor(2, 5, 1, 16)}, "must divide.* 1 and 2"),
    "no key heads": ({"k": _tensor(2, 7, 0, 16), "v": _tensor(2, 7, 0, 16)}, "must divide"),
    "head_dim too large": ({"q": _tensor(2, 5, 4, 320), "k": _tensor(2, 7, 2, 320)}, "head_dim must be 1 to 256"),
    "value head_dim too large": ({"v": _tensor(2, 7, 2, 257)}, "value head_dim must be 1 to 256"),
    # numbers
    "negative tau": ({"tau": -0.1}, "tau must be .*-0.1"),
    "NaN tau": ({"tau": math.nan}, "tau must be .*nan"),
    "infinite tau": ({"tau": math.inf}, "tau must be .*inf"),
    "tau is a string": ({"tau": "1"}, "tau must be"),
    "tau is None": ({"tau": None}, "tau must be"),
    "tau beyond any float": ({"tau": 10**400}, "tau must be"),
    "softmax_scale is a flag": ({"softmax_scale": True}, "softmax_scale"),
    "softcap is a flag": ({"softcap": True}, "softcap"),
    "softcap that caps nothing": ({"softcap": 1e6}, "softcap must be 0 .none. to 1000"),
    "window of flags": ({"window": (True, False)}, "window"),
    "tile with a flag": ({"tile": (True, 16)}, "tile"),
    "causal is a word": ({"causal": "False"}, "causal must be True or False, got 'False'"),
    "causal is a number": ({"causal": 1}, "causal must be True or False"),
    "return_lse is a word": ({"return_lse": "a"}, "return_lse must be True or False"),
    "return_work is None": ({"return_work": None}, "return_work must be True or False"),
    "tau of NumPy": ({"tau": np.float32(1)}, r"and a Python number \(int or float\), got .*1.0.* of type float32$"),
    "tau is a tensor": ({"tau": torch.tensor(1.0)}, r"a Python number .*, got tensor\(1.\) of type Tensor$"),
    "tau is a large tensor": ({"tau": torch.zeros(99, 99)}, r"a Python number .*, got .{60} of type Tensor$"),
    "tau beyond floats": ({"tau": 10**400}, r"tau must be .{0,70}, got an integer beyond the range of floats$"),
    "softmax_scale beyond what Python writes": ({"softmax_scale": 10**5000}, "got an integer beyond the range of floats$"),
    "softcap of NumPy": ({"softcap": np.float32(1)}, "softcap must be .* a Python number"),
    "zero softmax_scale": ({"softmax_scale": 0.0}, "softmax_scale"),
    "negative softmax_scale": ({"softmax_scale": -1.0}, "softmax_scale"),
    "NaN softmax_scale": ({"softmax_scale": math.nan}, "softmax_scale"),
    "negative softcap": ({"softcap": -5.0}, "softcap"),
    "NaN softcap": ({"softcap": math.nan}, "softcap"),
    "window of one": ({"window": (5,)}, "window"),
    "window below -1": ({"window": (-2, 0)}, "window"),
    "window of floats": ({"window": (4.0, 0.0)}, "window"),
    "window is a number": ({"window": 5}, "window"),
    "window is None": ({"window": None}, "window"),
    "tile is not a power of two": ({"tile": (48, 64)}, "tile must be two powers of two"),
    "tile of one": ({"tile": (64,)}, "tile must be two powers of two"),
    "tile of zero": ({"tile": (0, 64)}, "tile must be two powers of two"),
    "tile is a number": ({"tile": 64}, "tile must be two powers of two"),
    "unknown impl": ({"impl": "cuda"}, "impl must be .*'cuda'"),
    # sinks
    "sinks for the key heads": ({"sinks": _tensor(2)}, r"sinks must be .*\(4,\)"),
    "sinks with two dimensions": ({"sinks": _tensor(1, 4)}, r"sinks must be .*\(4,\)"),
    "integer sinks": ({"sinks": torch.zeros(4, dtype=torch.int64)}, "sinks must be floating-point"),
    "sinks on another device": ({"sinks": torch.empty(4, device="meta")}, "sinks must be on"),
    "sinks is a list": ({"sinks": [0.0, 0.0, 0.0, 0.0]}, "sinks must be"),
    # masks
    "additive mask": ({"mask": torch.zeros(2, 4, 5, 7)}, "mask must be bool"),
    "integer mask": ({"mask": torch.ones(2, 1, 1, 7, dtype=torch.int64)}, "mask must be bool"),
    "mask is a list": ({"mask": [[True]]}, "mask must be"),
    "mask of the wrong length": ({"mask": MASK[..., :6]}, "mask must be broadcastable"),
    "mask of the wrong heads": ({"mask": MASK[:, :2]}, "mask must be broadcastable"),
    "mask with five dimensions": ({"mask": MASK[None]}, "mask must be broadcastable"),
    "mask on another device": ({"mask": torch.ones(5, 7, dtype=torch.bool, device="meta")}, "mask must be on"),
    "mask with lengths": ({"mask": MASK, "seqused_k": _int(7, 7)}, "cannot be combined"),
    "mask with left padding": ({"mask": MASK, "leftpad_k": _int(0, 1)}, "cannot be combined"),
    # lengths
    "lengths of the wrong count": ({"seqused_k": _int(7)}, r"seqused_k must be .*\(2,\)"),
    "lengths with two dimensions": ({"seqused_q": _int(5, 5)[:, None]}, r"seqused_q must be .*\(2,\)"),
    "float lengths": ({"leftpad_k": torch.zeros(2)}, "leftpad_k must be an int32 or int64"),
    "lengths in a list": ({"seqused_k": [7, 7]}, "seqused_k must be an int32 or int64"),
    "lengths on another device": ({"seqused_k": torch.ones(2, dtype=torch.int32, device="meta")}, "seqused_k must be on"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_refused_with_what_was_got(name):
    changes, message = BAD[name]
    arguments = {key: _tensor(*shape) for key, shape in GOOD.items()} | changes
    q, k, v = (arguments.pop(key) for key in "qkv")
    with pytest.raises(ValueError, match=message):
        mala_attn_func(q, k, v, **arguments)


def test_the_arguments_that_the_bad_ones_are_varied_from_are_good():
    arguments = {key: _tensor(*shape) for key, shape in GOOD.items()}
    assert (
        mala_attn_func(**arguments, mask=MASK, sinks=_tensor(4), tau=0.5, window=(3, 3), tile=(16, 16)).isfinite().all()
    )


PACKED = {"q": (9, 4, 16), "k": (11, 2, 16), "v": (11, 2, 16)}
BAD_PACKED = {
    "four dimensions": ({"q": _tensor(1, 9, 4, 16)}, "q must have 3 dimensions"),
    "float boundaries": ({"cu_seqlens_q": torch.tensor([0.0, 9.0])}, "cu_seqlens_q must be an int32 or int64"),
    "boundaries in a list": ({"cu_seqlens_q": [0, 4, 9]}, "cu_seqlens_q must be"),
    "boundaries with two dimensions": ({"cu_seqlens_k": _int(0, 5, 11)[None]}, "cu_seqlens_k must be"),
    "boundaries that differ in count": ({"cu_seqlens_k": _int(0, 11)}, "cu_seqlens_k must be"),
    "boundaries on another device": ({"cu_seqlens_k": _int(0, 5, 11).to("meta")}, "cu_seqlens_k must be on"),
    "head counts do not divide": ({"q": _tensor(9, 3, 16)}, "must divide"),
    "negative tau": ({"tau": -1.0}, "tau must be"),
}


@pytest.mark.parametrize("name", BAD_PACKED)
def test_a_bad_packed_argument_is_refused_with_what_was_got(name):
    changes, message = BAD_PACKED[name]
    arguments = {key: _tensor(*shape) for key, shape in PACKED.items()}
    arguments |= {"cu_seqlens_q": _int(0, 4, 9), "cu_seqlens_k": _int(0, 5, 11)} | changes
    q, k, v = (arguments.pop(key) for key in "qkv")
    with pytest.raises(ValueError, match=message):
        mala_attn_varlen_func(q, k, v, **arguments)


BAD_BOUNDARIES = {
    "falling": {"cu_seqlens_q": _int(0, 9, 4)},
    "not from 0": {"cu_seqlens_q": _int(1, 4, 9)},
    "beyond the tensor": {"cu_seqlens_k": _int(0, 5, 12)},
}


@pytest.mark.parametrize("name", BAD_BOUNDARIES)
def test_boundaries_that_do_not_cover_the_tensor_are_refused(name):
    boundaries = {"cu_seqlens_q": _int(0, 4, 9), "cu_seqlens_k": _int(0, 5, 11)} | BAD_BOUNDARIES[name]
    with pytest.raises(ValueError, match="cu_seqlens"):
        mala_attn_varlen_func(*(_tensor(*shape) for shape in PACKED.values()), **boundaries)


def test_a_longest_sequence_that_is_too_short_is_refused():
    boundaries = {"cu_seqlens_q": _int(0, 4, 9), "cu_seqlens_k": _int(0, 5, 11)}
    for name in ("max_seqlen_q", "max_seqlen_k"):
        with pytest.raises(ValueError, match=name):
            mala_attn_varlen_func(
                *(_tensor(*shape) for shape in PACKED.values()), **boundaries, tile=(2, 2), **{name: 2}
            )


def _cache_arguments() -> dict:
    return {
        "q": _tensor(2, 1, 4, 16),
        "k_cache": _tensor(2, 12, 2, 16),
        "v_cache": _tensor(2, 12, 2, 16),
        "k": _tensor(2, 1, 2, 16),
        "v": _tensor(2, 1, 2, 16),
        "cache_seqlens": _int(3, 7),
    }


BAD_CACHE = {
    "k without v": ({"v": None}, "both or neither"),
    "v without k": ({"k": None}, "both or neither"),
    "a cache that needs a gradient": (
        {"k_cache": _tensor(2, 12, 2, 16, requires_grad=True)},
        "cannot require a gradient",
    ),
    "lengths in a list": ({"cache_seqlens": [3, 7]}, "cache_seqlens must be"),
    "lengths of the wrong count": ({"cache_seqlens": _int(3)}, "cache_seqlens must be"),
    "a full cache": ({"cache_seqlens": _int(3, 12)}, "cache"),
    "new keys of another width": ({"k": _tensor(2, 1, 2, 8)}, "k"),
    "new keys of another batch": ({"k": _tensor(1, 1, 2, 16)}, "k"),
    "new values longer than keys": ({"v": _tensor(2, 2, 2, 16)}, "v"),
    "new keys of another dtype": ({"k": _tensor(2, 1, 2, 16).double()}, "dtype"),
    "q is not a tensor": ({"q": None}, "q must be a tensor"),
}


@pytest.mark.parametrize("name", BAD_CACHE)
def test_a_bad_cache_argument_is_refused_with_what_was_got(name):
    changes, message = BAD_CACHE[name]
    arguments = _cache_arguments() | changes
    with pytest.raises(ValueError, match=message):
        mala_attn_with_kvcache_func(**arguments)


def test_new_keys_are_written_into_the_cache_and_attended():
    arguments = _cache_arguments()
    out, lse = mala_attn_with_kvcache_func(**arguments, return_lse=True)
    for b, length in enumerate((3, 7)):
        for name in "kv":
            assert torch.equal(arguments[f"{name}_cache"][b, length], arguments[name][b, 0])
        k, v = (arguments[name][b : b + 1, : length + 1] for name in ("k_cache", "v_cache"))
        alone, alone_lse = mala_attn_func(arguments["q"][b : b + 1], k, v, causal=True, return_lse=True)
        torch.testing.assert_close(out[b], alone[0])
        torch.testing.assert_close(lse[b], alone_lse[0])


def test_a_second_derivative_is_refused_instead_of_wrong():
    q, k, v = (_tensor(1, 8, 2, 16, requires_grad=True) for _ in range(3))
    (dq,) = torch.autograd.grad(mala_attn_func(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dq.sum(), k)


def test_nothing_is_written_into_the_cache_by_a_call_that_is_refused():
    bads = [{"tau": -1.0}, {"window": (-2, 0)}, {"tile": (3, 3)}, {"impl": "cuda"}, {"sinks": _tensor(3)}]
    bads += [
        {"discovery": "fp8"},
        {"discovery": "int8"},
        {"save_support": "x"},
        {"deterministic": None},
        {"return_work": "a"},
    ]
    for bad in bads:
        arguments = _cache_arguments()
        before = arguments["k_cache"].clone()
        with pytest.raises(ValueError):
            mala_attn_with_kvcache_func(**arguments, **bad)
        assert torch.equal(arguments["k_cache"], before)


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k", "leftpad_k"])
@pytest.mark.parametrize("length", [-1, 8])
def test_lengths_outside_the_tensors_are_refused(name, length):
    q, k, v = (_tensor(*shape) for shape in GOOD.values())
    with pytest.raises(ValueError, match=name):
        mala_attn_func(q, k, v, **{name: _int(1, length)})


def test_bfloat16_is_refused_by_the_interpreter():
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    q, k, v = (_tensor(1, 20, 2, 16).bfloat16() for _ in range(3))
    with pytest.raises(ValueError, match="interpreter multiplies bfloat16 wrongly"):
        mala_attn_func(q, k, v, impl="triton")

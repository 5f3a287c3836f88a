# SPDX-License-Identifier: Apache-2.0
"""The kernel as it is loaded from the Hub, or from a folder: LOCAL_KERNELS=mala-hf/mala-flash-attn=FOLDER pytest.

Outputs are compared with full attention at tau = 0, and with the kernel's own executable definition of the rule at tau = 1. The
repository's tests go further.
"""

import os

import kernels
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

REPOSITORY = os.environ.get("MALA_KERNEL", "mala-hf/mala-flash-attn")
mala = kernels.get_kernel(REPOSITORY, version=1, trust_remote_code=True)

pytestmark = pytest.mark.kernels_ci

TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2}


def qkv(device, dtype=torch.float32, seqlen=200, seed=0):
    """q (2, seqlen, 4, 64), k, v with 2 heads; tokens come in runs of similar ones, so that much can be skipped."""
    generator = torch.Generator().manual_seed(seed)
    topics = 1.5 * torch.randn(2, -(-seqlen // 20), 1, 64, generator=generator).repeat_interleave(20, 1)[:, :seqlen]
    q, k, v = (torch.randn(2, seqlen, heads, 64, generator=generator) for heads in (4, 2, 2))
    return [x.to(device, dtype) for x in (q + topics, k + topics, v)]


def full_attention(q, k, v, **options):
    """(batch, seqlen, heads, head_dim), in float32."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_tau_zero_is_full_attention(device, dtype):
    q, k, v = qkv(device, dtype)
    out = mala.mala_attn_func(q, k, v, tau=0.0, causal=True)
    torch.testing.assert_close(
        out.float(), full_attention(q, k, v, is_causal=True), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_tau_one_skips_and_agrees_with_the_rule(device):
    q, k, v = qkv(device)
    options = {"causal": True, "tile": (16, 16)}
    out, work = mala.mala_attn_func(q, k, v, return_work=True, **options)
    expected, exact = mala.mala_attn_func(q, k, v, return_work=True, impl="reference", **options)
    assert work.work_fraction.max() < 0.9
    assert (work.tiles != exact.tiles).float().mean() < 0.01  # a score at the threshold may fall on either side
    torch.testing.assert_close(out, expected, atol=5e-3, rtol=0)


def test_gradients_agree_with_full_attention_at_tau_zero(device):
    tensors = [x.requires_grad_() for x in qkv(device)]
    weight = torch.randn(2, 200, 4, 64, generator=torch.Generator().manual_seed(1)).to(device)
    outs = mala.mala_attn_func(*tensors, tau=0.0, causal=True), full_attention(*tensors, is_causal=True)
    for got, expected in zip(*(torch.autograd.grad((out * weight).sum(), tensors) for out in outs)):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_packed_sequences_do_not_see_one_another(device):
    q, k, v = (x[0] for x in qkv(device))
    lengths = torch.tensor([0, 70, 71, 200], dtype=torch.int32, device=device)
    out = mala.flash_attn_varlen_func(q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, causal=True, tau=0.0)
    bounds = zip(lengths.tolist(), lengths.tolist()[1:])
    parts = [full_attention(*(x[None, begin:end] for x in (q, k, v)), is_causal=True)[0] for begin, end in bounds]
    torch.testing.assert_close(out, torch.cat(parts), atol=5e-5, rtol=5e-5)


def test_decoding_over_pages_equals_the_last_rows_of_the_whole(device):
    q, k, v = qkv(device)
    pages, page = torch.randperm(2 * 13, generator=torch.Generator().manual_seed(2)).view(2, 13).to(device), 16
    caches = [torch.full((26, page, 2, 64), float("nan"), device=device) for _ in range(2)]
    for cache, x in zip(caches, (k, v)):
        padded = torch.cat([x[:, :199], torch.zeros(2, 13 * page - 199, 2, 64, device=device)], 1)
        cache[pages] = padded.view(2, 13, page, 2, 64)
    filled = torch.tensor([199, 199], dtype=torch.int32, device=device)
    out = mala.flash_attn_with_kvcache(
        q[:, 199:], *caches, k[:, 199:], v[:, 199:], cache_seqlens=filled, block_table=pages.int(), causal=True, tau=0.0
    )
    torch.testing.assert_close(out, full_attention(q, k, v, is_causal=True)[:, 199:], atol=5e-5, rtol=5e-5)


def test_a_compiled_call_is_one_graph(device):
    q, k, v = qkv(device)
    attend = torch.compile(lambda *call: mala.flash_attn_func(*call, causal=True), backend="aot_eager", fullgraph=True)
    assert torch.equal(attend(q, k, v), mala.flash_attn_func(q, k, v, causal=True))


def test_what_is_not_supported_is_refused(device):
    q, k, v = qkv(device)
    with pytest.raises(ValueError, match="dropout"):
        mala.flash_attn_func(q, k, v, dropout_p=0.1)

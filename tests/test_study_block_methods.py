# SPDX-License-Identifier: Apache-2.0
"""MoBA and NSA against their papers' definitions, one query at a time; routing against masks, and decode against the last query."""

import pytest
import torch
from torch.testing import assert_close

from mala_hf.studies.block_attention import block_attention, block_mask
from mala_hf.studies.moba import block_means, chosen_blocks, moba_attention, moba_decode, moba_slots
from mala_hf.studies.nsa import NSA, NSAShape, nsa_attention, nsa_decode, nsa_slots

SHAPE = NSAShape(compressed=8, stride=4, selected=16, count=4, window=20)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(seqlen, num_heads, num_kv_heads, batch=2, head_dim=8):
    return [normal(batch, seqlen, heads, head_dim, seed=i) for i, heads in enumerate((num_heads, *[num_kv_heads] * 2))]


def attend(query, keys, values):
    """Softmax attention of one query: (head_dim,) over (keys, head_dim)."""
    return (keys @ query * len(query) ** -0.5).softmax(0) @ values


def literal_moba(q, k, v, block, topk):
    """Lu et al., section 2.2, query by query."""
    out = torch.empty_like(q)
    for b, t, h in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        kv = h // (q.shape[2] // k.shape[2])
        own = t // block
        gates = {i: q[b, t, h] @ k[b, i * block : (i + 1) * block, kv].mean(0) for i in range(own)}
        chosen = {own, *sorted(gates, key=gates.get, reverse=True)[: topk - 1]}
        seen = [j for j in range(t + 1) if j // block in chosen]
        out[b, t, h] = attend(q[b, t, h], k[b, seen, kv], v[b, seen, kv])
    return out


@pytest.mark.parametrize("masked", [False, True], ids=["routed", "masked"])
@pytest.mark.parametrize(
    ("seqlen", "heads", "topk"), [(75, (4, 2), 3), (32, (2, 2), 2), (9, (2, 1), 4), (40, (2, 1), 1)]
)
def test_moba_is_the_definition_of_its_paper(masked, seqlen, heads, topk):
    q, k, v = inputs(seqlen, *heads)
    assert_close(moba_attention(q, k, v, block=16, topk=topk, masked=masked), literal_moba(q, k, v, 16, topk))


def test_gradients_of_routed_queries_are_those_of_the_mask():
    tensors = [x.requires_grad_() for x in inputs(75, 4, 2)]
    chosen = chosen_blocks(*tensors[:2], 16, 3)
    out = block_attention(*tensors, chosen, 16)
    do = normal(*out.shape, seed=7)
    found = torch.autograd.grad(out, tensors, do)
    q, k, v = (x.repeat_interleave(4 // x.shape[2], 2) for x in tensors)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
    p = scores.masked_fill(~block_mask(chosen, 75, 16), -torch.inf).softmax(-1)
    expected = torch.autograd.grad(torch.einsum("bhqk,bkhd->bqhd", p, v), tensors, do)
    assert_close(found, expected)


def test_a_new_token_of_moba_is_the_last_of_its_sequence():
    q, k, v = inputs(64, 4, 2)
    found = moba_decode(q[:, -1:], k, v, block_means(k, 16), block=16, topk=3)
    assert_close(found, literal_moba(q, k, v, 16, 3)[:, -1:])
    with pytest.raises(ValueError, match="does not end"):
        moba_decode(q[:, -1:], k[:, 1:], v[:, 1:], block_means(k, 16), block=16, topk=3)


def test_slots_of_moba_are_the_allowed_pairs():
    q, k, _ = inputs(75, 2, 2)
    allowed = block_mask(chosen_blocks(q, k, 16, 3), 75, 16)
    assert moba_slots(75, 16, 3) == pytest.approx(allowed.double().sum(-1).mean().item())


def literal_nsa(layer, x):
    """Yuan et al., equations 5 to 12, query by query, from the layer's weights."""
    shape, heads, kv_heads = layer.shape, layer.num_heads, layer.num_kv_heads
    batch, seqlen, width = x.shape
    dim, groups = width // heads, heads // kv_heads
    q = layer.query(x).view(batch, seqlen, heads, dim)
    kv = layer.key_values(x).view(batch, seqlen, 6, kv_heads, dim)
    gates = layer.gates(x).view(batch, seqlen, heads, 3).sigmoid()
    out = torch.zeros_like(q)
    for b, t, g in torch.cartesian_prod(*map(torch.arange, (batch, seqlen, kv_heads))).tolist():
        keys, values = kv[b, :, :3, g], kv[b, :, 3:, g]
        starts = [i for i in range(0, seqlen, shape.stride) if i + shape.compressed <= t + 1]
        blocks = [slice(i, i + shape.compressed) for i in starts]
        group = range(g * groups, (g + 1) * groups)
        importance = dict.fromkeys(range(t // shape.selected + 1), 0.0)
        for h in group:
            if not starts:
                continue
            small_k = torch.stack(
                [layer.compress_keys.mlp((keys[i, 0] + layer.compress_keys.places).flatten()) for i in blocks]
            )
            small_v = torch.stack(
                [layer.compress_values.mlp((values[i, 0] + layer.compress_values.places).flatten()) for i in blocks]
            )
            p = (small_k @ q[b, t, h] * dim**-0.5).softmax(0)
            out[b, t, h] += gates[b, t, h, 0] * (p @ small_v)
            for start, probability in zip(starts, p.tolist(), strict=True):
                for stride in range(start, start + shape.compressed, shape.stride):
                    importance[stride // shape.selected] += probability
        own = t // shape.selected
        always = {0, own, own - 1} & importance.keys()
        others = sorted(importance.keys() - always, key=lambda i: -importance[i])
        chosen = {*always, *others[: shape.count - len(always)]}
        seen = [j for j in range(t + 1) if j // shape.selected in chosen]
        recent = slice(max(0, t + 1 - shape.window), t + 1)
        for h in group:
            out[b, t, h] += gates[b, t, h, 1] * attend(q[b, t, h], keys[seen, 1], values[seen, 1])
            out[b, t, h] += gates[b, t, h, 2] * attend(q[b, t, h], keys[recent, 2], values[recent, 2])
    return layer.out(out.flatten(2))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_nsa_is_the_definition_of_its_paper(kv_heads):
    torch.manual_seed(0)
    layer, x = NSA(16, 2, SHAPE, kv_heads).double(), 3 * normal(1, 101, 16)
    with torch.no_grad():
        assert_close(layer(x), literal_nsa(layer, x))


def nsa_inputs(seqlen):
    torch.manual_seed(0)
    layer = NSA(16, 2, SHAPE, 1).double()
    q, *rest = inputs(seqlen, 2, 1)
    k, v = [(layer.compress_keys(x), 2 * x, 3 * x) for x in rest]
    return q, k, v, normal(2, seqlen, 2, 3, seed=9).sigmoid()


def test_nsa_routed_is_nsa_masked():
    arguments = nsa_inputs(101)
    routed = nsa_attention(*arguments, SHAPE)
    assert_close(routed, nsa_attention(*arguments, SHAPE, masked=True))
    assert_close(routed, nsa_attention(*arguments, SHAPE, rows=30))


def test_a_new_token_of_nsa_is_the_last_of_its_sequence():
    q, k, v, gates = nsa_inputs(112)
    expected = nsa_attention(q, k, v, gates, SHAPE, masked=True)[:, -1:]
    assert_close(nsa_decode(q[:, -1:], k, v, gates[:, -1:], SHAPE), expected)


def test_slots_of_nsa_are_counted_query_by_query():
    per_query = [
        len([i for i in range(0, 101, 4) if i + 8 <= t + 1]) + t % 16 + 1 + 16 * min(t // 16, 3) + min(t + 1, 20)
        for t in range(101)
    ]
    assert nsa_slots(101, SHAPE) == pytest.approx(sum(per_query) / 101)


@pytest.mark.parametrize("sizes", [{"count": 2}, {"stride": 5}, {"window": 0}])
def test_nsa_refuses_sizes_that_mean_nothing(sizes):
    with pytest.raises(ValueError, match="got NSAShape"):
        NSAShape(**sizes)

# SPDX-License-Identifier: Apache-2.0
"""The fuzz of caches: what a step writes, and that it attends as one over plain tensors does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from calls import NAN
from fuzz_inputs import FLOATS, TILES, drawn_settings, operands, placed, seeds, shapes
from hypothesis import strategies as st
from torch import Tensor

from mala_hf.ops import mala_attn_func, mala_attn_with_kvcache_func


@dataclass(frozen=True)
class Step:
    """Arguments of ``mala_attn_with_kvcache_func``, and the caches in one piece (batch, keys, kv_heads, dim)."""

    q: Tensor
    caches: tuple[Tensor, Tensor]
    new: tuple[Tensor, Tensor] | None
    lengths: Tensor
    block_table: Tensor | None
    options: dict

    def one_piece(self, cache: Tensor) -> Tensor:
        """A copy of a cache, page after page where it has pages."""
        if self.block_table is None:
            return cache.clone()
        return cache[self.block_table.long()].flatten(1, 2)


@st.composite
def steps(draw, dtypes=FLOATS, tiles=TILES) -> Step:
    """A step over caches whose unused part is NaN, in one piece or in pages in any order."""
    generator, dtype = seeds(draw), draw(st.sampled_from(dtypes))
    shape = draw(shapes(st.integers(1, 6), st.integers(1, 60), st.integers(1, 3)))
    q, k, v = operands(draw, shape, dtype, generator)
    lengths = torch.tensor([draw(st.integers(0, shape.seqlen_k)) for _ in range(shape.batch)])
    new_len = draw(st.sampled_from([0, 1, shape.seqlen_q]))
    new_len = min(new_len, shape.seqlen_k - int(lengths.max()))
    new = None
    if new_len > 0:
        sizes = ((shape.batch, new_len, shape.num_kv_heads, dim) for dim in (shape.head_dim, shape.v_head_dim))
        new = tuple(placed(torch.randn(*size, generator=generator).to(dtype), "gaps") for size in sizes)
    for b, length in enumerate(lengths.tolist()):
        k[b, length:], v[b, length:] = NAN, NAN
    options = {
        **drawn_settings(draw, shape, generator, tiles),
        "decode": draw(st.sampled_from(["auto", "single", "two_pass", "split"])),
    }
    if options["decode"] != "single":
        options["num_splits"] = draw(st.sampled_from([0, 1, 3]))
    if draw(st.booleans()):
        options["leftpad_k"] = (torch.rand(shape.batch, generator=generator) * (lengths + 1)).floor().to(torch.int32)
    lengths = lengths.to(draw(st.sampled_from([torch.int32, torch.int64])))
    if not draw(st.booleans()):
        return Step(q, (k, v), new, lengths, None, options)
    page = draw(st.sampled_from([1, 4, 7, 16]))
    per_sequence = -(-shape.seqlen_k // page)
    order = torch.randperm(shape.batch * per_sequence + 2, generator=generator)[: shape.batch * per_sequence]
    table = order.view(shape.batch, per_sequence)
    pages = []
    for x in (k, v):
        whole = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, per_sequence * page - shape.seqlen_k), value=NAN)
        stored = x.new_full((shape.batch * per_sequence + 2, page, *x.shape[2:]), NAN)
        stored[table.flatten()] = whole.reshape(-1, page, *x.shape[2:])
        pages.append(stored)
    if draw(st.booleans()):  # pages that nothing fills need not exist
        filled = torch.arange(per_sequence) * page < (lengths + new_len)[:, None]
        table = table.where(filled, -1)
    return Step(q, (pages[0], pages[1]), new, lengths, table.to(torch.int32), options)


def check_step(step: Step, impl: str) -> None:
    """The new tokens and nothing else are written; out and lse are those of the same call over plain tensors."""
    new_len = 0 if step.new is None else step.new[0].shape[1]
    caches = [x.clone() for x in step.caches]
    expected = []
    for index, cache in enumerate(step.caches):
        whole = step.one_piece(cache)
        if step.new is not None:
            for b, length in enumerate(step.lengths.tolist()):
                whole[b, length : length + new_len] = step.new[index][b]
        expected.append(whole)
    found = mala_attn_with_kvcache_func(
        step.q, *caches, *(step.new or ()), cache_seqlens=step.lengths, block_table=step.block_table, impl=impl,
        return_lse=True, **step.options,
    )  # fmt: skip
    for index, cache in enumerate(caches):
        whole = step.one_piece(cache)
        for b, length in enumerate(step.lengths.tolist()):
            filled = slice(0, length + new_len)
            assert torch.equal(whole[b, filled], expected[index][b, filled]), "the cache's content"
        written = new_len * step.q.shape[0] * cache[0, 0].numel()
        changed = ~((cache == step.caches[index]) | (cache.isnan() & step.caches[index].isnan()))
        assert int(changed.sum()) <= written, "more was written than the new tokens"
    plain = mala_attn_func(
        step.q, *expected, seqused_k=step.lengths + new_len, causal=step.options["causal"], impl=impl, return_lse=True,
        **{name: value for name, value in step.options.items() if name != "causal"},
    )  # fmt: skip
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)

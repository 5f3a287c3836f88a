# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode at tau = 1 beside torch's full attention:

    kernels benchmark mala-hf/mala-flash-attn@v1

The runner times ``verify_*``, which is full attention, as the reference, and demands that both outputs agree to 0.01. Inputs are
synthetic: tokens come in segments with keys and values of their own, and a query attends to its own segment and to two earlier ones.
The retained work decides the speed, so it is printed with each workload. Real models differ.
"""

import sys
from functools import partialmethod

import torch
from kernels.benchmark import Benchmark

SEGMENT = 128  # tokens that attend to one another
LINKS = 2  # earlier segments that a query's segment attends to
PEAK = (
    40.0  # score of a pair that belongs together; others stay near 0 with deviation 4, so what is skipped is below 0.01
)
NOISE = 0.7
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
ON_GPU = torch.cuda.is_available()


def peaked_inputs(seqlen: int, device: str):
    """q (1, seqlen, NUM_HEADS, HEAD_DIM), and k, v with NUM_KV_HEADS heads."""
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    amplitude = (PEAK * HEAD_DIM**0.5) ** 0.5
    segments = -(-seqlen // SEGMENT)
    codes = torch.nn.functional.normalize(torch.randn(segments, NUM_KV_HEADS, HEAD_DIM, device=device), dim=-1)
    by_head = codes.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1)
    earlier = torch.rand(LINKS, segments, device=device) * torch.arange(segments, device=device)
    wanted = torch.stack([by_head, *by_head[earlier.long()]], -2)  # (segments, NUM_HEADS, 1 + LINKS, HEAD_DIM)
    # the shortest query whose product with each wanted code is 1
    gram = wanted @ wanted.mT + 1e-3 * torch.eye(1 + LINKS, device=device)
    queries = (
        torch.linalg.solve(gram, torch.ones(1 + LINKS, 1, device=device).expand(*gram.shape[:3], 1)) * wanted
    ).sum(-2)

    def tokens(code):
        code = code.repeat_interleave(SEGMENT, 0)[:seqlen] * amplitude
        return (code + NOISE * torch.randn_like(code))[None].to(dtype)

    # a quarter: outputs in bfloat16 round by less than 0.01, and a segment more or less changes them by far more
    v = torch.randn_like(codes).repeat_interleave(SEGMENT, 0)[None, :seqlen] / 4
    return tokens(queries), tokens(codes), (v + torch.randn_like(v) / 8).to(dtype)


class Mala(Benchmark):
    """Each workload is a length; the methods are added below."""

    seed = 0

    def prepare(self, seqlen: int, rows: int) -> None:
        """Inputs of ``seqlen`` keys and the last ``rows`` queries, and what MALA retains of them."""
        q, self.k, self.v = peaked_inputs(seqlen, self.device)
        self.q = q[:, -rows:].contiguous()
        self.filled = torch.tensor([seqlen], dtype=torch.int32, device=self.device)
        _, work = self.kernel.mala_attn_func(self.q, self.k, self.v, causal=True, return_work=True)
        slots, share = work.key_slots_per_query.mean().item(), work.work_fraction.mean().item()
        print(
            f"  {rows:,} of {seqlen:,} tokens: {slots:,.0f} key slots per query retained, {share:.1%}", file=sys.stderr
        )

    def full_attention(self) -> torch.Tensor:
        """Causal attention through torch, (1, rows, NUM_HEADS, HEAD_DIM)."""
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        whole = q.shape[2] == k.shape[2]  # a last row alone sees every key
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=whole, enable_gqa=True)
        return out.transpose(1, 2)

    def prefill(self) -> None:
        """All rows."""
        self.out = self.kernel.mala_attn_func(self.q, self.k, self.v, causal=True)

    def decode(self) -> None:
        """One row over a filled cache."""
        self.out = self.kernel.mala_attn_with_kvcache_func(self.q, self.k, self.v, cache_seqlens=self.filled)


for name, seqlen in [
    ("prefill", 2048),
    ("decode", 2048),
    *([("prefill", 8192), ("prefill", 32768), ("prefill", 131072), ("decode", 32768)] if ON_GPU else []),
]:
    shape = {"seqlen": seqlen, "rows": seqlen if name == "prefill" else 1}
    setattr(Mala, f"setup_{name}_{seqlen}", partialmethod(Mala.prepare, **shape))
    setattr(Mala, f"benchmark_{name}_{seqlen}", getattr(Mala, name))
    setattr(Mala, f"verify_{name}_{seqlen}", Mala.full_attention)

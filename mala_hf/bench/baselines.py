# SPDX-License-Identifier: Apache-2.0
"""What MALA is compared with. Each baseline is one function of q, k, v (batch, seqlen, heads, head_dim); what is missing says why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # causal, the last query aligned with the last key
BLOCK = 128  # of FlexAttention's masks


def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    """Attention of torch. A single query sees all keys."""
    check_alignment(q, k)
    q, k, v = heads_first(q, k, v)
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)
    return out.transpose(1, 2)


def flex() -> Attention:
    """FlexAttention, compiled for each shape, with the blocks above the diagonal left out."""
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    compiled_for = None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_alignment(q, k)
        nonlocal compiled_for
        shapes = q.shape, k.shape, v.shape
        if shapes != compiled_for:
            torch._dynamo.reset()  # a function is compiled for eight shapes at most
            compiled_for = shapes
        blocks = causal_blocks(q.shape[1], q.device) if q.shape[1] > 1 else None
        q, k, v = heads_first(q, k, v)
        return compiled(q, k, v, block_mask=blocks, enable_gqa=True).transpose(1, 2)

    return attention


def fa4() -> Attention:
    """FlashAttention 4: the package flash-attn-4."""
    run = import_module("flash_attn.cute").flash_attn_func
    return lambda q, k, v: first(run(q, k, v, causal=True))


def flash_sparse() -> Attention:
    """The package flash-sparse-attn of the paper's authors, at the threshold 1."""
    run = import_module("flash_sparse_attn.ops.cute.interface").flash_attn_func
    return lambda q, k, v: first(run(q, k, v, is_causal=True, softmax_threshold=1.0))


LOADERS: dict[str, Callable[[], Attention]] = {
    "sdpa_cudnn": lambda: partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "sdpa_flash": lambda: partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "flex": flex,
    "fa4": fa4,
    "flash_sparse": flash_sparse,
}
NEED_GPU = ("sdpa_cudnn", "fa4", "flash_sparse")
SPARSE = ("flash_sparse",)  # the others are dense
PACKAGES = {"fa4": "--pre flash-attn-4", "flash_sparse": "'flash-sparse-attn[cute]'"}  # what pip would install


def load_baselines(
    names: Iterable[str], device: torch.device | None = None
) -> tuple[dict[str, Attention], dict[str, str]]:
    """The baselines of these names that import and run on ``device`` (None: a GPU), and for each other the reason why not.

    Raises ``ValueError`` for a name that is none.
    """
    found, missing = {}, {}
    for name in names:
        if name not in LOADERS:
            raise ValueError(f"baselines are {', '.join(LOADERS)}, got {name}")
        if name in NEED_GPU and device is not None and device.type != "cuda":
            missing[name] = f"it needs a GPU, and this runs on {device}"
            continue
        try:
            found[name] = LOADERS[name]()
        except Exception as error:  # a package that is there but broken may raise anything
            how = f"; not installed: pip install {PACKAGES[name]}" if isinstance(error, ModuleNotFoundError) else ""
            missing[name] = reason(error) + how
    return found, missing


def reason(error: Exception) -> str:
    """One line that says what went wrong."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def check_alignment(q: Tensor, k: Tensor) -> None:
    """Raise ``ValueError`` where torch's causal mask, aligned with the first key, would be another than ours."""
    if q.shape[1] not in (1, k.shape[1]):
        raise ValueError(f"this baseline takes one query or as many as keys, got {q.shape[1]} and {k.shape[1]}")


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, seqlen, heads, head_dim) as (batch, heads, seqlen, head_dim)."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The output of a function that may return more."""
    return out if isinstance(out, Tensor) else out[0]


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@lru_cache(maxsize=1)
def causal_blocks(seqlen: int, device: torch.device) -> BlockMask:
    """The causal mask as FlexAttention wants it: a block to test on the diagonal, and all before it. Nothing of seqlen^2 is formed."""
    blocks = -(-seqlen // BLOCK)
    rows = torch.arange(blocks, dtype=torch.int32, device=device)
    before = rows.expand(1, 1, blocks, blocks).contiguous()
    tested = before.clone()
    tested[..., 0] = rows  # the block on the diagonal
    num_tested = torch.ones(1, 1, blocks, dtype=torch.int32, device=device)
    num_before = rows[None, None].clone()
    if seqlen % BLOCK:  # the last row of blocks lacks queries, and torch tests all of it
        tested[..., -1, :] = rows
        num_tested[..., -1], num_before[..., -1] = blocks, 0
    return BlockMask.from_kv_blocks(
        num_tested, tested, num_before, before, BLOCK_SIZE=BLOCK, mask_mod=_causal, seq_lengths=(seqlen, seqlen)
    )

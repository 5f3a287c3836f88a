# SPDX-License-Identifier: Apache-2.0
"""Full attention by torch's own kernels, or one that is offered.

It satisfies the rule trivially: every tile is retained, and nothing is omitted.

torch's operators return lse and bring their own gradients, which are those of full attention.
"""

from __future__ import annotations

import math
from typing import Optional, Protocol

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

from .cudnn_plans import plans
from .query_tile import Settings
from .visibility import Sequences
from .work import NOT_VISIBLE, RETAINED

OWN = "own"  # MALA's kernel, told to skip nothing
NAMES = {"cudnn": "by cuDNN", "flash": "by FlashAttention", "cpu": "by torch", OWN: "by MALA's own kernel with tau = 0"}
HOPPER = 9  # major compute capability, where that kernel has a loop without votes
# head_dim: keys from which that loop runs rather than cuDNN in causal attention: it was faster with 16 heads, at 64 up to 32,768 keys
# (results/operator_flat_h200.json, forward_three_h200.json). With fewer keys microseconds are at stake, and some are faster with cuDNN
OWN_LEADS_FROM = {64: 8192, 128: 2048}
LEADS_WITH_THREE = (64,)  # head dims where it does so only in programs of three query tiles
HEAD_DIM_UNIT = 8  # elements; torch pads other head dims, which copies


class DenseKernel(Protocol):
    """A kernel of another package, which calls that "auto" makes dense try first.

    It returns out and lse as :func:`dense_attention_with_lse` does, or None for a call that it leaves to the kernels here.
    """

    name: str  # as ``Choice.reason`` has it
    impl: str  # as ``Work.impl`` has it

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float
    ) -> Optional[tuple[Tensor, Tensor]]:
        """Causal attention has as many queries as keys, or one, which sees all."""


offered: Optional[DenseKernel] = None  # set by whoever brings one


def uncovered_by_dense(
    q: Tensor,
    v: Tensor,
    settings: Settings,
    sequences: Sequences,
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
) -> list[str]:
    """What of a call torch's kernels lack, in words; nothing where they can do it. Reads shapes alone."""
    left, right = settings.window
    lacking = {
        "padded or packed sequences": sequences.bounds is not None,
        "a mask": mask is not None,
        "attention sinks": sinks is not None,
        "softcap": settings.softcap > 0,
        "a window": left >= 0 or right > 0,
        "causal attention of fewer or more queries than keys, but for one": right == 0
        and sequences.max_seqlen_q not in (1, sequences.max_seqlen_k),
        f"{q.dtype} on a GPU": q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16),
        f"head dims {q.shape[-1]} and {v.shape[-1]}": q.shape[-1] != v.shape[-1] or q.shape[-1] % HEAD_DIM_UNIT > 0,
        "an empty sequence": min(sequences.max_seqlen_q, sequences.max_seqlen_k) == 0,
    }
    return [name for name, lacks in lacking.items() if lacks]


def dense_backend(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> Optional[str]:
    """ "cudnn", "flash" or "cpu": the first of torch's kernels that takes these tensors and that is not switched off; None if none."""
    if not q.is_cuda:
        return "cpu" if q.device.type == "cpu" else None
    params = _params(q, k, v, settings)
    if can_use_cudnn_attention(params):
        return "cudnn"
    return "flash" if can_use_flash_attention(params) else None


def _params(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> SDPAParams:
    query, key, value = (x.detach().transpose(1, 2) for x in (q, k, v))
    return SDPAParams(query, key, value, None, 0.0, _is_causal(q, settings), q.shape[2] != k.shape[2])


def _is_causal(q: Tensor, settings: Settings) -> bool:
    """A single query sees all keys, where torch's causal one would see the first alone."""
    return settings.window[1] == 0 and q.shape[1] > 1


def affordable_backend(backend: str, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> str:
    """``backend``, or what costs less for now: cuDNN plans for each new shape, and one that is seldom seen never pays for it."""
    if backend != "cudnn":
        return backend
    is_step = q.shape[1] == 1  # of a cache that grows: no plan is used twice
    has_own = not is_step and torch.cuda.get_device_capability(q.device)[0] == HOPPER
    if has_own and _is_causal(q, settings) and _own_leads(q, k, settings.tile[0]):
        return OWN
    if not is_step and plans.has_plan(q, k, v, settings.window[1] == 0):
        return backend
    if has_own:
        return OWN
    params = _params(q, k, v, settings)
    return "flash" if can_use_flash_attention(params) else OWN


def _own_leads(q: Tensor, k: Tensor, block_m: int) -> bool:
    head_dim = q.shape[-1]
    if k.shape[1] < OWN_LEADS_FROM.get(head_dim, math.inf):
        return False
    if head_dim not in LEADS_WITH_THREE:
        return True
    from .program_order import are_enough_for_three  # triton is needed only here

    return are_enough_for_three(q.shape[1], block_m, q.shape[0] * q.shape[2], q.device)


def offered_attention(
    q: Tensor, k: Tensor, v: Tensor, settings: Settings
) -> Optional[tuple[DenseKernel, tuple[Tensor, Tensor]]]:
    """The offered kernel, and its out and lse; None where there is none, or where it leaves the call alone."""
    if offered is None:
        return None
    with torch.autocast(q.device.type, enabled=False):
        results = offered(q, k, v, _is_causal(q, settings), settings.softmax_scale)
    return None if results is None else (offered, results)


def dense_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, settings: Settings, backend: str
) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, num_heads, head_dim), lse float32 (batch, num_heads, seqlen_q), of inputs as MALA takes them."""
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    causal, scale = _is_causal(q, settings), settings.softmax_scale
    if backend == "cudnn":
        results = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
    elif backend == "flash":
        results = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    else:
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
    out, lse = results[:2]
    return out.transpose(1, 2).contiguous(), lse.reshape(
        lse.shape[:3]
    ).contiguous()  # some releases keep a last dimension of 1


def dense_attention_in_graph(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> Tensor:
    """The same out where a compiler is to see a function that it knows; torch picks the kernel when the graph runs."""
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(
        query, key, value, is_causal=_is_causal(q, settings), scale=settings.softmax_scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()


def dense_tiles(settings: Settings, sequences: Sequences, num_heads: int, device: torch.device) -> Tensor:
    """The map of a call without a window: int8 (num_sequences, num_heads, q_tiles, k_tiles), all that is visible is retained."""
    block_m, block_n = settings.tile
    q_tiles, k_tiles = sequences.tile_grid(settings.tile)
    last_row = ((torch.arange(q_tiles, device=device) + 1) * block_m).clamp(max=sequences.max_seqlen_q) - 1
    first_key = torch.arange(k_tiles, device=device) * block_n
    visible = torch.ones(q_tiles, k_tiles, dtype=torch.bool, device=device)
    if settings.window[1] == 0:
        visible = first_key <= last_row[:, None] + sequences.max_seqlen_k - sequences.max_seqlen_q
    tiles = torch.where(visible, RETAINED, NOT_VISIBLE).to(torch.int8)
    return tiles.expand(sequences.num_sequences, num_heads, -1, -1).contiguous()

# SPDX-License-Identifier: Apache-2.0
"""Forward and backward as operators of ``torch.library``: what autograd, ``torch.compile`` and ``torch.export`` see of a call.

Both take tensors and plain numbers, change none of their inputs, and return new contiguous tensors; a result that was not asked for
is an empty one. The implementation runs inside, out of a compiler's sight.
"""

from typing import Optional

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from . import blockwise, decode_blockwise, reference, reference_decode
from ._ops import add_op_namespace_prefix
from .key_plane import KeyPlane
from .query_tile import Settings
from .support_bits import support_shape
from .visibility import Sequences, fixed_sequences


@torch.library.custom_op(add_op_namespace_prefix("forward"), mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
    bounds: Optional[Tensor],
    support: Optional[Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_packed: bool,
    tau: float,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    block_m: int,
    block_n: int,
    impl: str,
    discovery: str,
    form: str,
    num_splits: int,
    block_table: Optional[Tensor],
    quantized_keys: Optional[Tensor],
    key_scales: Optional[Tensor],
    key_residuals: Optional[Tensor],
    return_work: bool,
    save_support: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, lse, tiles, certificate, support of q (batch, seqlen_q, num_heads, head_dim), k, v; see ``blockwise.forward``.

    ``bounds`` and the three numbers after ``support`` are those of :class:`Sequences`. ``support``: what an earlier call on the same
    inputs found; its tiles are walked, no others, and it is not returned once more. The three tensors before ``return_work`` are those
    of a :class:`KeyPlane`, all or none.
    """
    settings = Settings(tau, softmax_scale, (window_left, window_right), softcap, (block_m, block_n))
    sequences = _sequences(q, k, bounds, max_seqlen_q, max_seqlen_k, is_packed, window_right)
    plane = None
    if quantized_keys is not None and key_scales is not None and key_residuals is not None:
        plane = KeyPlane(quantized_keys, key_scales, key_residuals)
    with torch.autocast(q.device.type, enabled=False):  # it would round scores to 16 bit
        if form != "single":
            results = (
                *_decode(q, k, v, settings, sequences, sinks, impl, form, num_splits, block_table, plane, return_work),
                None,
            )
        elif impl == "triton":
            from .forward import launch_forward  # triton is needed only here

            results = launch_forward(
                q, k, v, settings, sequences, sinks, mask, return_work, save_support, support, discovery
            )
        elif impl == "reference":
            results = *reference.forward_sequences(q, k, v, settings, sequences, sinks, mask), None
        else:
            results = blockwise.forward(q, k, v, settings, sequences, sinks, mask, save_support, support)
    out, lse, tiles, certificate, found = results
    return (
        out,
        lse,
        tiles if return_work and tiles is not None else q.new_empty(0, dtype=torch.int8),
        certificate if return_work and certificate is not None else lse.new_empty(0),
        found if save_support and found is not None else q.new_empty(0, dtype=torch.int32),
    )


def _decode(q, k, v, settings, sequences, sinks, impl, form, num_splits, block_table, plane, return_work):
    if impl == "triton":
        from .decode import launch_decode

        return launch_decode(
            q, k, v, settings, sequences, sinks, form, num_splits, return_work, block_table, key_plane=plane
        )
    implementation = reference_decode.decode_sequences if impl == "reference" else decode_blockwise.forward
    return implementation(q, k, v, settings, sequences, sinks, form, num_splits, plane)


@torch.library.custom_op(add_op_namespace_prefix("backward"), mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
    bounds: Optional[Tensor],
    support: Optional[Tensor],
    out: Tensor,
    lse: Tensor,
    do: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_packed: bool,
    tau: float,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    block_m: int,
    block_n: int,
    impl: str,
    needs_dq: bool,
    needs_dkv: bool,
    needs_dsinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dsinks. ``support``: the forward's, whose tiles alone are scored again; None: all are."""
    settings = Settings(tau, softmax_scale, (window_left, window_right), softcap, (block_m, block_n))
    sequences = _sequences(q, k, bounds, max_seqlen_q, max_seqlen_k, is_packed, window_right)
    call = q, k, v, out, lse, do, settings, sequences, sinks, mask
    needs = needs_dq, needs_dkv, needs_dsinks
    with torch.autocast(q.device.type, enabled=False):
        if impl == "triton":
            from .backward import launch_backward

            found = launch_backward(*call, support, needs)
        elif impl == "reference":
            found = reference.backward_sequences(*call)
        else:
            found = blockwise.backward(*call, support, needs)
    dq, dk, dv, dsinks = (
        q.new_empty(0) if x is None or not is_needed else x.contiguous()
        for x, is_needed in zip(found, (needs_dq, needs_dkv, needs_dkv, needs_dsinks))
    )
    return dq, dk, dv, dsinks


def _sequences(q, k, bounds, max_seqlen_q, max_seqlen_k, is_packed, window_right) -> Sequences:
    if bounds is None:
        return fixed_sequences(q.shape[0], q.shape[1], k.shape[1], window_right)
    return Sequences(len(bounds), max_seqlen_q, max_seqlen_k, (0, 0, 0, 0), bounds, is_packed)


@forward.register_fake
def _(q, k, v, sinks, mask, bounds, support, max_seqlen_q, max_seqlen_k, is_packed, tau, softmax_scale, window_left,
      window_right, softcap, block_m, block_n, impl, discovery, form, num_splits, block_table,
      quantized_keys, key_scales, key_residuals, return_work, save_support):  # fmt: skip
    batch, seqlen_q, num_heads, _ = q.shape
    num_sequences = batch if bounds is None else bounds.shape[0]
    q_tiles, k_tiles = -(-max_seqlen_q // block_m), -(-max_seqlen_k // block_n)
    lse = q.new_empty(batch, num_heads, seqlen_q, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    tiles = (num_sequences, num_heads, q_tiles, k_tiles) if return_work else (0,)
    found = support_shape(num_sequences, num_heads, (q_tiles, k_tiles)) if save_support else (0,)
    return (
        q.new_empty(batch, seqlen_q, num_heads, v.shape[-1]),
        lse,
        q.new_empty(tiles, dtype=torch.int8),
        torch.empty_like(lse) if return_work else lse.new_empty(0),
        q.new_empty(found, dtype=torch.int32),
    )


@backward.register_fake
def _(q, k, v, sinks, mask, bounds, support, out, lse, do, max_seqlen_q, max_seqlen_k, is_packed, tau, softmax_scale,
      window_left, window_right, softcap, block_m, block_n, impl, needs_dq, needs_dkv, needs_dsinks):  # fmt: skip
    needed = (q, needs_dq), (k, needs_dkv), (v, needs_dkv), (sinks, needs_dsinks)
    return tuple(x.new_empty(x.shape) if is_needed else q.new_empty(0) for x, is_needed in needed)


NUM_TENSORS = 7  # of forward, before its numbers
NUM_FLAGS = 9  # after them: from discovery to save_support


def _remember(ctx, inputs, output) -> None:
    """Keep for backward the inputs, out, lse, and the support where there is one."""
    support, save_support = inputs[NUM_TENSORS - 1], inputs[-1]
    out, lse, tiles, certificate, found = output
    ctx.save_for_backward(*inputs[: NUM_TENSORS - 1], found if save_support else support, out, lse)
    ctx.numbers = inputs[NUM_TENSORS:-NUM_FLAGS]
    ctx.mark_non_differentiable(lse, tiles, certificate, found)
    ctx.set_materialize_grads(False)


def _gradients(ctx, do: Optional[Tensor], *of_others, compute=None) -> tuple[Optional[Tensor], ...]:
    nothing = (None,) * (len(ctx.numbers) + NUM_FLAGS)
    needs_dq, needs_dk, needs_dv, needs_dsinks = needs = ctx.needs_input_grad[:4]
    if do is None:
        return (None,) * NUM_TENSORS + nothing
    gradients = (compute or backward)(
        *ctx.saved_tensors, do, *ctx.numbers, needs_dq, needs_dk or needs_dv, needs_dsinks
    )
    return (*(x if is_needed else None for x, is_needed in zip(gradients, needs)), None, None, None, *nothing)


def _refuse(ctx, *gradients):
    raise RuntimeError(
        "MALA's gradients cannot be differentiated once more (create_graph=True): use attn_implementation='eager' for that"
    )


forward.register_autograd(_gradients, setup_context=_remember)
backward.register_autograd(_refuse)


class _Eager(torch.autograd.Function):
    """The same two functions under plain autograd."""

    @staticmethod
    def forward(ctx, *inputs):
        output = forward._init_fn(*inputs)
        _remember(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, *gradients):
        return _gradients(ctx, *gradients, compute=_EagerBackward.apply)


class _EagerBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        return backward._init_fn(*inputs)

    backward = staticmethod(_refuse)


def needs_operator(tensors: list[Tensor]) -> bool:
    """Whether something has to see an operator: a compiler, a dispatch mode, a transform, a subclass of tensors."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors)
    )


def run_forward(*inputs):
    """:func:`forward`, as an operator only where one is needed: its dispatch costs the host more than all else in a call."""
    tensors = [x for x in inputs[:NUM_TENSORS] if x is not None]
    if any(unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError("MALA has no forward-mode derivative: use attn_implementation='eager' for that")
    if needs_operator(tensors):
        return forward(*inputs)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return (_Eager.apply if needs_grad else forward._init_fn)(*inputs)

# SPDX-License-Identifier: Apache-2.0
"""What MALA leaves out of each attention layer, measured exactly: full attention is computed beside it on the same inputs.

Costs a full float32 attention per layer, so it is for studies, not for serving; ``record_work`` is the cheap report.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .full_attention import LayerCall, full_attention
from .ops import mala_attn_func
from .patch import mala_attention


@dataclass(frozen=True)
class LayerFidelity:
    """One layer's figures; lists have one number per query head, the rest are over all heads and rows.

    Work is in post-score key slots per query, masses are probabilities, ``output_error`` is the relative L2 distance of each
    head's output row from full attention in float32, ``rounding_error`` the same for SDPA in the model's own dtype.
    """

    layer: int
    key_slots_per_query: list[float]
    visible_slots_per_query: list[float]
    work_fraction: list[float]
    omitted_mass_mean: float
    omitted_mass_p95: float
    omitted_mass_bound_mean: float
    omitted_mass_bound_p95: float
    bound_violation: float  # largest omitted mass minus its certified bound; above rounding, the rule is broken
    output_error_mean: float
    output_error_p95: float
    rounding_error_mean: float
    tile: tuple[int, int]
    impl: str

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, fit for JSON."""
        return asdict(self)


def layer_fidelity(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, tau: float, layer: int = 0
) -> tuple[Tensor, LayerFidelity]:
    """Run MALA on one causal sequence and compare it with full attention: q (1, L, H, D), k and v (1, L, K, D).

    Returns MALA's output (1, L, H, D) and the figures.
    """
    out, work = mala_attn_func(q, k, v, tau=tau, causal=True, softmax_scale=scale, discovery="fused", return_work=True)
    full, (omitted,) = full_attention(LayerCall(q, k, v, scale), [work])
    bound = work.omitted_mass_bound[0].float()  # (H, L)
    error = relative_error(out[0], full)
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    sdpa = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
    return out, LayerFidelity(
        layer=layer,
        key_slots_per_query=work.key_slots_per_query[0].tolist(),
        visible_slots_per_query=work.visible_slots_per_query[0].tolist(),
        work_fraction=work.work_fraction[0].tolist(),
        omitted_mass_mean=omitted.mean().item(),
        omitted_mass_p95=percentile_95(omitted),
        omitted_mass_bound_mean=bound.mean().item(),
        omitted_mass_bound_p95=percentile_95(bound),
        bound_violation=(omitted - bound).max().item(),
        output_error_mean=error.mean().item(),
        output_error_p95=percentile_95(error),
        rounding_error_mean=relative_error(sdpa[0], full).mean().item(),
        tile=work.tile,
        impl=work.impl,
    )


def relative_error(out: Tensor, full: Tensor) -> Tensor:
    """Relative L2 distance of each row, float32 (L, H), of out and full (L, H, D)."""
    return (out.float() - full).norm(dim=-1) / full.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)


def percentile_95(values: Tensor) -> float:
    """95th percentile over all entries, the nearest one from below (torch.quantile refuses large tensors)."""
    flat = values.flatten()
    return flat.kthvalue(max(1, int(0.95 * flat.numel()))).values.item()


@contextmanager
def measured_attention(tau: float) -> Iterator[list[LayerFidelity]]:
    """While active, every "mala" attention layer also measures itself; yields the list that fills, one entry a call.

    Overrides the "mala" entry of this process's lookup table and always puts it back.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    records: list[LayerFidelity] = []

    def measure(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        for name in ("sliding_window", "softcap", "s_aux"):
            if kwargs.get(name) is not None:
                raise NotImplementedError(
                    f"fidelity is measured on plain causal attention, not with {name}={kwargs[name]!r}"
                )
        if attention_mask is not None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            raise NotImplementedError("fidelity is measured on one unpadded sequence without a cache")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        out, record = layer_fidelity(q, k, v, scale=scale, tau=tau, layer=module.layer_idx)
        records.append(record)
        return out, None

    ALL_ATTENTION_FUNCTIONS["mala"] = measure
    try:
        yield records
    finally:
        del ALL_ATTENTION_FUNCTIONS["mala"]


@torch.inference_mode()
def attention_fidelity(model: Any, input_ids: Tensor, *, tau: float = 1.0) -> list[LayerFidelity]:
    """Run one sequence of ids (1, L) through the model with MALA in every layer and return one entry per layer.

    Each layer sees the inputs that MALA's earlier layers gave it. The model's own implementation is back afterwards. Raises
    ``NotImplementedError`` for layers with a window, softcap or sinks.
    """
    with measured_attention(tau) as records, mala_attention(model, tau=tau, discovery="fused"):
        model(input_ids=input_ids.to(model.device), use_cache=False, logits_to_keep=1)
    return records

# SPDX-License-Identifier: Apache-2.0
"""One layer's work, omitted mass and errors against full attention, for each of its heads."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .break_even import BreakEven, break_even
from .fidelity import percentile_95, relative_error
from .full_attention import LayerCall, full_attention, full_gradients
from .ops import Work

GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class HeadFigures:
    """What MALA did in one layer at one tau: lists have one number per query head, means and percentiles are over its rows.

    Attributes:
        key_slots_per_query, visible_slots_per_query, work_fraction: post-score work, as in ``Work``.
        omitted_mass_bound_mean, omitted_mass_bound_p95: the certificate, an upper bound of the probability left out.
        omitted_mass_mean, omitted_mass_p95: that probability itself; None without an audit.
        output_error_mean, output_error_p95: relative L2 distance of a row's output from full attention in float32. At tau 0 this is
            the rounding of the model's dtype.
        break_even: estimate from counted operations, of the layer.
    """

    layer: int
    tile: tuple[int, int]
    impl: str
    key_slots_per_query: list[float]
    visible_slots_per_query: list[float]
    work_fraction: list[float]
    omitted_mass_bound_mean: list[float]
    omitted_mass_bound_p95: list[float]
    omitted_mass_mean: list[float] | None
    omitted_mass_p95: list[float] | None
    output_error_mean: list[float]
    output_error_p95: list[float]
    break_even: BreakEven

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, fit for JSON."""
        return asdict(self)


@torch.no_grad()
def head_figures(
    call: LayerCall, taus: Sequence[float], *, layer: int = 0, audit: bool = False
) -> tuple[list[HeadFigures], list[Work]]:
    """Run MALA at each tau on the same inputs and compare with full attention; ``audit`` measures the omitted mass exactly."""
    results = [call.mala(tau, return_work=True) for tau in taus]
    works = [work for _, work in results]
    full, omitted = full_attention(call, works if audit else ())
    masses: list[Tensor | None] = [*omitted] if audit else [None] * len(works)
    figures = [_figures(call, layer, out, work, full, mass) for (out, work), mass in zip(results, masses, strict=True)]
    return figures, works


def _figures(call: LayerCall, layer: int, out: Tensor, work: Work, full: Tensor, omitted: Tensor | None) -> HeadFigures:
    bound = work.omitted_mass_bound[0].float()  # (H, L)
    error = relative_error(out[0], full).transpose(0, 1)  # (H, L)
    slots, visible = work.key_slots_per_query[0], work.visible_slots_per_query[0]
    return HeadFigures(
        layer=layer,
        tile=work.tile,
        impl=work.impl,
        key_slots_per_query=slots.tolist(),
        visible_slots_per_query=visible.tolist(),
        work_fraction=work.work_fraction[0].tolist(),
        omitted_mass_bound_mean=bound.mean(1).tolist(),
        omitted_mass_bound_p95=_p95_by_head(bound),
        omitted_mass_mean=None if omitted is None else omitted.mean(1).tolist(),
        omitted_mass_p95=None if omitted is None else _p95_by_head(omitted),
        output_error_mean=error.mean(1).tolist(),
        output_error_p95=_p95_by_head(error),
        break_even=break_even(slots.mean().item(), visible.mean().item(), call.q.shape[-1], call.v.shape[-1]),
    )


def _p95_by_head(values: Tensor) -> list[float]:
    return [percentile_95(row) for row in values]


def gradient_errors(call: LayerCall, taus: Sequence[float], do: Tensor, **options: Any) -> list[dict[str, list[float]]]:
    """Return for each tau the relative L2 distances of dq (by query head), dk and dv (by key-value head) from full attention's.

    do (1, L, H, E) is the gradient of the loss by the layer's attention output. Full attention's gradients are float32; at tau 0
    the distances are the rounding of the model's dtype. ``options`` are those of ``LayerCall.mala``.
    """
    truth = full_gradients(call, do)
    rows = []
    for tau in taus:
        with torch.enable_grad():
            leaves = call.leaves()
            found = torch.autograd.grad(leaves.mala(tau, **options), (leaves.q, leaves.k, leaves.v), do)
        errors = (_relative_by_head(x, y) for x, y in zip(found, truth, strict=True))
        rows.append({f"{name}_error": error for name, error in zip(GRADIENTS, errors, strict=True)})
    return rows


def _relative_by_head(found: Tensor, truth: Tensor) -> list[float]:
    """Relative L2 distance of each head's whole gradient, of (1, L, heads, dim)."""
    found, truth = (x[0].float().transpose(0, 1).flatten(1) for x in (found, truth))
    tiny = torch.finfo(torch.float32).tiny
    return ((found - truth).norm(dim=1) / truth.norm(dim=1).clamp(min=tiny)).tolist()


def summary(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum up one tau's layers as dicts: means over layers and heads, the worst head of each error, the lowest of the work.

    ``post_score_share``, ``operations_fraction`` and ``break_even_overhead`` are those of ``BreakEven``, of all layers.
    """

    def values(name: str) -> list[float]:
        return [value for layer in layers for value in layer[name] or ()]

    work = values("work_fraction")
    lowest = min(
        ((fraction, layer["layer"], head) for layer in layers for head, fraction in enumerate(layer["work_fraction"]))
    )
    # layers differ in visible slots where some have windows, and in heads: weigh by both
    weights = [sum(layer["visible_slots_per_query"]) for layer in layers]
    operations = [layer["break_even"]["operations_fraction"] for layer in layers]
    fraction = sum(w * x for w, x in zip(weights, operations, strict=True)) / sum(weights)
    after_scores = [layer["break_even"]["post_score_share_of_full"] for layer in layers]
    discovery = 1 - sum(w * x for w, x in zip(weights, after_scores, strict=True)) / sum(weights)
    found: dict[str, Any] = {
        "key_slots_per_query": statistics.fmean(values("key_slots_per_query")),
        "visible_slots_per_query": statistics.fmean(values("visible_slots_per_query")),
        "work_fraction": sum(values("key_slots_per_query")) / sum(values("visible_slots_per_query")),
        "work_fraction_min_head": lowest[0],
        "min_head": {"layer": lowest[1], "head": lowest[2]},
        "work_fraction_max_head": max(work),
        "post_score_share": 1 - discovery / fraction,
        "operations_fraction": fraction,
        "break_even_overhead": 1 / fraction,
    }
    for name in ("omitted_mass_bound", "omitted_mass", "output_error"):
        if values(f"{name}_mean"):
            found[f"{name}_mean"] = statistics.fmean(values(f"{name}_mean"))
            found[f"{name}_p95_worst_head"] = max(values(f"{name}_p95"))
    for name in GRADIENTS:
        if f"{name}_error" in layers[0]:
            found[f"{name}_error_mean"] = statistics.fmean(values(f"{name}_error"))
            found[f"{name}_error_worst_head"] = max(values(f"{name}_error"))
    return found

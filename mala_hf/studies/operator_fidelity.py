# SPDX-License-Identifier: Apache-2.0
"""Study 2: how far the operator's outputs and gradients are from full attention's, on the activations and gradients of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..flops import attention_flops
from ..full_attention import LayerCall
from ..layer_work import GRADIENTS, gradient_errors
from ..patch import mala_attention
from ..perplexity import token_nll
from ..work_study import attention_calls
from .activations import full
from .figures import Figures, spread
from .rules import backward_tiles
from .scores import outcome, scores_by_tile


@dataclass(frozen=True)
class LayerStep:
    """A layer's call and ``do`` (1, L, H, E), the gradient of the loss by its output."""

    layer: int
    call: LayerCall
    do: Tensor


def layer_steps(model: Any, ids: Tensor, layers: Collection[int] | None = None) -> list[LayerStep]:
    """Run ids (1, L) and the gradient of the mean loss of each next token with full attention; return all layers, or some.

    The model's weights take no gradients while this runs.
    """
    calls: dict[int, LayerCall] = {}
    outs: dict[int, Tensor] = {}

    def answer(module: Any, call: LayerCall) -> Tensor:
        out = full(call)
        if not out.requires_grad:  # nothing before it does
            out.requires_grad_()
        if layers is None or module.layer_idx in layers:
            calls[module.layer_idx], outs[module.layer_idx] = call, out
        return out

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in weights:
        weight.requires_grad_(False)
    try:
        with torch.enable_grad(), mala_attention(model, tau=0.0), attention_calls(answer):
            logits = model(input_ids=ids.to(model.device), use_cache=False).logits[0]
            loss = token_nll(logits[:-1], ids[0, 1:].to(logits.device)).mean()
            gradients = torch.autograd.grad(loss, list(outs.values()))
    finally:
        for weight in weights:
            weight.requires_grad_()
    return [LayerStep(layer, _detached(calls[layer]), do.detach()) for layer, do in zip(outs, gradients, strict=True)]


def _detached(call: LayerCall) -> LayerCall:
    return replace(call, q=call.q.detach(), k=call.k.detach(), v=call.v.detach())


@dataclass
class Fidelity:
    """Gathers layers at one tau."""

    tau: float
    tile: tuple[int, int] | None = None
    impl: str = "auto"
    figures: Figures = field(default_factory=Figures)
    backward_slots: Tensor | int = 0  # stays on the device: to read it is to wait
    errors: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in GRADIENTS})
    ran: tuple[tuple[int, int], str] | None = None  # tile, impl
    head_dims: tuple[int, int] = (0, 0)

    @torch.no_grad()
    def add(self, step: LayerStep, gradients: dict[str, list[float]]) -> None:
        """Run the operator on a layer and compare; ``gradients``: what ``gradient_errors`` gives of it."""
        call = step.call
        out, work = call.mala(self.tau, return_work=True, tile=self.tile, impl=self.impl)
        self.ran, self.head_dims = (work.tile, work.impl), (call.q.shape[-1], call.v.shape[-1])
        block_m, block_n = work.tile
        for scores in scores_by_tile(call, work.tile):
            query_tiles, key_tiles = len(scores.p), scores.tile_max.shape[-1]
            retained = work.retained[0, :, scores.first : scores.first + query_tiles, :key_tiles].transpose(0, 1)
            rows = slice(scores.first * block_m, (scores.first + query_tiles) * block_m)
            of_rows = out[0, rows].float().unflatten(0, (query_tiles, -1)).transpose(1, 2)  # (Q, H, M, E)
            error = (of_rows - scores.out).norm(dim=-1) / scores.out.norm(dim=-1)
            self.figures.add(step.layer, replace(outcome(scores, retained), out=of_rows, error=error))
            self.backward_slots += backward_tiles(scores, retained, self.tau).sum() * block_m * block_n
        for name, of_heads in self.errors.items():
            of_heads += gradients[f"{name}_error"]

    def to_dict(self) -> dict[str, Any]:
        """What ``Figures.to_dict`` has, backward's slots per query, and mean and P95 over heads of the gradients' errors.

        ``flops_fraction``: of full attention's FLOPs, forward and backward, discovery counted in full in both; ``_saved``: with the
        retained tiles kept for backward, which then scores no others.
        """
        assert self.ran is not None
        found = self.figures.to_dict()
        retained, visible = (found[f"{kind}_slots_per_query"] for kind in ("key", "visible"))
        backward = float(self.backward_slots) / self.figures.rows
        numbers = {"backward_slots": visible}
        whole = attention_flops(visible, visible, *self.head_dims, **numbers)
        state_only, saved = (
            attention_flops(visible, retained, *self.head_dims, backward_slots=backward, saves_support=saves)
            for saves in (False, True)
        )
        return {
            "tau": self.tau,
            "tile": list(self.ran[0]),
            "impl": self.ran[1],
            "backward_slots_per_query": backward,
            **found,
            **{
                f"{name}_error_{key}": x
                for name in GRADIENTS
                for key, x in spread(torch.tensor(self.errors[name])).items()
            },
            "forward_flops_fraction": state_only.forward / whole.forward,
            "flops_fraction": state_only.total / whole.total,
            "flops_fraction_saved": saved.total / whole.total,
        }


def fidelity_rows(
    steps: Sequence[LayerStep],
    taus: Sequence[float],
    *,
    tile: tuple[int, int] | None = None,
    impl: str = "auto",
    progress: Callable[[Iterable[LayerStep]], Iterable[LayerStep]] = iter,
) -> list[dict[str, Any]]:
    """Return a row for each tau, over all steps; tau 0 is full attention in the same precision, whose errors are rounding."""
    gathered = [Fidelity(tau, tile, impl) for tau in taus]
    for step in progress(steps):
        gradients = gradient_errors(step.call, taus, step.do, tile=tile, impl=impl)
        for one, errors in zip(gathered, gradients, strict=True):
            one.add(step, errors)
    return [one.to_dict() for one in gathered]

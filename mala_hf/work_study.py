# SPDX-License-Identifier: Apache-2.0
"""What MALA would do to a model on a text: one pass with full attention, in which every layer is measured on its real inputs.

All taus see the same q, k and v, and with gradients the same incoming gradient of the language-model loss. tau 0 is measured too:
full attention in the model's own dtype, whose errors are rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .full_attention import LayerCall
from .layer_work import HeadFigures, gradient_errors, head_figures, summary
from .ops.hf import REFUSED
from .ops.work import RETAINED, SKIPPED
from .patch import mala_attention
from .perplexity import token_nll

MARKS = {SKIPPED: "-", RETAINED: "#"}  # in the rows of a tile map; a space where nothing is visible


@dataclass(frozen=True)
class TileMap:
    """The tiles of one head at one tau: int8 (q_tiles, k_tiles) as in ``Work.tiles``."""

    layer: int
    head: int
    tau: float
    tiles: Tensor

    def to_rows(self) -> list[str]:
        """One string per query tile: ``#`` retained, ``-`` skipped, nothing where it sees no key."""
        return ["".join(MARKS.get(tile, " ") for tile in row).rstrip() for row in self.tiles.tolist()]


def _short(value: Any) -> Any:
    """The same with numbers of at most 7 digits: no figure here has more."""
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_short(one) for one in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


@dataclass
class WorkStudy:
    """``runs``: one list of layers for each of ``taus``, of which the first is 0; ``tile_maps``: of one head, for each other tau.

    ``gradients`` has for each layer what ``gradient_errors`` gives, or is empty.
    """

    taus: tuple[float, ...]
    runs: list[list[HeadFigures]]
    gradients: list[list[dict[str, list[float]]]] = field(default_factory=list)
    tile_maps: list[TileMap] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings, fit for JSON: runs by tau, tile maps as rows of marks."""
        runs = []
        for number, (tau, layers) in enumerate(zip(self.taus, self.runs, strict=True)):
            gradients = [by_tau[number] for by_tau in self.gradients] or [{}] * len(layers)
            rows = [one.to_dict() | more for one, more in zip(layers, gradients, strict=True)]
            runs.append({"tau": tau, "summary": summary(rows), "layers": rows})
        maps = [{"layer": one.layer, "head": one.head, "tau": one.tau, "rows": one.to_rows()} for one in self.tile_maps]
        return {"runs": _short(runs), "tile_maps": maps}


class _Recorder:
    """Gathers the layers' figures as the model runs, and what their gradients need."""

    def __init__(self, taus: tuple[float, ...], audit: bool, gradients: bool, head: tuple[int | None, int | None]):
        self.study = WorkStudy(taus, [[] for _ in taus])
        self.audit, self.gradients, (self.layer, self.head) = audit, gradients, head
        self.lowest = math.inf
        self.calls: list[LayerCall] = []
        self.outputs: list[Tensor] = []

    def attend(self, module: Any, call: LayerCall) -> Tensor:
        """Measure one layer and return full attention's output."""
        index = module.layer_idx
        figures, works = head_figures(call, self.study.taus, layer=index, audit=self.audit)
        for run, one in zip(self.study.runs, figures, strict=True):
            run.append(one)
        fractions = figures[1].work_fraction
        if self.layer in (None, index):
            self._keep_map(index, fractions, [work.tiles[0] for work in works])
        out = call.mala(0.0)
        if self.gradients:
            if not out.requires_grad:  # the first layer of a frozen model
                out.requires_grad_()
            self.calls.append(call)
            self.outputs.append(out)
        return out

    def _keep_map(self, index: int, fractions: list[float], tiles: list[Tensor]) -> None:
        if self.head is not None and self.head >= len(fractions):
            raise ValueError(f"head {self.head} does not exist: layer {index} has {len(fractions)} query heads")
        head = fractions.index(min(fractions)) if self.head is None else self.head
        if fractions[head] < self.lowest:
            self.lowest = fractions[head]
            taus = self.study.taus
            self.study.tile_maps = [
                TileMap(index, head, tau, one[head].cpu()) for tau, one in zip(taus[1:], tiles[1:], strict=True)
            ]


@contextmanager
def attention_calls(answer: Callable[[Any, LayerCall], Tensor]) -> Iterator[None]:
    """Every "mala" layer of this process asks ``answer(module, call)`` for its output; what was registered is always put back.

    Inside, layers that are not plain causal attention of one sequence on itself raise ``ValueError``.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if attention_mask is not None or not causal or query.shape[2] != key.shape[2]:
            raise ValueError(
                f"layer {getattr(module, 'layer_idx', None)} is not plain causal attention (with a window, softcap or sinks at most) "
                "of a sequence on itself: its work cannot be measured here; mala_hf.record_work counts it"
            )
        refused = [meaning for name, meaning in REFUSED.items() if kwargs.get(name) is not None]
        refused += ["attention dropout"] if kwargs.get("dropout") else []
        if refused:
            raise ValueError(f"layer {module.layer_idx} asks for {refused[0]}, which MALA does not cover")
        q, k, v = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
        scale = kwargs.get("scaling")
        call = LayerCall(
            q, k, v,
            softmax_scale=query.shape[-1] ** -0.5 if scale is None else scale,
            window=kwargs.get("sliding_window"), softcap=kwargs.get("softcap") or 0.0, sinks=kwargs.get("s_aux"),
        )  # fmt: skip
        return answer(module, call), None

    ALL_ATTENTION_FUNCTIONS["mala"] = attend
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["mala"]


def study_work(
    model: Any,
    input_ids: Tensor,
    taus: Sequence[float] = (1.0,),
    *,
    audit: bool = False,
    gradients: bool = False,
    layer: int | None = None,
    head: int | None = None,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> WorkStudy:
    """Measure every attention layer of the model on one sequence of ids (1, L).

    audit: measure the omitted mass exactly. gradients: compare dq, dk and dv too, for the mean loss of predicting each next token.
    layer, head: whose tile map to keep; by default the head with the least work at the first tau. progress: wraps the layers whose
    gradients are compared, after the pass.
    The model's own attention and the registry are back afterwards. Raises ``ValueError`` for a layer or head that does not
    exist, a model that cannot run MALA or never did, fewer than two tokens, and layers that are not plain causal attention.
    """
    if input_ids.shape[-1] < 2:
        raise ValueError(f"at least 2 tokens are needed, got {input_ids.shape[-1]}")
    check_taus(taus)
    check_head(layer, head, model.config.get_text_config())
    recorder = _Recorder((0.0, *dict.fromkeys(float(tau) for tau in taus)), audit, gradients, (layer, head))
    ids = input_ids.to(model.device)
    keep = {} if gradients else {"logits_to_keep": 1}
    with torch.set_grad_enabled(gradients), mala_attention(model, tau=0.0), attention_calls(recorder.attend):
        logits = model(input_ids=ids, use_cache=False, **keep).logits[0]
    if not recorder.study.runs[0]:
        raise ValueError(
            f"no layer of {type(model).__name__} asked for attention, so there is nothing that MALA could do"
        )
    if not recorder.study.tile_maps:
        measured = [one.layer for one in recorder.study.runs[0]]
        raise ValueError(f"layer {layer} is no attention layer: those are {', '.join(map(str, measured))}")
    if gradients:
        loss = token_nll(logits[:-1], ids[0, 1:]).mean()
        incoming = torch.autograd.grad(loss, recorder.outputs)
        for call, do in progress(list(zip(recorder.calls, incoming, strict=True))):
            recorder.study.gradients.append(gradient_errors(call, recorder.study.taus, do))
    return recorder.study


def check_taus(taus: Sequence[float]) -> None:
    """Raise ``ValueError`` for a tau that MALA refuses, and for none."""
    if not taus or not all(0 <= tau < math.inf for tau in taus):
        raise ValueError(f"taus must be finite numbers >= 0, at least one, got {list(taus)}")


def check_head(layer: int | None, head: int | None, config: Any = None) -> None:
    """Raise ``ValueError`` for a layer or head that no model has, or with a model's text config that this one lacks."""
    for name, index, count in (
        ("layer", layer, getattr(config, "num_hidden_layers", None)),
        ("head", head, getattr(config, "num_attention_heads", None)),
    ):
        if index is not None and (index < 0 or (count is not None and index >= count)):
            limit = "" if count is None else f": the model has {count}, 0 to {count - 1}"
            raise ValueError(f"{name} {index} does not exist{limit}")
    if head is not None and layer is None:
        raise ValueError(f"head {head} of which layer? give the layer too")

# SPDX-License-Identifier: Apache-2.0
"""Train a model to leave MALA less to do: a smooth stand-in for the share of key tiles that the rule retains, added to the loss.

A tile is retained if some row of it has a key whose contribution reaches the threshold. In nats, with the final normalizer,

    excess(T) = max over rows i of T of  max over keys of s[i, .] - lse(i) - log(tau / L_q(i))        retained: excess >= 0

and the stand-in is the mean of ``sigmoid(excess / temperature)`` over the tiles before the diagonal, which alone can be skipped.
It is computed on a few query tiles of each layer and step: their scores are all that it costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, TrainerCallback

from .masks import mala_mask
from .ops.hf_settings import layer_settings
from .ops.tile_config import DECODE_ROWS, tile_config
from .patch import _text_config, _transformers_model
from .registration import NAME, mala_attention_forward

CONCENTRATING = "mala_concentrating"  # "mala", with the term while the model trains
LOGGED = "retained_surrogate"


def tile_excess(
    q: Tensor,
    k: Tensor,
    start: int,
    *,
    softmax_scale: float,
    tau: float,
    tile: tuple[int, int],
    window: int | None = None,
    softcap: float = 0.0,
    temperature: float = 2.0,
) -> Tensor:
    """By how many nats each key tile before the diagonal exceeds the threshold for the query tile that starts at row ``start``.

    q (batch, num_heads, seqlen, head_dim), k (batch, num_kv_heads, seqlen, head_dim), causal, without padding; window as Transformers'.
    Returns float32 (batch, num_heads, key tiles), those that lie wholly before ``start`` and in reach of its first row. The largest
    row of a tile counts; its value and gradient are means over the rows near it, weighted by ``softmax(excess / temperature)``.
    """
    block_m, block_n = tile
    stop = min(start + block_m, q.shape[2])
    first = 0 if window is None else max(0, start - window + 1) // block_n
    last = start // block_n
    begin = first * block_n
    rows, groups = stop - start, q.shape[1] // k.shape[1]
    queries = q[:, :, start:stop].unflatten(1, (k.shape[1], groups)).flatten(2, 3)
    scores = (queries @ k[:, :, begin:stop].transpose(-1, -2)).float() * softmax_scale
    scores = scores.unflatten(2, (groups, rows))  # (batch, num_kv_heads, groups, rows, stop - begin)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    row = torch.arange(start, stop, device=q.device)[:, None]
    column = torch.arange(begin, stop, device=q.device)
    hidden = column > row
    visible_keys = row[:, 0] + 1
    if window is not None:
        hidden = hidden | (column <= row - window)
        visible_keys = visible_keys.clamp(max=window)
    scores = scores.masked_fill(hidden, -torch.inf)
    margin = scores.logsumexp(-1) + (tau / visible_keys).clamp(max=1.0).log()
    tile_max = scores[..., : (last - first) * block_n].unflatten(-1, (last - first, block_n)).amax(-1)
    excess = tile_max - margin[..., None]  # (batch, num_kv_heads, groups, rows, key tiles)
    weight = (excess.detach() / temperature).softmax(-2)
    return (excess.masked_fill(weight == 0, 0.0) * weight).sum(-2).flatten(1, 2)


def choose_starts(seqlen: int, tile: tuple[int, int], count: int) -> list[int]:
    """Draw first rows of query tiles, each with the weight of the key tiles before it, so that all tiles count alike; [] without any.

    Drawn from torch's CPU generator, which gradient checkpointing puts back.
    """
    before = (torch.arange(0, seqlen, tile[0]) // tile[1]).float()
    if not before.sum():
        return []
    return [tile[0] * int(n) for n in torch.multinomial(before, count, replacement=True)]


class _AddGradient(torch.autograd.Function):
    """Pass the attention output on, and let backward reach ``term`` as if it had been added to the loss."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, term: Tensor) -> Tensor:
        """``out`` as it is."""
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of out, and 1 for the term."""
        return grads[0], torch.ones((), device=grads[0].device)


@dataclass(eq=False)
class Concentration:
    """The term ``weight`` x the mean over a model's layers of their stand-ins, in every forward of training that keeps gradients.

    Between ``attach`` and ``detach``; :func:`concentrating` does both. Its gradient enters at the layers' outputs, so neither the
    model's loss nor the training loop changes; ``drain`` has the values.

    weight: what a model that retains everything pays, in the units of the loss. temperature: nats over which a tile counts in part.
    tile: None for what the kernels run on a GPU in 16 bits. query_tiles: per layer and forward.
    """

    weight: float
    temperature: float = 2.0
    tile: tuple[int, int] | None = None
    query_tiles: int = 1
    scale: float = 1.0  # of the weight; gradient accumulation sums what it would average
    _sum: Tensor | None = field(default=None, init=False)
    _count: int = field(default=0, init=False)
    _model: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not (0 <= self.weight < float("inf") and 0 < self.temperature < float("inf")):
            raise ValueError(
                f"weight must be at least 0 and temperature above 0, got {self.weight} and {self.temperature}"
            )
        if self.query_tiles < 1:
            raise ValueError(f"query_tiles must be at least 1, got {self.query_tiles}")

    def attach(self, model: nn.Module) -> None:
        """Begin. Raises ``ValueError`` for a model that does not run "mala" (``mala_hf.patch_model``), or has such a term."""
        inner = _transformers_model(model)
        key, text_config = _text_config(inner)
        if text_config._attn_implementation != NAME:
            raise ValueError(
                f'the model runs {text_config._attn_implementation!r}: switch it to "{NAME}" first (mala_hf.patch_model)'
            )
        if CONCENTRATING not in AttentionInterface():
            AttentionInterface.register(CONCENTRATING, _concentrating_forward)
            AttentionMaskInterface.register(CONCENTRATING, mala_mask)
        self._layers = [module for module in inner.modules() if getattr(module, "layer_idx", None) is not None]
        for module in self._layers:
            _terms[module] = self
        inner.set_attn_implementation({key: CONCENTRATING})
        self._model = inner

    def detach(self) -> None:
        """End: the model runs "mala" again."""
        if self._model is None:
            return
        self._model.set_attn_implementation({_text_config(self._model)[0]: NAME})
        for module in self._layers:
            _terms.pop(module, None)
        self._model = None

    def drain(self) -> float | None:
        """Mean stand-in of the layers since the last call; None if there were none. Waits for the GPU."""
        mean = None if self._sum is None else float(self._sum) / self._count
        self._sum, self._count = None, 0
        return mean

    def of_layer(self, module: nn.Module, query: Tensor, key: Tensor, **kwargs: Any) -> Tensor | None:
        """The layer's stand-in, a float32 scalar; None where nothing can be skipped or the layer is dense. Shapes as Transformers'."""
        settings = layer_settings(module)
        if settings.heads:
            raise ValueError(f"the concentration term takes one tau for all heads of a layer, got {settings.heads}")
        tau = settings.common.tau
        if tau is None:
            return None
        tile = self.tile or settings.tile
        if tile is None:
            tile = tile_config(query.shape[-1], query.shape[-1], torch.bfloat16, DECODE_ROWS + 1).tile
        starts = choose_starts(query.shape[2], tile, self.query_tiles)
        if not starts:
            return None
        scale = kwargs.get("scaling")
        excesses = [
            tile_excess(
                query, key, start, tau=tau, tile=tile, temperature=self.temperature,
                softmax_scale=query.shape[-1] ** -0.5 if scale is None else scale,
                window=kwargs.get("sliding_window"), softcap=kwargs.get("softcap") or 0.0,
            ).flatten()
            for start in starts
        ]  # fmt: skip
        return torch.cat(excesses).div(self.temperature).sigmoid().mean()

    def add(
        self, module: nn.Module, query: Tensor, key: Tensor, attention_mask: Any, out: Tensor, kwargs: dict
    ) -> Tensor:
        """The layer's output, through which backward will reach its term."""
        _check_call(module, query, key, attention_mask, kwargs)
        found = self.of_layer(module, query, key, **kwargs)
        if found is None:
            return out
        self._sum = found.detach() if self._sum is None else self._sum + found.detach()
        self._count += 1
        return _AddGradient.apply(out, self.weight * self.scale / self._num_layers(module) * found)

    @staticmethod
    def _num_layers(module: nn.Module) -> int:
        return getattr(getattr(module, "config", None), "num_hidden_layers", 1)


@contextmanager
def concentrating(model: nn.Module, weight: float, **settings: Any) -> Iterator[Concentration]:
    """Train ``model`` with the term inside a ``with`` block; raises as :class:`Concentration` and its ``attach``."""
    term = Concentration(weight, **settings)
    term.attach(model)
    try:
        yield term
    finally:
        term.detach()


_terms: WeakKeyDictionary[nn.Module, Concentration] = WeakKeyDictionary()


def _concentrating_forward(module, query, key, value, attention_mask=None, **kwargs) -> tuple[Tensor, None]:
    out, _ = mala_attention_forward(module, query, key, value, attention_mask, **kwargs)
    term = _terms.get(module)
    if term is None or not (module.training and out.requires_grad):
        return out, None
    return term.add(module, query, key, attention_mask, out, kwargs), None


def _check_call(module: nn.Module, query: Tensor, key: Tensor, attention_mask: Any, kwargs: dict) -> None:
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    packed = any(kwargs.get(name) is not None for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    if attention_mask is not None or packed or not causal or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"layer {getattr(module, 'layer_idx', None)}: the concentration term is for causal sequences of one length, not padded "
            "or packed"
        )
    if kwargs.get("s_aux") is not None:
        raise ValueError("the concentration term has no attention sinks")
    if torch.compiler.is_compiling():
        raise ValueError("the concentration term draws query tiles on the host, which a compiled graph cannot")


class ConcentrationCallback(TrainerCallback):
    """Adds :class:`Concentration` to a ``Trainer``'s training and logs its value as ``retained_surrogate``.

    ``Trainer(..., callbacks=[ConcentrationCallback(weight=0.1)])``; the model has to run "mala". The arguments are Concentration's.
    Raises ``ValueError`` when training begins for fp16, whose loss scaling would not reach the term.
    """

    def __init__(self, weight: float, **settings: Any) -> None:
        self.term = Concentration(weight, **settings)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Attach."""
        if args.fp16:
            raise ValueError("the concentration term needs bf16 or float32: fp16's loss scaling would not reach it")
        self.term.scale = 1.0 / args.gradient_accumulation_steps
        self.term.attach(model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Put the mean since the last entry into the log."""
        value = self.term.drain() if logs is not None and "loss" in logs else None
        if value is not None:
            logs[LOGGED] = value
            if state.log_history:
                state.log_history[-1][LOGGED] = value

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Detach."""
        self.term.detach()

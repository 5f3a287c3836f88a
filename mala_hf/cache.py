# SPDX-License-Identifier: Apache-2.0
"""A cache that also keeps its keys in INT8, so that a decode reads a quarter of it to learn which exact keys and values it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from .growing import GrowingTensors
from .ops import KeyPlane, quantize_keys


class MalaLayer(DynamicLayer):
    """Keys and values of one layer, and the plane of the keys, in buffers with room for more.

    ``keys`` and ``values`` (batch, num_heads, tokens, head_dim) are views of the buffers, valid until the next call that changes the
    layer. The keys that :meth:`update` returns carry their plane as the attribute ``mala_plane``, where the adapter of "mala" finds it.
    """

    keys: Tensor | None
    values: Tensor | None
    is_initialized: bool

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype, device and shape of these states, and no content."""
        super().lazy_initialization(key_states, value_states)
        batch, num_heads, _, head_dim = key_states.shape
        plane = KeyPlane.empty(batch, num_heads, 0, head_dim, key_states.device)
        self._store = GrowingTensors.like([key_states, value_states, *plane.tensors])
        self._set_views()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states (batch, num_heads, new, head_dim), and return all there are.

        Raises:
            ValueError: for states that do not fit the earlier ones, or that require a gradient: they are written in place.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        start, new = self._store.length, key_states.shape[-2]
        self._store.make_room(new)
        keys, values, *plane = self._store.buffers
        keys[:, :, start : start + new] = key_states
        values[:, :, start : start + new] = value_states
        quantize_keys(keys[:, :, start : start + new].transpose(1, 2), KeyPlane(*plane), start)
        self._store.length += new
        self._set_views()
        keys, values, *plane = self._store.views()
        keys.mala_plane = KeyPlane(*plane)  # type: ignore[attr-defined]
        return keys, values

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        for name, x, own in (
            ("keys", key_states, self._store.buffers[0]),
            ("values", value_states, self._store.buffers[1]),
        ):
            if torch.is_grad_enabled() and x.requires_grad:
                raise ValueError(
                    f"MalaCache writes {name} in place, and they require a gradient: run under torch.no_grad()"
                )
            if (*x.shape[:2], *x.shape[3:]) != (*own.shape[:2], *own.shape[3:]) or (x.dtype, x.device) != (
                own.dtype,
                own.device,
            ):
                held = (*own.shape[:2], self._store.length, *own.shape[3:])
                raise ValueError(
                    f"new {name} must fit those in the cache, {own.dtype} {held} on {own.device} but for the tokens, "
                    f"got {x.dtype} {tuple(x.shape)} on {x.device}"
                )

    def _set_views(self) -> None:
        self.keys, self.values = self._store.views()[:2]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, as the parent does; their room stays."""
        if self.is_initialized:
            super().crop(tokens_to_remove)
            self._store.length = self.get_seq_length()
            self._set_views()

    def _select(self, indices: Tensor) -> None:
        if self.get_seq_length() > 0:
            self._store.select(indices)
            self._set_views()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequences in the order of ``beam_idx``."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times."""
        if self.is_initialized:
            self._select(torch.arange(self._store.buffers[0].shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these sequences."""
        self._select(indices)

    def offload(self) -> None:
        """Keys, values and plane to the CPU, in the order of the current stream."""
        if self.is_initialized:
            self._store.to("cpu")
            self._set_views()

    def prefetch(self) -> None:
        """And back, in that order too."""
        if self.is_initialized and self._store.buffers[0].device != self.device:
            self._store.to(self.device)
            self._set_views()

    def reset(self) -> None:
        """Forget everything, buffers included."""
        if self.is_initialized:
            del self._store
        self.keys = self.values = None
        self.is_initialized = False

    @property
    def tensors(self) -> list[Tensor]:
        """All that it has, wherever it lies."""
        return list(self._store.buffers) if self.is_initialized else []

    @property
    def reserve_bytes(self) -> int:
        """Of buffers that hold no token yet."""
        if not self.is_initialized:
            return 0
        return sum(x.nbytes for x in self._store.buffers) - sum(x.nbytes for x in self._store.views())

    @property
    def plane_bytes(self) -> int:
        """Of the tokens that count."""
        return sum(x.nbytes for x in self._store.views()[2:]) if self.is_initialized else 0


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of all layers: ``plane`` is what MALA adds, ``reserve`` room for tokens to come, of all three kinds."""

    keys: int
    values: int
    plane: int
    reserve: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.keys + self.values + self.plane + self.reserve


class MalaCache(DynamicCache):
    """Transformers' dynamic cache, which also keeps an INT8 plane of the keys of its full-attention layers.

    >>> cache = MalaCache(config=model.config)
    >>> _ = model.generate(**inputs, past_key_values=cache, max_new_tokens=2)
    >>> cache.memory().plane > 0
    True

    A decode with "mala" in two passes then reads the plane, a quarter of keys and values in 16 bit, and exact keys and values only of
    tiles that can matter. Keys, values and plane lie in buffers that grow by a quarter, so a step copies nothing but its own tokens.
    Layers of other kinds (sliding, chunked, linear, hybrid, indexed) are Transformers' own and have no plane. All else is as in the
    parent: crop, beam search, offloading, ``copy.deepcopy``, a new cache from the (keys, values) that iteration gives.

    Args:
        ddp_cache_data: (keys, values) of each layer to begin with. config: of the model; without it every layer is a full one.
        offloading, offload_only_non_sliding: keep layers on the CPU while they are not needed. Copies are under way between calls, so
            read layers by iteration, which waits for them.

    Raises:
        ValueError: at an update with keys that require a gradient, or that do not fit the earlier ones.
    """

    layers: list[Any]
    layer_class_to_replicate: type | None

    def __init__(
        self,
        ddp_cache_data: Iterable[tuple[Tensor | None, ...]] | None = None,
        config: PreTrainedConfig | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
    ) -> None:
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise ValueError(f"config takes a model's config (model.config), got a {type(config).__name__}")
        self._in_use: list[Tensor] = []
        super().__init__(
            ddp_cache_data, config=config, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding
        )
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = MalaLayer
        self.layers = [_with_plane(layer) if type(layer) is DynamicLayer else layer for layer in self.layers]

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Start to bring the next layer back, from ``layer_idx`` on, while the one before ``layer_idx`` is updated and read.

        The layer's copy to the CPU may not have begun yet, nor what reads the memory that it will take: Transformers before 5.20 starts
        all the same, and later ones wait for the default stream only.
        """
        self._order_streams()
        # to be freed here, not earlier: their memory belongs to the stream of the prefetches, which now waits for all that reads it
        self._in_use.clear()
        layer = self.layers[layer_idx - 1]
        layer.prefetch()  # here already, unless it is the only one
        self._in_use.extend(_tensors_of(layer))
        super().prefetch(layer_idx, only_non_sliding)

    def _order_streams(self) -> torch.cuda.Stream:
        """Let the caller's stream, returned, and that of the prefetches each wait for what the other was asked so far."""
        current = torch.cuda.current_stream(self.prefetch_stream.device)
        current.wait_stream(self.prefetch_stream)
        self.prefetch_stream.wait_stream(current)
        return current

    def _settle(self) -> None:
        """Wait for copies under way, before layers are read where they lie, on the CPU too."""
        if self.offloading:
            self._order_streams().synchronize()
            self._in_use.clear()

    def __iter__(self) -> Iterator[tuple[Tensor | None, ...]]:
        """(keys, values, window or None) of each layer."""
        self._settle()
        return super().__iter__()

    def reset(self) -> None:
        """Forget everything."""
        self._settle()
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequences in the order of ``beam_idx``."""
        self._settle()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times."""
        self._settle()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these sequences."""
        self._settle()
        super().batch_select_indices(indices)

    def memory(self) -> CacheMemory:
        """What keys, values, plane and reserve take now, wherever they lie. States of linear attention are not counted."""
        keys, values = (
            sum(x.nbytes for layer in self.layers if isinstance(x := getattr(layer, name, None), Tensor))
            for name in ("keys", "values")
        )
        ours = [layer for layer in self.layers if isinstance(layer, MalaLayer)]
        return CacheMemory(
            keys, values, sum(layer.plane_bytes for layer in ours), sum(layer.reserve_bytes for layer in ours)
        )


def _tensors_of(layer: Any) -> list[Tensor]:
    """Of a layer of any kind."""
    return layer.tensors if isinstance(layer, MalaLayer) else [x for x in vars(layer).values() if isinstance(x, Tensor)]


def _with_plane(layer: DynamicLayer) -> MalaLayer:
    """The same content."""
    new = MalaLayer()
    if layer.is_initialized and layer.get_seq_length() > 0:
        new.update(layer.keys, layer.values)
    return new

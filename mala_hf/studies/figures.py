# SPDX-License-Identifier: Apache-2.0
"""What one way of choosing tiles did in all layers of a model: work, omitted mass and output error, over layers, heads and rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..fidelity import percentile_95
from .scores import Outcome

SPREADS = {"omitted": "omitted_mass", "error": "output_error", "bound": "omitted_mass_bound"}


def spread(values: Tensor) -> dict[str, float]:
    """``mean`` and ``p95``, the 95th percentile, over all entries."""
    return {"mean": values.double().mean().item(), "p95": percentile_95(values)}


@dataclass
class Figures:
    """Gathers outcomes, a query tile after the other. A layer's slots are those of all its heads."""

    rows: int = 0  # query rows of all layers and heads
    _slots: dict[int, Tensor] = field(default_factory=dict)  # by layer: float64 (2, H) retained and visible
    _values: dict[str, dict[int, list[Tensor]]] = field(default_factory=lambda: {name: {} for name in SPREADS})

    def add(self, layer: int, found: Outcome) -> None:
        """Add some query tiles of a layer."""
        slots = torch.stack([found.slots, found.visible_slots])
        self._slots[layer] = self._slots.get(layer, 0) + slots
        self.rows += found.omitted.numel()
        for name, by_layer in self._values.items():
            by_layer.setdefault(layer, []).append(getattr(found, name).transpose(0, 1).flatten(1))  # (H, rows)

    def to_dict(self) -> dict[str, Any]:
        """Key slots per query, the share of the visible ones, and mean and P95 of masses (probabilities) and errors (relative)."""
        retained, visible = torch.stack([slots.sum(1) for slots in self._slots.values()]).sum(0).tolist()
        found = {
            "key_slots_per_query": retained / self.rows,
            "visible_slots_per_query": visible / self.rows,
            "work_fraction": retained / visible,
        }
        for name, label in SPREADS.items():
            values = torch.cat([part.flatten() for parts in self._values[name].values() for part in parts])
            found |= {f"{label}_{key}": value for key, value in spread(values).items()}
        return found

    def by_head(self) -> dict[int, list[dict[str, float]]]:
        """For each layer, each head's retained slots, summed over rows, and the mean of its omitted mass."""
        found = {}
        for layer, slots in self._slots.items():
            omitted = torch.cat(self._values["omitted"][layer], 1).double().mean(1).tolist()
            found[layer] = [
                {"slots": one, "omitted": mass} for one, mass in zip(slots[0].tolist(), omitted, strict=True)
            ]
        return found

# SPDX-License-Identifier: Apache-2.0
"""Ways to spend the same number of tiles: fixed by position, by layer, head and position, freely by reference mass, and by the rule.

Reference mass is the probability that full attention gives a tile, summed over the rows of its query tile; nobody knows it before the
work is done. Fixed budgets are averages of what the rule retained on other text, scaled to the same total; within its budget a
query tile takes the tiles of largest reference mass, so that what differs is where the work goes, not how well it is spent. The tile
on the diagonal is always among them.

Letters in the shape comments: A layers, H heads, Q query tiles, T key tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALLOCATIONS = ("position", "layer_head_position", "oracle", "mala")


def visible_tiles(length: int, tile: tuple[int, int]) -> Tensor:
    """int64 (Q,): key tiles that each query tile of a causal sequence sees."""
    last_row = torch.arange(tile[0], length + 1, tile[0])
    return -(-last_row // tile[1])


def forced_first(mass: Tensor, visible: Tensor) -> Tensor:
    """Mass (.., Q, T) with -1 for tiles that are not visible and infinity on the diagonal."""
    tiles = torch.arange(mass.shape[-1], device=mass.device)
    last = (visible - 1).to(mass.device)[:, None]
    return mass.masked_fill(tiles > last, -1).masked_fill(tiles == last, torch.inf)


def oracle(mass: Tensor, visible: Tensor, total: int) -> Tensor:
    """Bool (A, H, Q, T): the ``total`` tiles of largest mass (A, H, Q, T), wherever they are."""
    flat = forced_first(mass, visible).flatten()
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[flat.topk(total).indices] = True
    return chosen.view_as(mass)


def within_budgets(mass: Tensor, visible: Tensor, budgets: Tensor) -> Tensor:
    """Bool (A, H, Q, T): in each query tile as many tiles of largest mass as its budget, int (A, H, Q), says."""
    order = torch.argsort(forced_first(mass, visible), dim=-1, descending=True, stable=True)
    rank = order.argsort(-1)
    return rank < budgets[..., None]


def scaled_budgets(wanted: Tensor, visible: Tensor, total: int) -> Tensor:
    """int64 (A, H, Q): ``wanted`` (A, H, Q) times one factor, from 1 to what is visible (Q,), in whole tiles; they add up to ``total``.

    Raises ``ValueError`` for a total that cannot be reached.
    """
    most = visible.to(wanted.device).double().expand(wanted.shape)
    if not wanted.numel() <= total <= most.sum():
        raise ValueError(f"a total of {total} tiles is not between {wanted.numel()} and {int(most.sum())}")
    wanted = wanted.double().clamp(min=1e-9)
    low, high = 0.0, (most / wanted).max().item()
    for _ in range(100):
        factor = (low + high) / 2
        too_much = torch.minimum(wanted * factor, most).clamp(min=1).sum() > total
        low, high = (low, factor) if too_much else (factor, high)
    exact = torch.minimum(wanted * low, most).clamp(min=1)
    budgets = exact.floor()
    missing = total - int(budgets.sum())
    rest = torch.where(budgets < most, exact - budgets, -1.0).flatten()
    budgets.view(-1)[rest.topk(missing).indices] += 1
    return budgets.long()


def allocate(name: str, mass: Tensor, retained: Tensor, typical: Tensor, visible: Tensor) -> Tensor:
    """Bool (A, H, Q, T): as many tiles as ``retained`` has, allocated by the method of that name, one of ``ALLOCATIONS``.

    Args:
        mass: (A, H, Q, T) reference mass. retained: bool, what the rule retained, on the same text.
        typical: (A, H, Q) how many tiles the rule retained on other texts, on average.
        visible: int (Q,), as ``visible_tiles`` gives it.
    """
    total = int(retained.sum())
    if name == "mala":
        return retained
    if name == "oracle":
        return oracle(mass, visible, total)
    if name not in ALLOCATIONS:
        raise ValueError(f"an allocation is one of {ALLOCATIONS}, got {name!r}")
    wanted = typical.mean((0, 1), keepdim=True).expand_as(typical) if name == "position" else typical
    return within_budgets(mass, visible, scaled_budgets(wanted, visible, total))

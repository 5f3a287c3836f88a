# SPDX-License-Identifier: Apache-2.0
"""What an attention call did: which tiles were retained, and the certificate of what was omitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from torch import Tensor

NOT_VISIBLE, SKIPPED, RETAINED = 0, 1, 2
DISCOVERIES = ("auto", "fused", "int8", "dense")  # how the tiles to retain may be found
INSTEAD = "Use discovery='auto' (for a model: MalaConfig(discovery='auto'))."


@dataclass(frozen=True)
class Choice:
    """How a call, or some of its heads, was computed, and why.

    Attributes:
        way: "fused" (every tile scored by the kernel that attends), "int8" (tiles found in INT8 first, the same bits) or "dense"
            (every tile retained, nothing omitted: by torch's SDPA, by MALA's own kernel with tau = 0, or by FlashAttention-4).
        reason: in words.
        kv_heads: those that went this way, with their query heads; None for all.
    """

    way: str
    reason: str
    kv_heads: Optional[tuple[int, ...]] = None

    def __str__(self) -> str:
        heads = "" if self.kv_heads is None else f" in KV heads {', '.join(map(str, self.kv_heads))}"
        return f"{self.way}{heads}: {self.reason}"


@dataclass(frozen=True)
class Work:
    """The post-score work of one attention call. Score discovery (all visible tiles) is not counted.

    Attributes:
        tiles: int8 (num_sequences, num_heads, q_tiles, k_tiles); 0 not visible, 1 skipped, 2 retained. Query tiles start at the
            first row that sees a key, key tiles at the first key of the sequence.
        certificate: shaped and typed like lse; ``c(i)``, the sum over skipped tiles of (legal keys) * exp(tile max - lse).
        rows: int32 (num_sequences, q_tiles); query rows in each query tile.
        tile: (BLOCK_M, BLOCK_N); part of the rule's definition.
        impl: the implementation that ran: "triton", "blockwise", "reference", "sdpa" for torch's dense kernels, or "flash_attn_4";
            two of them, "triton, sdpa", where heads differ.
        support_bytes: memory that the call keeps until backward for the retained tiles, 1 bit each; 0 where it keeps none.
        form: "single" pass from the diagonal to earlier keys, or a decode in "two_pass", "int8_two_pass" or "split" form. In a decode
            the query heads of a KV head share their tiles, and in exact two passes omitted mass = certificate / (1 + certificate); from
            an INT8 plane that is the most it can be.
        choices: how it was computed and why; more than one where heads went different ways.
    """

    tiles: Tensor
    certificate: Tensor
    rows: Tensor
    tile: tuple[int, int]
    impl: str
    support_bytes: int = 0
    form: str = "single"
    choices: tuple[Choice, ...] = ()

    @property
    def choice(self) -> str:
        """ "fused", "int8" or "dense"; "dense, fused" or "dense, int8" where heads differ."""
        return ", ".join(sorted(choice.way for choice in self.choices))

    @property
    def reason(self) -> str:
        """Why, in words."""
        return "; ".join(choice.reason if len(self.choices) == 1 else str(choice) for choice in self.choices)

    @property
    def retained(self) -> Tensor:
        """Bool map of retained tiles, shaped like ``tiles``."""
        return self.tiles == RETAINED

    @property
    def visible(self) -> Tensor:
        """Bool map of tiles with at least one legal pair, shaped like ``tiles``."""
        return self.tiles != NOT_VISIBLE

    def _slots_per_query(self, chosen: Tensor) -> Tensor:
        slots = (chosen.sum(-1) * self.rows[:, None, :]).sum(-1) * self.tile[1]
        return slots / self.rows.sum(-1).clamp(min=1)[:, None]

    @property
    def key_slots_per_query(self) -> Tensor:
        """float32 (num_sequences, num_heads): BLOCK_N slots for each row of a retained tile, mean over rows."""
        return self._slots_per_query(self.retained)

    @property
    def visible_slots_per_query(self) -> Tensor:
        """float32 (num_sequences, num_heads): the same count with every visible tile retained."""
        return self._slots_per_query(self.visible)

    @property
    def work_fraction(self) -> Tensor:
        """float32 (num_sequences, num_heads): retained / visible slots; 1 where nothing is visible."""
        visible = self.visible_slots_per_query
        return (self.key_slots_per_query / visible).where(visible > 0, 1.0)

    @property
    def omitted_mass_bound(self) -> Tensor:
        """float32, shaped like lse: certified upper bound c / (1 + c) of the probability that full attention gives the skipped keys."""
        return self.certificate / (1 + self.certificate)

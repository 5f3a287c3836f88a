# SPDX-License-Identifier: Apache-2.0
"""What MALA did in each layer and head of a model while a ``with`` block ran, in one process or in all of a group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed

from .ops.hf import recorders
from .ops.hf_heads import HeadWork
from .ops.hf_settings import DENSE
from .patch import transformers_models
from .recorded_layer import LayerWork, counted_slots


class WorkReport:
    """What :func:`record_work` saw. ``print`` it for a table, :meth:`to_dict` for JSON, :meth:`gathered` for all processes."""

    def __init__(self) -> None:
        self._by_name: dict[str, LayerWork] = {}

    @property
    def layers(self) -> dict[int | str, LayerWork]:
        """By layer index; by module name where indices are missing or shared (encoder-decoder models)."""
        works = list(self._by_name.values())
        indices = [work.index for work in works]
        by_index = None not in indices and len(set(indices)) == len(indices)
        return {(work.index if by_index else work.name): work for work in works}  # type: ignore[misc]

    def add(self, name: str, index: int | None, calls: list[HeadWork]) -> None:
        """Add one layer's forward."""
        self._by_name.setdefault(name, LayerWork(name, index)).add(calls)

    def gathered(self, group: torch.distributed.ProcessGroup | None = None) -> WorkReport:
        """Return one report of what all processes of ``group`` (None: all there are) saw, the same in each.

        All of them must call it. Processes with other sequences (data parallel, FSDP) add theirs; processes with other heads of the
        same sequences (tensor and Ulysses sequence parallel) put them side by side; layers that one process alone has are taken over.
        Without ``torch.distributed`` it is a copy.

        Raises:
            ValueError: where processes share heads and nobody knows which has which.
        """
        reports: list[dict[str, LayerWork]] = [self._by_name]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            reports = [{} for _ in range(torch.distributed.get_world_size(group))]
            torch.distributed.all_gather_object(reports, self._by_name, group=group)
        whole = WorkReport()
        for report in reports:
            for name, work in report.items():
                if name not in whole._by_name:
                    whole._by_name[name] = LayerWork(name, work.index)
                whole._by_name[name].merge(work)
        return whole

    @property
    def work_fraction(self) -> float:
        """Retained / visible slots over all counted layers, heads and rows."""
        retained, visible = counted_slots(self._by_name.values())
        return retained / visible if visible else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts, fit for JSON."""
        return {"work_fraction": self.work_fraction, "layers": [work.to_dict() for work in self._by_name.values()]}

    def __str__(self) -> str:
        if not self._by_name:
            return "no attention layer of this model ran MALA"
        lines = [
            "post-score work per query row (key slots; score discovery not counted), omitted mass as certified upper bound",
            f"{'layer':>5} {'tau':>6} {'rows':>8} {'visible':>9} {'retained':>9} {'work':>6} {'bound':>8} {'P95':>8}  work by head, %",
        ]
        lines += [_line(key, work) for key, work in self.layers.items()]
        tiles = sorted({tile for work in self._by_name.values() for tile in work.tiles})
        impls = sorted({impl for work in self._by_name.values() for impl in work.impls})
        kept = sum(work.support_bytes for work in self._by_name.values())
        lines.append(
            f"all: work {self.work_fraction:.1%}; tiles {', '.join(f'{m}x{n}' for m, n in tiles)}; {', '.join(impls)}"
            + (f"; {kept:,} bytes kept for backward" if kept else "")
        )
        return "\n".join(lines + self._choice_lines())

    def _choice_lines(self) -> list[str]:
        """How calls were computed and why, where there was something to choose."""
        calls: dict[tuple[str, str], int] = {}
        for work in self._by_name.values():
            for choice, count in work.choices.items():
                calls[choice] = calls.get(choice, 0) + count
        ways = {way for way, _ in calls}
        return (
            [] if ways <= {"fused"} else [f"{way} {count} times: {why}" for (way, why), count in sorted(calls.items())]
        )


def _line(key: int | str, work: LayerWork) -> str:
    """One layer; means are over the heads that were counted."""
    if work.is_dense:
        return f"{key!s:>5} {DENSE:>6}  dense, not counted"
    counted = torch.tensor([work.taus.get(head) is not None for head in range(work.num_heads)])
    visible, retained, bound = (
        x[counted].mean().item()
        for x in (work.visible_slots_per_query, work.key_slots_per_query, work.omitted_mass_bound_mean)
    )
    share = retained / visible if visible else 1.0
    tau = "varied" if isinstance(work.tau, list) else f"{work.tau:.3g}"
    heads = " ".join(_share(work, head) for head in range(work.num_heads))
    return (
        f"{key!s:>5} {tau:>6} {work.rows:>8} {visible:>9.1f} {retained:>9.1f} {share:>6.1%} "
        f"{bound:>8.2e} {work.omitted_mass_bound_p95.max():>8.2e}  {heads}"
    )


def _share(work: LayerWork, head: int) -> str:
    """Per cent of the work of one head."""
    if head not in work.taus:
        return "?"  # another process has it
    return DENSE if work.taus[head] is None else f"{100 * work.work_fraction[head]:.0f}"


@contextmanager
def record_work(model: torch.nn.Module) -> Iterator[WorkReport]:
    """Count the work of ``model``'s layers inside a ``with`` block, over all its forwards (a generation's prefill and decoding too).

    The report is this process's; :meth:`WorkReport.gathered` puts those of all processes together. Blocks may be nested, also for
    several models. Recomputation by gradient checkpointing may be counted or not.

    Raises:
        ValueError: for what holds no Transformers model.

    >>> with mala_attention(model), record_work(model) as work:
    ...     _ = model(**inputs)
    >>> 0 < work.work_fraction <= 1
    True
    """
    transformers_models(model)  # raises where there is none
    names = {id(module): name for name, module in model.named_modules()}
    report = WorkReport()

    def listen(module: torch.nn.Module, calls: list[HeadWork]) -> None:
        if id(module) in names:
            report.add(names[id(module)], getattr(module, "layer_idx", None), calls)

    recorders.append(listen)
    try:
        yield report
    finally:
        recorders.remove(listen)

# SPDX-License-Identifier: Apache-2.0
"""What the scripts of the studies on a real model share: their options, the model, and the file that they write."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stored_results import as_text, write_whole

from mala_hf.checkpoint import OFFLINE_MODEL, load_model
from mala_hf.info import checked_out_commit, device_name, versions
from mala_hf.studies.row_store import RowStore
from mala_hf.text import read_text


def parser_of(description: str | None, sizes: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Options of every study, and one for each size; those that are not given get the full size, or the small one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hub name or folder (default: SmolLM2-135M-Instruct from the package index)")
    parser.add_argument("--tokenizer", help="of another Hub name or folder than the model's")
    parser.add_argument("--name", help="of the model in the results (default: the last part of --model)")
    parser.add_argument("--text", help="UTF-8 text, plain or .gz (default: the novel Persuasion)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    parser.add_argument("--commit", help="commit to record; default: that of this checkout")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU measures in seconds")
    parser.add_argument("--output", type=Path, required=True, help="JSON; rows gather beside it until all are there")
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=float("inf"),
        help="write what is there after so long; the same command goes on",
    )
    for size, (full, small) in sizes.items():
        many = isinstance(full, tuple)
        kind = type(full[0] if many else full)
        option = "--" + size.replace("_", "-")
        parser.add_argument(
            option, type=kind, nargs="+" if many else None, help=f"default: {shown(full)}; small: {shown(small)}"
        )
    return parser


def shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def parsed(parser: argparse.ArgumentParser, sizes: Mapping[str, Any]) -> argparse.Namespace:
    """The options with all sizes; lists are tuples."""
    options = parser.parse_args()
    for size, (full, small) in sizes.items():
        given = getattr(options, size)
        value = (small if options.small else full) if given is None else given
        setattr(options, size, tuple(value) if isinstance(value, list) else value)
    return options


class Budget:
    """Times the parts of a study, and says whether there is time for another one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.began = time.monotonic()
        self.end = self.began + options.budget_seconds
        self.not_run: list[str] = []

    def allows(self, part: str, seconds: float = 0.0) -> bool:
        """Whether a part that takes at least so long would end in time; if not, it is among ``not_run``."""
        if time.monotonic() + seconds < self.end:
            self.began = time.monotonic()
            return True
        self.not_run.append(part)
        return False

    def took(self, part: str) -> float:
        """Seconds since the part was allowed, which are printed."""
        seconds = time.monotonic() - self.began
        print(f"{part}: {seconds:.1f} s", flush=True)
        return seconds


def loaded(options: argparse.Namespace, dtype: str = "float32", **more: Any) -> tuple[Any, Any]:
    """Model, with torch's attention, and tokenizer."""
    return load_model(
        options.model, tokenizer=options.tokenizer, device=options.device, dtype=getattr(torch, dtype), **more
    )


def store_of(options: argparse.Namespace, **settings: Any) -> RowStore:
    """The rows that are there, measured with the same settings; ``SystemExit`` where the file has others."""
    named = {"model": options.name or (Path(options.model).name if options.model else OFFLINE_MODEL)}
    named["text"] = read_text(options.text)[1]
    try:
        return RowStore(options.output.with_suffix(".rows.jsonl"), as_json(named | settings))
    except ValueError as error:
        raise SystemExit(str(error)) from error


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same with lists for tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def finish(options: argparse.Namespace, store: RowStore, not_run: Sequence[str] = (), **facts: Any) -> None:
    """Write the result, with what was ``not_run``; the rows that gathered beside it are removed when that is nothing."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found = {
        "device": device_name(device),
        "commit": options.commit or checked_out_commit(),
        "versions": versions(),
        **store.settings,
        **as_json(facts),
    }
    write_whole(options.output, as_text(found | {"not_run": list(not_run), "rows": store.rows}))
    print(f"{len(store.rows)} rows in {options.output}")
    if not_run:
        print(f"out of time; the same command goes on with {', '.join(not_run)}")
    else:
        store.path.unlink()

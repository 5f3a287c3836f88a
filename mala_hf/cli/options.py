# SPDX-License-Identifier: Apache-2.0
"""What subcommands share: options and notices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..implementations import Implementation


def notice(message: str) -> None:
    """Tell the user, on stderr, what is not an error."""
    print(f"mala-hf: {message}", file=sys.stderr)


def add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], summary: str) -> Any:
    """Add a subcommand with the options that all of them share."""
    description = summary[0].upper() + summary[1:] + "."
    parser = commands.add_parser(name, help=summary, description=description, usage=f"mala-hf {name} [options]")
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--quiet", action="store_true", help="no progress bars, no warnings of Transformers")
    parser.add_argument("--traceback", action="store_true", help="on failure show where, not just one line")
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose model and device."""
    parser.add_argument("--model", metavar="NAME", help="Hub name or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda:0, ... (default: a GPU if there is one)")


def add_evaluation_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose how the model is loaded and which attentions are compared."""
    parser.add_argument("--tokenizer", metavar="NAME", help="Hub name or folder (default: the model's)")
    parser.add_argument("--dtype", metavar="NAME", help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--rope-scaling", metavar="JSON", help='for example {"rope_type": "yarn", "factor": 4}')
    parser.add_argument(
        "--attn",
        dest="implementations",
        nargs="+",
        default=["sdpa", "mala"],
        metavar="A",
        help="default: sdpa mala; compared with the first",
    )
    parser.add_argument(
        "--taus", type=float, nargs="+", default=[1.0], metavar="TAU", help="tolerances of mala (default: 1)"
    )


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return torch's floating-point type of that name; ``ValueError`` for one that models do not compute in."""
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(f"dtype must be float32, bfloat16, float16 or float64, got {name}")
    return dtype


def label(row: dict[str, Any]) -> str:
    """Name the implementation of a row of results."""
    return Implementation(row["implementation"], row["tau"]).label

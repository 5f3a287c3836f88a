# SPDX-License-Identifier: Apache-2.0
"""``mala-hf info``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .options import add_command


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = add_command(commands, "info", run, "versions, device, and what a call of MALA would run here")
    parser.add_argument(
        "--head-dim", type=int, default=128, metavar="N", help="head_dim to show the tiles of (default: 128)"
    )


def run(options: argparse.Namespace) -> None:
    """Print versions, device and what would run."""
    from ..info import info

    found = info(options.head_dim)
    if options.json:
        print(json.dumps(found))
        return
    for name, version in found["versions"].items():
        print(f"{name:<15} {version or 'not installed'}")
    print(
        f"{'device':<15} {found['device']}"
        + (f", compute capability {found['capability']}" if found["capability"] else "")
    )
    print(f"{'implementation':<15} {found['implementation']}")
    tiles = found["tiles"]
    shapes = ", ".join(f"{phase} {tiles[phase][0]} x {tiles[phase][1]}" for phase in ("prefill", "decode"))
    print(f"{'tiles':<15} {shapes} (head_dim {tiles['head_dim']}, {tiles['dtype']})")
    print(f"{'registered':<15} {', '.join(found['registered'])}")

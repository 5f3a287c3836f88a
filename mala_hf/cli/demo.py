# SPDX-License-Identifier: Apache-2.0
"""``mala-hf demo``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .checks import check_place
from .options import add_command, add_model_options


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = add_command(commands, "demo", run, "full attention and MALA side by side on a real model and text")
    add_model_options(parser)
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text, plain or .gz (default: the novel Persuasion)")
    parser.add_argument("--length", type=int, metavar="N", help="tokens of text (default: 2048, on a GPU up to 8192)")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="tokens to continue with (default: 64)")
    parser.add_argument(
        "--taus",
        type=float,
        nargs="+",
        default=[1.0, 10.0],
        metavar="TAU",
        help="tolerances; 0 is full attention (default: 1 10)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo_results"),
        metavar="DIR",
        help="for JSON and picture (default: demo_results)",
    )


def run(options: argparse.Namespace) -> None:
    """Run the demo, save its files, and print tables or JSON."""
    from ..demo import DemoSettings, run_demo
    from ..extras import require_packages

    settings = DemoSettings(
        model=options.model,
        text=options.text,
        length=options.length,
        new_tokens=options.new_tokens,
        taus=tuple(options.taus),
        device=options.device,
    )
    check_place(options, folder=options.output)
    require_packages("demo", ("accelerate", "gguf", "matplotlib", "rich"))
    from ..report import print_report, save_json, save_picture

    result = run_demo(settings, quiet=options.quiet)
    files = [save_json(result, options.output), save_picture(result, options.output)]
    if options.json:
        print(json.dumps(result))
        return
    print_report(result)
    print("\nWritten: " + ", ".join(map(str, files)))

# SPDX-License-Identifier: Apache-2.0
"""``mala-hf lm-eval``."""

from __future__ import annotations

import argparse
from typing import Any

from ..extras import require_packages


def add(commands: Any) -> None:
    """Add the subcommand: all that follows it is lm_eval's, but for ``--traceback``."""
    # no option starts with the null character, so every argument is taken as it is
    parser = commands.add_parser(
        "lm-eval",
        help="lm-evaluation-harness with MALA registered",
        add_help=False,
        prefix_chars="\0",
    )
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=run, traceback=False)


def run(options: argparse.Namespace) -> None:
    """Hand over to lm_eval's command."""
    require_packages("eval", ("lm_eval",))
    from ..lm_eval.launcher import launch

    options.traceback = "--traceback" in options.arguments
    launch([one for one in options.arguments if one != "--traceback"])

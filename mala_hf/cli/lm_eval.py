# SPDX-License-Identifier: Apache-2.0
"""``mala-hf lm-eval``."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from ..extras import how_to_install, require_packages

HELP = """\
usage: mala-hf lm-eval [arguments of lm_eval]

lm-evaluation-harness's own command with MALA registered (attn_implementation=mala) and RULER's tasks beside its own;
--traceback shows on failure where, not just one line.

Its own help is shown here once it is installed: {}"""


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
    """Hand over to lm_eval's command, whose own help is shown where it is installed."""
    if {"--help", "-h"} & {*options.arguments} and find_spec("lm_eval") is None:
        print(HELP.format(how_to_install("eval")))
        return
    require_packages("eval", ("lm_eval",))
    from ..lm_eval.launcher import launch

    options.traceback = "--traceback" in options.arguments
    launch([one for one in options.arguments if one != "--traceback"])

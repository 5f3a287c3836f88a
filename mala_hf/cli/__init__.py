# SPDX-License-Identifier: Apache-2.0
"""The ``mala-hf`` command: each subcommand calls one library function. Results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..model_place import one_line
from ..quiet import quietly
from ..version import __version__
from . import bench, convert, demo, generate, info, lm_eval, ppl, ruler, work


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 0 done, 1 failed (one line on stderr), 2 wrong usage, 130 interrupted."""
    options = build_parser().parse_args(arguments)
    try:
        with quietly(getattr(options, "quiet", False)):
            options.run(options)
    except KeyboardInterrupt:
        print("mala-hf: interrupted", file=sys.stderr)
        return 130
    except (ImportError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        if options.traceback:
            raise
        print(f"mala-hf: error: {message_of(error)}", file=sys.stderr)
        return 1
    return 0


def message_of(error: BaseException) -> str:
    """The message on one line: whole, but of torch's own errors, which go on with where in C++ they were raised, the first line."""
    text = str(error).strip()
    return one_line(error) if not isinstance(error, RuntimeError) or not text else text.splitlines()[0]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; each subcommand's help fits on one screen."""
    parser = argparse.ArgumentParser(prog="mala-hf", description="MassAlloc Attention for Hugging Face Transformers.")
    parser.add_argument("--version", action="version", version=f"mala-hf {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, work, ppl, ruler, generate, convert, bench, lm_eval, info):
        command.add(commands)
    return parser

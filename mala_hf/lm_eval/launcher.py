# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness's own command, with MALA registered and our tasks beside its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..implementations import check_implementation
from ..model_place import check_model
from ..registration import register

CONFIGS = Path(__file__).parent / "configs"
MODEL = re.compile(r"\bpretrained=([^,\s\"']+)")
ATTENTION = re.compile(r"\battn_implementation=([^,\s\"']+)")
COMMANDS = ("run", "ls", "validate")


def launch(arguments: Sequence[str]) -> None:
    """Run lm_eval's command line on the arguments; what it raises is left as it is, ``SystemExit`` too, but for two errors.

    Raises ``ValueError`` for an attention implementation in the model's arguments that is none, which lm_eval would find out after it
    has read tokenizer and config; and where the model was not found, what ``check_model`` says of it.
    """
    from lm_eval.__main__ import cli_evaluate

    register()
    for name in ATTENTION.findall(" ".join(arguments)):
        check_implementation(name)
    before = sys.argv
    sys.argv = ["lm-eval", *with_our_tasks(arguments)]
    try:
        cli_evaluate()
    except (OSError, ValueError) as error:
        for name in MODEL.findall(" ".join(arguments)):
            if isinstance(error, OSError) or name in str(error):
                check_model(name)
        raise
    finally:
        sys.argv = before


def with_our_tasks(arguments: Sequence[str]) -> list[str]:
    """Put ``--include_path`` before the other options, so that one of the user's own still wins; calls that only ask for help stay.

    A configuration file is not overridden: with ``--config`` our tasks are there if the file names their folder, ``CONFIGS``.
    """
    arguments = list(arguments)
    command = [one for one in arguments[:1] if one in COMMANDS]
    options = arguments[len(command) :]
    has_config = any(one == "--config" or one.startswith(("--config=", "-C")) for one in options)
    if not options or options in (["--help"], ["-h"]) or has_config:
        return arguments
    return [*command, "--include_path", str(CONFIGS), *options]

# SPDX-License-Identifier: Apache-2.0
"""The ``mala-hf`` command: each subcommand calls one library function. Results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .version import __version__

DEFAULT_PPL_LENGTHS = [512, 1024, 2048]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 0 done, 1 failed (one line on stderr), 2 wrong usage, 130 interrupted."""
    options = build_parser().parse_args(arguments)
    try:
        options.run(options)
    except KeyboardInterrupt:
        print("mala-hf: interrupted", file=sys.stderr)
        return 130
    except (ImportError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        if options.traceback:
            raise
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        print(f"mala-hf: error: {first_line}", file=sys.stderr)
        return 1
    return 0


def run_demo_command(options: argparse.Namespace) -> None:
    """Run the demo, save its files, and print tables or JSON."""
    require_extra("demo")
    from .demo import DemoSettings, run_demo
    from .report import print_report, save_json, save_picture

    settings = DemoSettings(
        model=options.model,
        text=options.text,
        length=options.length,
        new_tokens=options.new_tokens,
        taus=tuple(options.taus),
        device=options.device,
    )
    result = run_demo(settings, quiet=options.quiet)
    files = [save_json(result, options.output), save_picture(result, options.output)]
    if options.json:
        print(json.dumps(result))
        return
    print_report(result)
    print("\nWritten: " + ", ".join(map(str, files)))


def run_ppl_command(options: argparse.Namespace) -> None:
    """Score a text with each implementation, length and tau; print a row as soon as it is known."""
    require_extra("demo")
    from tqdm.auto import tqdm

    from .checkpoint import OFFLINE_MODEL, load_model
    from .config import MalaConfig
    from .perplexity import compare_implementations
    from .text import read_text

    if min(options.lengths) < 2:
        raise ValueError(f"a window needs at least 2 tokens, got length {min(options.lengths)}")
    if options.windows < 1:
        raise ValueError(f"at least one window must be scored, got {options.windows}")
    for tau in options.taus:
        MalaConfig(tau=tau)
    text, text_name = read_text(options.text)
    model, tokenizer = load_model(options.model, device=options.device)
    input_ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids
    rows = compare_implementations(
        model,
        input_ids,
        options.lengths,
        implementations=options.implementations,
        taus=options.taus,
        max_windows=options.windows,
        progress=lambda windows: tqdm(windows, unit="window", leave=False, disable=options.quiet),
    )
    if options.json:
        print(json.dumps({"model": options.model or OFFLINE_MODEL, "text": text_name, "rows": list(rows)}))
        return
    print(
        f"{options.model or OFFLINE_MODEL} on {text_name}; windows do not overlap and score all tokens but their first"
    )
    print(f"{'length':>8} {'implementation':<15} {'tau':>6} {'tokens':>8} {'nats/token':>11} {'perplexity':>11}")
    for row in rows:
        tau = "" if row["tau"] is None else f"{row['tau']:g}"
        name = row["implementation"]
        print(
            f"{row['length']:>8} {name:<15} {tau:>6} {row['tokens']:>8} {row['nll']:>11.6f} {row['ppl']:>11.4f}",
            flush=True,
        )


def run_info_command(options: argparse.Namespace) -> None:
    """Print versions, device and what would run."""
    from .info import info

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


def require_extra(extra: str) -> None:
    """Raise ``ImportError`` with the command to run when a package of the extra is missing."""
    from importlib.util import find_spec

    missing = [
        package for package in ("accelerate", "gguf", "matplotlib", "rich", "tqdm") if find_spec(package) is None
    ]
    if missing:
        raise ImportError(f"{', '.join(missing)} not installed: pip install 'mala-hf[{extra}]'")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; each subcommand's help fits on one screen."""
    parser = argparse.ArgumentParser(prog="mala-hf", description="MassAlloc Attention for Hugging Face Transformers.")
    parser.add_argument("--version", action="version", version=f"mala-hf {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = add_command(
        commands, "demo", run_demo_command, "full attention and MALA side by side on a real model and text"
    )
    add_model_options(demo)
    demo.add_argument("--length", type=int, metavar="N", help="tokens of text (default: 2048, on a GPU up to 8192)")
    demo.add_argument("--new-tokens", type=int, default=64, metavar="N", help="tokens to continue with (default: 64)")
    demo.add_argument(
        "--taus",
        type=float,
        nargs="+",
        default=[1.0, 10.0],
        metavar="TAU",
        help="tolerances; 0 is full attention (default: 1 10)",
    )
    demo.add_argument(
        "--output",
        type=Path,
        default=Path("demo_results"),
        metavar="DIR",
        help="for JSON and picture (default: demo_results)",
    )

    ppl = add_command(commands, "ppl", run_ppl_command, "perplexity of a text by window length, implementation and tau")
    add_model_options(ppl)
    ppl.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=DEFAULT_PPL_LENGTHS,
        metavar="N",
        help="window lengths (default: 512 1024 2048)",
    )
    ppl.add_argument("--windows", type=int, default=4, metavar="N", help="windows scored per length (default: 4)")
    ppl.add_argument(
        "--implementations", nargs="+", default=["sdpa", "mala"], metavar="NAME", help="default: sdpa mala"
    )
    ppl.add_argument(
        "--taus", type=float, nargs="+", default=[1.0], metavar="TAU", help="tolerances for mala (default: 1)"
    )

    info = add_command(commands, "info", run_info_command, "versions, device, and what a call of MALA would run here")
    info.add_argument(
        "--head-dim", type=int, default=128, metavar="N", help="head_dim to show the tiles of (default: 128)"
    )
    return parser


def add_command(commands: Any, name: str, run: Any, summary: str) -> argparse.ArgumentParser:
    """Add a subcommand with the options that all of them share."""
    parser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--traceback", action="store_true", help="on failure show where, not just one line")
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose model, text and device."""
    parser.add_argument(
        "--model", metavar="NAME", help="Hub name or folder (default: SmolLM2-135M-Instruct from the package index)"
    )
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text, plain or .gz (default: the novel Persuasion)")
    parser.add_argument("--device", help="for example cpu or cuda:0 (default: a GPU if there is one)")

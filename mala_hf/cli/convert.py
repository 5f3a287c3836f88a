# SPDX-License-Identifier: Apache-2.0
"""``mala-hf convert``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .options import add_command, notice


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = add_command(commands, "convert", run, "the same weights with MALA's settings, measured before and after")
    parser.usage = "mala-hf convert CKPT OUT [options]"
    parser.add_argument("checkpoint", metavar="CKPT", help="folder, Hub name, GGUF or smollm2; OUT: new folder")
    parser.add_argument("output", metavar="OUT", help=argparse.SUPPRESS)  # said above: a screen has 25 lines
    parser.add_argument("--tau", type=float, metavar="T", help="of all layers (default: 1)")
    parser.add_argument(
        "--discovery", default="auto", metavar="WAY", help="how to find tiles: auto (default), fused, int8, dense"
    )
    parser.add_argument("--search-tau", action="store_true", help="choose a tau for each layer under a budget:")
    parser.add_argument("--max-ppl-increase", type=float, metavar="X", help="nats per token (no budget named: 0.001)")
    parser.add_argument("--max-omitted-mass", type=float, metavar="X", help="mean of any layer, 0 to 1")
    parser.add_argument("--text", metavar="FILE", help="to measure on (default: the novel Persuasion)")
    parser.add_argument("--length", type=int, metavar="N", help="tokens (default: 1024, on a GPU 8192)")
    parser.add_argument("--ruler", type=int, default=4, metavar="N", help="samples of each task (default: 4)")
    parser.add_argument("--auto-map", action="store_true", help="run MALA wherever remote code is trusted")
    parser.add_argument("--copy", action="store_true", help="copy weights that could be linked")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with CKPT")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda:0, ... (default: a GPU if any)")
    parser.add_argument("--dry-run", action="store_true", help="check, and print the plan")


def run(options: argparse.Namespace) -> None:
    """Convert, or go on where a conversion stopped; print before and after, or the plan."""
    from ..convert_bench import Evidence
    from ..convert_checkpoint import convert

    report = convert(
        options.checkpoint,
        options.output,
        settings_of(options),
        search=budget(options),
        evidence=Evidence(text=options.text, length=options.length, ruler_samples=options.ruler),
        auto_map=options.auto_map,
        link=not options.copy,
        trust_remote_code=options.trust_remote_code,
        device=options.device,
        dry_run=options.dry_run,
        quiet=options.quiet,
        say=notice,
    )
    if options.json:
        print(json.dumps(report))
    elif options.dry_run:
        print("\n".join(plan_lines(report)))
    else:
        print("\n".join(report_lines(report)))
        print(f"\nWritten: {options.output}")


def settings_of(options: argparse.Namespace) -> Any:
    """The settings of a model whose taus are not searched for; None where all are the defaults."""
    from ..config import MalaConfig

    if options.tau is None and options.discovery == "auto":
        return None
    return MalaConfig(tau=1.0 if options.tau is None else options.tau, discovery=options.discovery)


def budget(options: argparse.Namespace) -> Any:
    """Return the search that was asked for, or None; ``ValueError`` for options that contradict one another."""
    from ..convert_search import TauSearch

    limits = {"max_ppl_increase": options.max_ppl_increase, "max_omitted_mass": options.max_omitted_mass}
    named = [f"--{name.replace('_', '-')}" for name, value in limits.items() if value is not None]
    if not options.search_tau:
        if named:
            raise ValueError(f"{named[0]} is a budget of --search-tau")
        return None
    if options.tau is not None:
        raise ValueError("--search-tau chooses the taus: leave out --tau")
    if options.discovery != "auto":
        raise ValueError("--search-tau chooses the settings: leave out --discovery")
    return TauSearch(**limits) if named else TauSearch()


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """Say what would be done."""
    evidence, weights = plan["evidence"], plan["weights"]
    settings = json.dumps(plan["settings"])
    if plan["search"]:
        limits = {key: plan["search"][key] for key in ("max_ppl_increase", "max_omitted_mass")}
        within = ", ".join(f"{key} {limit:g}" for key, limit in limits.items() if limit is not None)
        settings = f"a tau for each layer, within {within}"
    if plan["bytes"]:
        size, copied = (f"{count / 1e9:.3g} GB" for count in (plan["bytes"], plan["bytes_to_copy"]))
        origin = f"{', '.join(weights[:3])}{', ...' if len(weights) > 3 else ''}: {size}, {copied} to be copied"
    else:
        origin = "to be downloaded"
    ruler = f"{evidence['ruler_samples']} samples of {len(evidence['ruler_tasks'])} RULER tasks"
    lines = [
        f"model     {plan['model']}",
        f"weights   {origin}",
        f"settings  {settings}",
        f"measured  {evidence['windows']} windows of {evidence['length']} tokens of {evidence['text']}, {ruler}",
        f"along     {', '.join(plan['others']) or 'nothing'}",
        f"left out  {', '.join(plan['left_out']) or 'nothing'}",
    ]
    if plan["auto_map"]:
        lines.append(f"auto_map  {', '.join(plan['auto_map'])}")
    if plan["finished_measurements"]:
        lines.append(f"finished  {plan['finished_measurements']} measurements of an earlier run")
    return [*lines, "Nothing was written."]


def report_lines(report: dict[str, Any]) -> list[str]:
    """Format before and after, and what a search bought."""
    from ..convert_report import before_and_after, search_words

    lines = [f"{report['model']}, {report['length']:,} tokens", f"{'':<34}{'full attention':>16}  MALA"]
    lines += [f"{name:<34}{before:>16}  {after}" for name, before, after in before_and_after(report)]
    return [*lines, *(["", search_words(report)] if report["search"] else [])]

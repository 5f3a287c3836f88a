# SPDX-License-Identifier: Apache-2.0
"""What a log of compute-sanitizer says of each family of kernels.

A report begins with ``========= `` and a word; its other lines are indented. racecheck names kernels in its first line and after "and":

    ========= Error: Race reported between Write access at NAME+0x1230 in file.py:71
    =========     and Read access at NAME+0x1450 in file.py:80 [128 hazards]

the other tools below theirs, ``=========     at NAME+0x1f0 in file.py:71``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

EXIT_CODE = 86  # what the sanitizer is told to end with where it found something
FAMILIES = {
    "forward": ("mala_forward_kernel",),
    "Hopper forward": ("mala_forward_hopper_kernel",),
    "discovery": (
        "quantize_keys_kernel", "bound_rows_kernel", "discover_kernel", "sample_scores_kernel", "count_retained_kernel",
    ),
    "Hopper discovery": ("discover_hopper_kernel",),
    "backward": ("backward_delta_kernel", "backward_support_kernel", "backward_query_kernel", "backward_key_kernel"),
    "decode": ("score_tiles_kernel", "attend_retained_kernel", "attend_split_kernel", "combine_kernel"),
    "INT8 plane": ("write_plane_kernel", "score_plane_kernel"),
}  # fmt: skip
OTHER = "everything else"
# in Gluon: warpgroups that meet at mbarriers and fill shared memory with the tensor-memory accelerator
HOPPERS = ("Hopper forward", "Hopper discovery")
JUDGES_HOPPERS_SINCE = (
    2026,
    3,
)  # what racecheck of older versions knows of such kernels' order is less: docs/reliability.md
MESSAGES, LINES, LONGEST = 10, 3, 400  # kept of a family, and of a message
SUMMARY = re.compile(
    r"^=+ (?:ERROR SUMMARY: (\d+) errors?\b(?! were not)|RACECHECK SUMMARY: (\d+) hazard.*?\((\d+) error.*?(\d+) warn)",
    re.M,
)
NOT_WATCHED = (
    "not supported",
    "Unable to find",
    "failed to initialize",
    "InitializationError",
    "No attachable process",
    "Internal Sanitizer Error",
)
NO_REPORT = re.compile(r"COMPUTE-SANITIZER|\w+ SUMMARY|Target application returned")
KERNEL = re.compile(r"\w+_kernel\b(?!\.)")  # and not its file
PATH = re.compile(r"(?:/[^\s/:()\[\]]+)+/")
HOW_OFTEN = re.compile(r" \[\d+ hazards?\]")


def reports(log: str) -> list[list[str]]:
    """Each report's lines that name what was found and where; without threads, addresses, host frames and folders."""
    found: list[list[str]] = []
    for line in log.splitlines():
        if not line.startswith("========="):
            continue
        text = line.lstrip("=")
        inner = text.strip()
        if not inner or NO_REPORT.match(inner):
            continue
        if not text.startswith("  ") and not inner.startswith("and "):
            found.append([PATH.sub("", inner)])
        elif found and (inner.startswith(("and ", "at ", "Current Value")) or "+0x" in inner):  # an instruction's place
            found[-1].append(PATH.sub("", inner))
    return found


def launches(log: str) -> Counter:
    """Of each kernel, as the driver printed them."""
    lines = [line for line in log.splitlines() if line.startswith("{") and '"kernels"' in line]
    return Counter(json.loads(lines[-1])["kernels"]) if lines else Counter()


def verdicts(tool: str, code: int, log: str, version: tuple[int, ...] = JUDGES_HOPPERS_SINCE) -> list[dict[str, Any]]:
    """A row for each family that was launched, and one for what no family of ours accounts for, if anything.

    ``ok``: True where the tool watched and found nothing; False where it found something, or where a log without a summary, or a driver
    that failed by itself, is no verdict; None for Hopper's kernels by a racecheck too old to know their order, whatever it says.
    ``errors``: how many reports; None where nothing was watched. ``messages``: first lines of distinct ones, and how often.
    """
    counts = [
        max(int(one or 0), int(shown or 0), int(e or 0) + int(w or 0)) for one, shown, e, w in SUMMARY.findall(log)
    ]
    ended = code == 0 or (code == EXIT_CODE and any(counts))  # that code without a report is another's
    watched = bool(counts) and ended and not any(text in log for text in NOT_WATCHED)
    family_of = {kernel: family for family, kernels in FAMILIES.items() for kernel in kernels}
    found: dict[str, list[list[str]]] = {}
    for lines in reports(log):
        names = [name for line in lines for name in KERNEL.findall(line) if name in family_of]
        found.setdefault(family_of[names[0]] if names else OTHER, []).append(lines)
    run = launches(log)
    rows = []
    for family, kernels in FAMILIES.items():
        number = sum(run[kernel] for kernel in kernels)
        if number or family in found:
            rows.append(_row(family, number, found.get(family, []), watched))
            judged = tool != "racecheck" or family not in HOPPERS or version >= JUDGES_HOPPERS_SINCE
            if watched and not judged:
                rows[-1]["ok"] = None
    hidden = max(0, sum(counts) - sum(map(len, found.values())))  # beyond the limit of what is printed
    if found.get(OTHER) or hidden or not rows:
        rows.append(_row(OTHER, 0, found.get(OTHER, []), watched, hidden) | {"ok": False})
    return rows


def _row(family: str, number: int, found: list[list[str]], watched: bool, hidden: int = 0) -> dict[str, Any]:
    errors = len(found) + hidden
    distinct = Counter(HOW_OFTEN.sub("", "; ".join(lines[:LINES]))[:LONGEST] for lines in found)
    kernels = sorted({name for lines in found for line in lines for name in KERNEL.findall(line)})
    return {
        "family": family,
        "launches": number,
        "ok": watched and not errors,
        "errors": errors if watched or errors else None,
        "kernels": kernels,
        "messages": [f"{count} x {text}" for text, count in distinct.most_common(MESSAGES)],
    }

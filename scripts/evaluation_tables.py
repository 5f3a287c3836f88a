# SPDX-License-Identifier: Apache-2.0
"""Tables of what MALA does to a real checkpoint: perplexity, RULER, and both in short."""

from __future__ import annotations

import math
from typing import Any

from stored_results import results, table

PERPLEXITY, BFLOAT16, RULER = (
    "perplexity_smollm2_h200",
    "perplexity_bfloat16_smollm2_h200",
    "ruler_smollm2_h200",
)
Row = dict[str, Any]


def attention(row: Row) -> str:
    """``sdpa``, or ``tau 1``."""
    return row["implementation"] if row["tau"] is None else f"tau {row['tau']:g}"


def interval(difference: Row, digits: int, scale: float = 1.0) -> str:
    """A difference with its 95 % interval, times ``scale``."""
    mean, low, high = (f"{scale * difference[name]:+.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def perplexity_change(row: Row) -> float:
    """Perplexity minus the baseline's, from the difference in nats."""
    return row["ppl"] * -math.expm1(-row["difference"]["mean"])


def comparison(row: Row) -> list[str]:
    """What a row of perplexity says about its baseline: nothing for itself."""
    if "difference" not in row:
        return [""] * 4
    return [
        interval(row["difference"], 4, 1000),
        f"{perplexity_change(row):+.5f}",
        f"{row['kl_mean']:.1e}",
        f"{100 * row['top1_agreement']:.3f} %",
    ]


def work(row: Row) -> str:
    """Share of the post-score work; full attention does all of it."""
    return f"{100 * (1.0 if row['work_fraction'] is None else row['work_fraction']):.1f} %"


def perplexity() -> str:
    """Each length and attention: perplexity, and differences from full attention in thousandths of a nat."""
    header = [
        "tokens",
        "windows",
        "attention",
        "work",
        "perplexity",
        "difference, 0.001 nats per token [95 %]",
        "difference of perplexity",
        "KL, nats",
        "same top-1",
    ]
    return table(header, [perplexity_cells(row) for row in results(PERPLEXITY)["rows"]])


def perplexity_cells(row: Row) -> list[str]:
    """The cells of one length and attention."""
    length, windows = f"{row['length']:,}", str(row["windows"])
    return [length, windows, attention(row), work(row), f"{row['ppl']:.4f}", *comparison(row)]


def perplexity_claim() -> str:
    """The largest difference at tau = 1, in nats and in perplexity, and the farthest end of an interval."""
    rows = [row for row in results(PERPLEXITY)["rows"] if row["tau"] == 1.0]
    nats = max(abs(row["difference"]["mean"]) for row in rows)
    change = max(abs(perplexity_change(row)) for row in rows)
    ends = [(row, row["difference"][name]) for row in rows for name in ("low", "high")]
    farthest = max(abs(end) for _, end in ends)
    farthest_change = max(abs((row["ppl"] - perplexity_change(row)) * math.expm1(end)) for row, end in ends)
    return (
        f"At tau = 1 the largest difference of any length is {nats:.6f} nats per token, and {change:.5f} in perplexity; the farthest\n"
        f"end of an interval is {farthest:.6f} nats, and {farthest_change:.5f} in perplexity.\n"
    )


def perplexity_bfloat16() -> str:
    """What the choice of a full-attention kernel does in bfloat16, and MALA beside it: differences to SDPA in nats per token."""
    columns = (("eager", None), ("mala", 0.0), ("mala", 1.0), ("mala", 10.0), ("mala", 100.0))
    rows = results(BFLOAT16)["rows"]
    lines = []
    for length in sorted({row["length"] for row in rows}):
        found = {(row["implementation"], row["tau"]): row for row in rows if row["length"] == length}
        full = found["sdpa", None]
        lines.append(
            [f"{length:,}", f"{full['ppl']:.4f}"] + [f"{found[key]['nll'] - full['nll']:+.6f}" for key in columns]
        )
    return table(["tokens", "perplexity, SDPA", "eager", "tau 0", "tau 1", "tau 10", "tau 100"], lines)


def ruler() -> str:
    """Each length and attention: RULER's score, and its difference from full attention in points."""
    found = results(RULER)
    lines = []
    for length in [*sorted({row["length"] for row in found["tasks"]}), None]:
        for row in found["lengths"]:
            if row["length"] != length:
                continue
            scored = [one for one in found["tasks"] if same_attention(one, row) and length in (None, one["length"])]
            lines.append(
                [
                    "all" if length is None else f"{length:,}",
                    str(len({one["task"] for one in scored})),
                    str(sum(one["samples"] for one in scored)),
                    attention(row),
                    f"{row['score']:.2f}",
                    interval(row["difference"], 2) if "difference" in row else "",
                    f"{100 * row['same_answers']:.1f} %" if "same_answers" in row else "",
                ]
            )
    header = ["tokens", "tasks", "samples", "attention", "score", "difference [95 %]", "same answers"]
    return table(header, lines) + missing_tasks(found)


def missing_tasks(found: Row) -> str:
    """Say which tasks a length lacks, if any does."""
    have: dict[int, set[str]] = {}
    for row in found["tasks"]:
        have.setdefault(row["length"], set()).add(row["task"])
    every = list(dict.fromkeys(row["task"] for row in found["tasks"]))
    lacking = {length: [task for task in every if task not in some] for length, some in have.items()}
    sentences = [
        f"\nAt {length:,} tokens {', '.join(tasks)} are left out: this run drew their samples with the settings that RULER has for "
        "shorter contexts.\n"
        for length, tasks in lacking.items()
        if tasks
    ]
    return "".join(sentences)


def same_attention(one: Row, other: Row) -> bool:
    """Whether two rows are of the same attention."""
    return (one["implementation"], one["tau"]) == (other["implementation"], other["tau"])


def ruler_tasks() -> str:
    """Each task: its score with full attention and with MALA at tau = 1, by length."""
    rows = results(RULER)["tasks"]
    lengths = sorted({row["length"] for row in rows})
    scores = {(row["task"], row["length"], row["tau"]): f"{row['score']:.1f}" for row in rows}
    lines = [
        [task] + [scores.get((task, length, tau), "") for length in lengths for tau in (None, 1.0)]
        for task in dict.fromkeys(row["task"] for row in rows)
    ]
    return table(["task"] + [name for length in lengths for name in (f"{length:,}: sdpa", "tau 1")], lines)


def real_model() -> str:
    """A row for each attention: work and perplexity at the longest length, RULER over all lengths."""
    rows = results(PERPLEXITY)["rows"]
    longest = max(row["length"] for row in rows)
    found = results(RULER)
    lines = []
    for row in rows:
        if row["length"] != longest:
            continue
        scored = next(one for one in found["lengths"] if same_attention(one, row) and one["length"] is None)
        change, _, divergence, top1 = comparison(row)
        points = interval(scored["difference"], 1) if "difference" in scored else ""
        lines.append(
            [attention(row), work(row), f"{row['ppl']:.4f}", change, divergence, top1, f"{scored['score']:.1f}", points]
        )
    header = [
        f"{longest:,} tokens",
        "work",
        "perplexity",
        "difference, 0.001 nats [95 %]",
        "KL, nats",
        "same top-1",
        "RULER",
        "difference, points [95 %]",
    ]
    return table(header, lines)


def evaluation_commands() -> str:
    """What was run, and on what."""
    found = [results(PERPLEXITY), results(RULER)]
    versions = found[0]["versions"]
    lines = "".join(f"    {one['command']}\n" for one in found)
    return (
        f"{lines}\nMODEL is {found[0]['model']} ({found[0]['weights']}); {found[0]['device']}, torch {versions['torch']}, "
        f"triton {versions['triton']},\ntransformers {versions['transformers']}.\n"
    )


def kernels_benchmark() -> str:
    """What ``kernels benchmark`` found, in two sentences."""
    found = results("kernels_benchmark_h200")
    verified = sum(row["verified"] for row in found["rows"])
    times: dict[str, list[str]] = {}
    for row in sorted(found["rows"], key=lambda row: int(row["workload"].split("_")[1])):
        name, length = row["workload"].split("_")
        times.setdefault(name, []).append(f"{row['mean_ms']:.2f} ms ± {row['std_ms']:.2f} at {int(length):,} tokens")
    means = ";\n".join(f"{name} {', '.join(some)}" for name, some in sorted(times.items(), reverse=True))
    calls = found["rows"][0]["iterations"]
    return (
        f"On one {found['gpu']} (torch {found['torch']}) `{found['command']}` verified {verified} of {len(found['rows'])} workloads\n"
        f"against torch's full attention. Mean times of {calls} calls, with their deviation, are for\n{means};\n"
        "calls are eager, so the short ones are mostly time of the host.\n"
    )

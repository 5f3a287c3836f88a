# SPDX-License-Identifier: Apache-2.0
"""Draw the tables of README.md and docs/ from the stored results, between markers <!-- table: NAME --> and <!-- end -->.

python scripts/render_results.py            # rewrite the pages
python scripts/render_results.py --check    # exit code 1 if a page differs from its results
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/performance.md")
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def results(name: str) -> dict[str, Any]:
    """The stored results of that name."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text("utf-8"))


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def forward() -> str:
    """Forward times: MALA at tau = 1, its own full attention (tau = 0), and torch's."""
    names = ("mala", "mala_tau0", "sdpa_cudnn", "sdpa_flash")
    header = [
        "tokens",
        "retained slots per query",
        "work",
        "MALA, ms",
        "MALA at tau 0",
        "cuDNN",
        "FlashAttention-2",
        "speedup over cuDNN",
    ]
    rows = [
        [
            f"{row['seqlen']:,}",
            f"{row['key_slots_per_query']:,.0f}",
            f"{100 * row['work_fraction']:.1f} %",
            *(f"{row[name]['median_ms']:.3f}" for name in names),
            f"{row['speedup_over_cudnn']:.2f}x",
        ]
        for row in results("forward_h200")["rows"]
    ]
    return table(header, rows)


def perplexity() -> str:
    """Perplexity of full attention and MALA: difference in nats per token."""
    rows = results("perplexity_smollm2_h200")["rows"]
    lines = []
    for dtype in ("float32", "bfloat16"):
        for length in (2048, 4096, 8192):
            found = {(r["implementation"], r["tau"]): r for r in rows if (r["dtype"], r["length"]) == (dtype, length)}
            full = found["sdpa", None]
            difference = {key: f"{r['nll'] - full['nll']:+.6f}" for key, r in found.items()}
            lines.append(
                [f"{dtype}, {length:,} tokens", f"{full['ppl']:.4f}", f"{found['mala', 1.0]['ppl']:.4f}"]
                + [
                    difference.get(key, "")
                    for key in (("eager", None), ("mala", 0.0), ("mala", 1.0), ("mala", 10.0), ("mala", 100.0))
                ]
            )
    header = ["", "ppl, SDPA", "ppl, tau 1", "eager", "tau 0", "tau 1", "tau 10", "tau 100"]
    return table(header, lines)


def blockwise() -> str:
    """Time of the CPU form and of Transformers' eager attention."""
    found = results("blockwise_cpu")
    cells = [f"{found['eager_ms']:.0f}", f"{found['blockwise_ms']:.0f}", f"{found['blockwise_over_eager']:.2f}"]
    return table(["tokens", "eager, ms", "blockwise, ms", "blockwise / eager"], [[f"{found['seqlen']:,}", *cells]])


TABLES = {"forward": forward, "perplexity": perplexity, "blockwise": blockwise}


def rendered(text: str) -> str:
    """``text`` with every marked table drawn anew."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def main() -> None:
    """Rewrite or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not up to date")
    options = parser.parse_args()
    for page in PAGES:
        path = ROOT / page
        text = path.read_text("utf-8")
        if rendered(text) == text:
            continue
        if options.check:
            raise SystemExit(f"{page} does not show its results: run scripts/render_results.py")
        path.write_text(rendered(text), "utf-8")


if __name__ == "__main__":
    main()

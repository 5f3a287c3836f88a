# SPDX-License-Identifier: Apache-2.0
"""The README's Python runs as written, on a tiny checkpoint in place of the Hub's, and what it points at exists."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_model import save_tiny_checkpoint
from transformers.utils import is_kernels_available

from mala_hf.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.transformers
def test_the_python_of_the_readme_runs_in_its_order(tmp_path, capsys):
    checkpoint = save_tiny_checkpoint(tmp_path, positions=4096)
    names = {}
    for block in BLOCKS:
        exec(block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(checkpoint)), names)
    assert len(BLOCKS) == 3
    assert "work by head" in capsys.readouterr().out
    assert names["work"].work_fraction.shape == (1, 8)
    assert names["model"].config._attn_implementation == "mala"


@pytest.mark.transformers
@pytest.mark.parametrize("page", ["docs/kernel_hub.md", "kernels_hub/mala/CARD.md"])
def test_the_python_of_the_kernel_hub_pages_runs(page, hub_kernel, tmp_path, monkeypatch):
    if not is_kernels_available():
        pytest.skip("this Transformers wants another release of kernels")
    monkeypatch.setenv("LOCAL_KERNELS", f"mala-hf/mala-flash-attn={hub_kernel}")
    checkpoint, names = save_tiny_checkpoint(tmp_path), {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(checkpoint)), names)
    assert names["model"](torch.arange(9)[None]).logits.isfinite().all()


def test_the_first_example_has_at_most_ten_lines_that_do_something():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize(
    "page",
    ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))],
)
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text("utf-8"))
    assert links
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_the_commands_of_the_readme_are_the_commands_there_are():
    listed = [
        line.split()[0] for line in build_parser().format_help().split("COMMAND\n")[1].splitlines() if line.strip()
    ]
    assert re.findall(r"^    mala-hf ([\w-]+)  ", README, re.MULTILINE) == listed


def test_every_table_of_results_is_drawn_from_its_file():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "render_results.py", "--check"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert "<!-- table: forward -->\n| tokens |" in README


def test_the_numbers_of_the_readme_are_those_of_the_stored_run():
    runs = json.loads((ROOT / "docs" / "demo" / "demo.json").read_text("utf-8"))["runs"]
    rows = {cells[1].strip(): cells[2:5] for line in README.splitlines() if len(cells := line.split("|")) == 6}

    def numbers(row):
        return [float(cell.split()[0]) for cell in rows[row]]

    def of_runs(key, of_full):
        return [of_full, *(100 * run["summary"][key] for run in runs[1:])]

    assert numbers("perplexity") == pytest.approx([run["ppl"] for run in runs], abs=5e-5)
    assert numbers("post-score work") == pytest.approx(of_runs("work_fraction", 100), abs=0.05)
    assert numbers("work of the lowest head") == pytest.approx(of_runs("work_fraction_min_head", 100), abs=0.05)
    assert numbers("omitted mass, mean") == pytest.approx(of_runs("omitted_mass_mean", 0), abs=5e-5)
    assert numbers("same greedy tokens") == [64, *(run["same_continuation_tokens"] for run in runs[1:])]
    assert numbers("prefill time") == pytest.approx([run["prefill_seconds"] for run in runs], abs=0.05)

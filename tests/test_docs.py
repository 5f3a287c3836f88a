# SPDX-License-Identifier: Apache-2.0
"""What the pages and docstrings show runs as written, on a tiny checkpoint in place of the Hub's, and what they point at exists."""

import doctest
import json
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from processes import launch
from project import KERNELS, ROOT
from tiny_model import byte_tokenizer, runs_of_tokens, save_tiny_checkpoint, tiny_llama
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import is_kernels_available

import mala_hf
from mala_hf.cli import build_parser

sys.path.append(str(ROOT / "scripts"))

from rule_figure import FIGURE, HEADS, judged_head, rule_svg

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
README = (ROOT / "README.md").read_text("utf-8")
RUN_HERE = {"README.md", "docs/use.md", "docs/serving.md", "docs/kernel_hub.md", "docs/scaling.md"}
RUN_ELSEWHERE = {  # by tests that know more of their subject
    "docs/convert.md": "test_convert.py",
    "docs/models.md": "test_families.py",
    "docs/training.md": "test_training_page.py",
}
EXAMPLES = sorted(
    [
        "mala_hf." + ".".join(path.relative_to(ROOT / "mala_hf").with_suffix("").parts)
        for path in (ROOT / "mala_hf").rglob("*.py")
        if "ops" not in path.parts and ">>> " in path.read_text("utf-8")
    ]
    + [f"mala_hf.ops.{path.stem}" for path in KERNELS.glob("*.py") if ">>> " in path.read_text("utf-8")]
)


def blocks(page: str) -> list[str]:
    """The Python of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """The words of the commands in a page's indented blocks; lines that end in a backslash go on."""
    text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
    lines = re.findall(r"^ {4,}((?:mala-hf|python|torchrun|accelerate) .*)$", text, re.MULTILINE)
    listed = re.compile(r"mala-hf [\w-]+  +\w")  # a command and what it does
    return [shlex.split(line, comments=True) for line in lines if not listed.match(line)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), positions=4096)


def run_in_order(page: str, checkpoint: Path, **names) -> dict:
    """Execute the Python of a page, and return what it named."""
    found = blocks(page)
    assert found
    for block in found:
        exec(block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(checkpoint)), names)
    return names


@pytest.mark.transformers
@pytest.mark.parametrize("page", ["README.md", "docs/use.md"])
def test_the_python_of_the_first_pages_runs_in_its_order(page, checkpoint, capsys):
    names = run_in_order(page, checkpoint)
    assert "work by head" in capsys.readouterr().out
    assert names["model"].config._attn_implementation == "mala"
    if page == "docs/use.md":
        assert names["work"].work_fraction.shape == (1, 8)


@pytest.mark.transformers
def test_the_python_of_the_serving_page_runs_in_its_order(checkpoint):
    names = {
        "name": checkpoint,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "model": AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="mala"),
        "inputs": {"input_ids": runs_of_tokens(70), "max_new_tokens": 2},
        "prompts": [runs_of_tokens(20)[0].tolist()],
        "generation_config": GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1),
    }
    names = run_in_order("docs/serving.md", checkpoint, **names)
    assert names["cache"].memory().plane > 0
    assert [len(output.generated_tokens) for output in names["outputs"].values()] == [2]


@pytest.mark.transformers
@pytest.mark.parametrize("page", ["docs/kernel_hub.md", "kernels_hub/mala/CARD.md"])
def test_the_python_of_the_kernel_hub_pages_runs(page, hub_kernel, checkpoint, monkeypatch):
    if not is_kernels_available():
        pytest.skip("this Transformers wants another release of kernels")
    monkeypatch.setenv("LOCAL_KERNELS", f"mala-hf/mala-flash-attn={hub_kernel}")
    names = run_in_order(page, checkpoint)
    assert names["model"](torch.arange(9)[None]).logits.isfinite().all()


def test_the_tensor_parallel_program_of_the_page_runs_in_two_processes(checkpoint, tmp_path):
    program = blocks("docs/scaling.md")[0].replace("meta-llama/Llama-3.3-70B-Instruct", str(checkpoint))
    given = "import torch\nids = torch.arange(64)[None]\ntorch.distributed.init_process_group('gloo')\n"
    script = tmp_path / "program.py"
    script.write_text(given + program.replace("torch.bfloat16", "torch.float32"), "utf-8")
    assert launch(script).count("work by head") == 2


def test_the_ulysses_example_of_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(blocks("docs/scaling.md")[1], names)
    assert names["arguments"].parallelism_config is names["parallelism"]


def test_every_page_with_python_is_run_by_a_test():
    assert {page for page in PAGES if blocks(page)} == RUN_HERE | RUN_ELSEWHERE.keys()
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text("utf-8")


@pytest.mark.transformers
@pytest.mark.parametrize("module", EXAMPLES)
def test_the_examples_of_docstrings_give_what_they_say(module):
    names = {name: getattr(mala_hf, name) for name in mala_hf.__all__}
    inputs = {"input_ids": runs_of_tokens(70), "attention_mask": torch.ones(1, 70, dtype=torch.long)}
    given = {**names, "model": tiny_llama(), "inputs": inputs, "tokenizer": byte_tokenizer()}
    found = doctest.testmod(import_module(module), extraglobs=given, optionflags=doctest.ELLIPSIS)
    assert found.attempted >= 2
    assert found.failed == 0


def test_docstrings_of_the_first_functions_have_examples():
    assert {"mala_hf.cache", "mala_hf.patch", "mala_hf.recording", "mala_hf.ops.interface"} <= set(EXAMPLES)


def test_the_first_example_has_at_most_ten_lines_that_do_something():
    assert len([line for line in blocks("README.md")[0].splitlines() if line.strip()]) <= 10


def test_the_rule_is_on_the_first_screen_of_the_readme():
    lines = README.splitlines()
    assert (
        lines.index(
            "            the ordinary online-softmax step                                    # else: no softmax, no V, no P @ V"
        )
        < 40
    )
    assert len(lines) <= 120


def heading_anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_exist(page):
    place = ROOT / page
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", place.read_text("utf-8")) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = place.parent / path if path else place
        assert target.exists(), link
        assert not anchor or anchor in heading_anchors(target), link


def test_the_index_and_the_readme_list_every_page():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    for index, prefix in (("docs/README.md", ""), ("README.md", "docs/")):
        text = (ROOT / index).read_text("utf-8")
        assert [page for page in sorted(pages) if f"({prefix}{page})" not in text] == []


def test_the_listed_commands_are_the_commands_there_are():
    listed = [
        line.split()[0] for line in build_parser().format_help().split("COMMAND\n")[1].splitlines() if line.strip()
    ]
    page = (ROOT / "docs" / "use.md").read_text("utf-8")
    assert re.findall(r"^    mala-hf ([\w-]+)  ", page, re.MULTILINE) == listed


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_are_ones_that_can_be_given(page):
    scripts = {path.name: path.read_text("utf-8") for path in (ROOT / "scripts").glob("*.py")}
    for words in commands(page):
        if words[0] == "mala-hf" or "mala_hf" in words:
            given = words[words.index("mala_hf" if "mala_hf" in words else "mala-hf") + 1 :]
            if given[0] != "lm-eval":  # whose options are lm_eval's
                build_parser().parse_args(given)
            continue
        script = next((word for word in words if word.endswith(".py")), None)
        if script is None or not script.startswith("scripts/"):
            continue  # the reader's own
        assert Path(script).name in scripts, words
        options = [word for word in words[words.index(script) :] if word.startswith("--")]
        assert [option for option in options if not any(f'"{option}"' in text for text in scripts.values())] == [], (
            words
        )


def test_the_figure_of_the_rule_is_drawn_from_the_stored_activations():
    assert rule_svg({head: judged_head(head) for head in HEADS}) == FIGURE.read_text("utf-8")


def test_the_bug_report_asks_for_what_info_prints():
    for page in ("CONTRIBUTING.md", ".github/ISSUE_TEMPLATE/bug_report.yml", "docs/install.md"):
        assert "mala-hf info" in (ROOT / page).read_text("utf-8")


def test_every_table_of_results_is_drawn_from_its_file():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "render_results.py", "--check"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert "<!-- table: forward -->\n| tokens |" in README


def test_the_numbers_of_the_first_run_are_those_of_the_stored_one():
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    runs = json.loads((ROOT / "docs" / "demo" / "demo.json").read_text("utf-8"))["runs"]
    rows = {cells[1].strip(): cells[2:5] for line in page.splitlines() if len(cells := line.split("|")) == 6}

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

# SPDX-License-Identifier: Apache-2.0
"""The Python of docs/training.md runs as written, its links lead somewhere, and its figure shows the numbers it is given."""

import json
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from project import ROOT
from tiny_model import save_tiny_checkpoint

sys.path.append(str(ROOT / "scripts"))

from render_results import training_names, training_rows
from training_figure import BOTTOM_PANEL, LEFT, RIGHT, WIDTH, ticks, training_svg

PAGE = (ROOT / "docs" / "training.md").read_text("utf-8")
SMALLER = {"HuggingFaceTB/SmolLM2-135M-Instruct": "tiny", "2048": "256", "max_steps=300": "max_steps=2"}


@pytest.mark.transformers
def test_the_python_of_the_page_runs_in_its_order(tmp_path):
    save_tiny_checkpoint(tmp_path / "tiny")
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    for written, smaller in SMALLER.items():
        assert written in program
        program = program.replace(written, smaller)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "work by head" in done.stdout
    assert "'train_loss'" in done.stdout


def test_links_to_files_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)(?:#\w+)?\)", PAGE) if not link.startswith("https://")]
    assert len(links) >= 5
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_every_stored_comparison_is_on_the_page():
    assert training_names()
    for name in training_names():
        assert f"](training/{name}.svg)" in PAGE
        assert len(json.loads((ROOT / "results" / f"{name}.json").read_text("utf-8"))["runs"]) >= 2


def lines_of(svg: str) -> list[list[tuple[float, float]]]:
    """The points of every curve, in drawing order."""
    root = ElementTree.fromstring(svg)
    curves = root.iter("{http://www.w3.org/2000/svg}polyline")
    return [[tuple(map(float, point.split(","))) for point in curve.get("points").split()] for curve in curves]


def curves(*losses):
    return {
        "runs": [{"attention": name, "loss": loss} for name, loss in zip(("sdpa", "<a>", "b"), losses, strict=False)]
    }


def test_the_figure_has_every_curve_on_one_scale_and_its_difference_below():
    svg = training_svg(curves([3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.5, 1.0]))
    first, same, same_below, other, other_below = sorted_by_run(lines_of(svg))
    assert first == same
    assert [x for x, _ in first] == [LEFT, pytest.approx((LEFT + WIDTH - RIGHT) / 2), WIDTH - RIGHT]
    assert first[0][1] < first[1][1] < first[2][1]  # losses fall, pixels count from the top
    assert other[1][1] == pytest.approx((first[0][1] + first[1][1]) / 2, abs=0.1)
    zero = same_below[0][1]
    assert {y for _, y in same_below} == {zero}
    assert [y < zero for _, y in other_below] == [False, True, False]
    assert BOTTOM_PANEL[0] < other_below[1][1] < zero < BOTTOM_PANEL[1]
    assert "&lt;a&gt;" in svg


def sorted_by_run(drawn):
    """The panels are drawn one after the other: three losses, then two differences."""
    first, same, other, same_below, other_below = drawn
    return first, same, same_below, other, other_below


@pytest.mark.parametrize("losses", [([2.0], [2.0]), ([2.0, 2.0], [2.0, 2.0])], ids=["one step", "one value"])
def test_a_figure_without_extent_is_drawn(losses):
    assert len(lines_of(training_svg(curves(*losses)))) == 3


def test_ticks_are_round_and_inside():
    assert ticks(0.13, 0.97, 3) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert ticks(1, 300, 4) == [50, 100, 150, 200, 250, 300]


def test_the_table_states_differences_to_the_first_run():
    held_out = {f"held_out_{when}": {"sdpa": 3.0, "mala": 3.5} for when in ("before", "after")}
    work = {f"work_{when}": {"work_fraction": 0.25} for when in ("before", "after")}
    rest = {**held_out, **work, "steps_per_second": 2.0, "peak_bytes": 2**30}
    run, first = ({"attention": "x", "loss": loss, **rest} for loss in ([3.0, 1.0], [3.0, 1.5]))
    assert training_rows([first, run])[1] == [
        *("x", "1.0000", "0.250000", "0.500000", "3.0000", "3.0000", "3.5000", "25.0 %", "25.0 %", "2.00", "1.00")
    ]

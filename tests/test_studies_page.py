# SPDX-License-Identifier: Apache-2.0
"""The stored studies are whole and hold what the page says of them; tables and figures are drawn from them, windows averaged."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

import study_tables
from curves_figure import Axis, curves_svg
from stored_results import ROOT
from study_figures import study_figures
from study_results import averaged, percent, runs, title

PAGE = (ROOT / "docs" / "studies.md").read_text("utf-8")
STUDIES = ("allocation", "fidelity", "open_questions")


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_is_stored_with_what_it_was_measured_on(study):
    assert runs(study)
    for found in runs(study).values():
        assert {"device", "commit", "versions", "model", "text", "rows"} <= set(found)
        assert found["rows"]


def test_allocations_have_the_same_work_and_rank_as_the_page_says():
    for found in runs("allocation").values():
        for row in averaged(found["rows"], ("length", "tau")):
            some = [one for one in found["rows"] if (one["length"], one["tau"]) == (row["length"], row["tau"])]
            by_name = {one["allocation"]: one for one in averaged(some, ("allocation",))}
            assert len({round(one["key_slots_per_query"], 6) for one in by_name.values()}) == 1
            masses = {name: one["omitted_mass_mean"] for name, one in by_name.items()}
            assert masses["oracle"] == min(masses.values())
            if row["tau"] == 1:
                assert masses["oracle"] < masses["mala"] < masses["layer_head_position"] < masses["position"]


def test_fidelity_is_within_its_certificate_and_backward_within_forward():
    for found in runs("fidelity").values():
        for row in found["rows"]:
            assert row["omitted_mass_mean"] <= row["omitted_mass_bound_mean"] + 1e-6
            assert row["backward_slots_per_query"] <= row["key_slots_per_query"] <= row["visible_slots_per_query"]
            assert row["flops_fraction_saved"] <= row["flops_fraction"] <= 1
            if row["tau"] == 0:
                assert (row["omitted_mass_mean"], row["work_fraction"]) == (0, 1)


def variants_of(found: dict) -> dict[tuple[str, float], dict]:
    rows = averaged([row for row in found["rows"] if row["variant"] != "decode"], ("variant", "setting"))
    return {(row["variant"], row["setting"]): row for row in rows}


def test_what_the_page_says_of_the_variants():
    for found in runs("open_questions").values():
        by_key = variants_of(found)
        assert {name for name, _ in by_key} == {
            "rule", "sink first", "full normalizer", "4 splits", "16 splits", "16 keys", "8 keys", "8 keys, sink first", "certified",
            "tau by layer", "tau by head",
        }  # fmt: skip
        for (name, setting), row in by_key.items():
            assert row["omitted_mass_mean"] <= row["omitted_mass_bound_mean"] + 1e-6
            if ("rule", setting) not in by_key or name in ("rule", "tau by layer", "tau by head"):
                continue
            rule = by_key["rule", setting]
            change = row["work_fraction"] - rule["work_fraction"], rule["omitted_mass_mean"] - row["omitted_mass_mean"]
            assert min(change) >= 0 if "splits" in name else max(change) < 0
            if name == "8 keys":
                ratios = [one["omitted_mass_bound_mean"] / one["omitted_mass_mean"] for one in (row, rule)]
                assert 1 < ratios[0] < ratios[1]


def test_splits_save_little():
    for found in runs("open_questions").values():
        by_key = variants_of(found)
        for name in ("4 splits", "16 splits"):
            saved = [(1 - by_key[one, 1.0]["work_fraction"]) for one in (name, "rule")]
            assert saved[0] < saved[1] / 2


def test_the_papers_figures_stand_first():
    lines = study_tables.allocation().splitlines()[2:6]
    assert all(line.startswith("| paper, 14B | 8,192 |") for line in lines)
    assert "| MALA | 0.0188 |" in lines[3]
    assert study_tables.fidelity().splitlines()[2].startswith("| paper, 14B | 1K to 32K |")


def test_the_page_shows_every_figure():
    for name in study_figures():
        assert f"(studies/{name}.svg)" in PAGE


def test_a_run_that_is_not_whole_says_so():
    whole = next(iter(runs("fidelity").values()))
    assert "Not measured" not in title(whole)
    assert title(whole | {"not_run": ["a", "b"]}).endswith(". Not measured yet: a; b.")


def test_windows_are_averaged_and_small_shares_keep_their_digits():
    rows = [{"tau": 1.0, "x": 1.0}, {"tau": 2.0, "x": 5.0}, {"tau": 1.0, "x": 3.0}]
    assert averaged(rows, ("tau",)) == [{"tau": 1.0, "x": 2.0, "windows": 2}, {"tau": 2.0, "x": 5.0, "windows": 1}]
    assert [percent(x) for x in (0.0, 0.5, 1e-5, 1e-8)] == ["0.0000", "50.0000", "0.0010", "1.0e-06"]


def test_curves_go_through_their_points_and_leave_out_what_a_logarithm_cannot_show():
    svg = curves_svg("title", Axis("x"), Axis(is_log=True), {"a": [(2, 1e-2), (1, 1.0), (3, 0.0)], "b": [(1, 1e-4)]})
    circles = [one for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("circle")]
    (left, high), (right, middle), (also_left, low) = ((float(one.get("cx")), float(one.get("cy"))) for one in circles)
    assert left == also_left < right
    assert middle - high == pytest.approx(low - middle, abs=0.2)
    assert "1e-4" in svg
    with pytest.raises(ValueError, match="no point of 'nothing'"):
        curves_svg("nothing", Axis(), Axis(is_log=True), {"a": [(1, 0.0)]})

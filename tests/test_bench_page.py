# SPDX-License-Identifier: Apache-2.0
"""The table of the decode shows what its file says."""

import sys
from xml.etree import ElementTree

import pytest
from project import ROOT

sys.path.append(str(ROOT / "scripts"))

import decode_table
import performance_figures
import performance_rows
import performance_tables
import render_results


def column(median_ms, **more):
    return {"median_ms": median_ms, "eager_ms": 0.2, "gb_s": 3000.0, "of_copy": 0.75, **more}


ROW = {
    "batch": 8,
    "num_heads": 16,
    "num_kv_heads": 8,
    "context": 131072,
    "flat_heads": 0,
    "two_pass": column(0.5, key_slots_per_query=401.6, speedup_over_cudnn=1.8, speedup_over_flash=1.9),
    "split": column(0.6),
    "single": column(3.25),
    "sdpa_cudnn": column(0.9, of_copy=0.9),
    "sdpa_flash": column(0.95),
}
FLAT = ROW | {"flat_heads": 16, "two_pass": column(1.0, key_slots_per_query=131072.0), "sdpa_cudnn": {"failed": "x"}}


@pytest.fixture
def stored(monkeypatch):
    found = {"bandwidth": {"copy_gb_s": 4012.3, "read_gb_s": 4400.0}, "rows": [ROW, FLAT]}
    monkeypatch.setattr(decode_table, "results", lambda name: {"decode_h200": found}[name])


def test_each_row_is_a_line_in_microseconds_with_what_failed_left_empty(stored):
    lines = decode_table.decode().splitlines()
    assert "4,012 GB/s" in lines[0]
    assert lines[2].count("|") == lines[4].count("|") == lines[5].count("|")
    assert [cell.strip() for cell in lines[4].split("|")[1:-1]] == [
        "8 x 131,072", "16 / 8", "402", "500.0", "600.0", "3,250.0", "900.0", "950.0", "1.80x", "1.90x", "3,000", "75 %", "90 %",
        "200.0", "200.0",
    ]  # fmt: skip
    assert "| 131,072 (flat) | 1,000.0 | 600.0 | 3,250.0 | - | 950.0 | - | - |" in lines[5]


def test_a_marked_page_gets_the_table(stored):
    page = render_results.rendered("before\n<!-- table: decode -->\nold\n<!-- end -->\nafter\n")
    assert page.startswith("before\n<!-- table: decode -->\nCopy bandwidth")
    assert "old" not in page
    assert page.endswith("<!-- end -->\nafter\n")


def bars_of(svg):
    """Height of each bar, without the legend's and the background."""
    found = [one for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("rect")][1:]
    return [float(bar.get("height")) for bar in found if bar.get("height") != "8"]


def test_a_bar_is_as_high_as_its_speedup_and_what_failed_has_none():
    names = {"two_pass": "two-pass", "single": "single"}
    high, low = bars_of(performance_figures.speedup_svg([ROW], names))
    assert high / low == pytest.approx((0.9 / 0.5) / (0.9 / 3.25), rel=0.01)
    svg = performance_figures.speedup_svg([ROW, FLAT], names)
    assert len(bars_of(svg)) == 2
    assert "8 x 131,072" in svg
    assert "402 slots" in svg


def cells(table):
    """The cells of a table's rows, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_shapes_are_taken_apart_and_put_in_order(monkeypatch):
    rows = [{"shape": shape, "slots": 7.0} for shape in ("32,8,128,64,400", "16,8,64,64,400", "16,8,128,96,400")]
    rows.append({"shape": "16,8,128,64,flat"})
    monkeypatch.setattr(performance_rows, "results", lambda name: {"rows": rows})
    found = performance_rows.forward_rows("a run")
    assert [row["shape"] for row in found] == [
        "16,8,128,64,flat",
        "16,8,128,96,400",
        "16,8,64,64,400",
        "32,8,128,64,400",
    ]
    assert [row["requested_slots"] for row in found] == [None, 400, 400, 400]
    assert (found[2]["num_heads"], found[2]["num_kv_heads"], found[2]["head_dim"], found[2]["seqlen"]) == (
        16,
        8,
        64,
        64,
    )


def test_the_forward_shows_what_came_out_and_how_much_faster_it_is(monkeypatch):
    row = {"slots": 389.4, "fused": 0.25, "int8": 0.5, "tau0": 0.375, "sdpa_cudnn": 0.4}
    rows = [{"shape": "16,8,128,8192,400", **row}, {"shape": "16,8,64,8192,400", **row}]
    monkeypatch.setattr(performance_rows, "results", lambda name: {"discovery_growth_h200": {"rows": rows}}[name])
    line = ["8,192", "389", "0.250", "0.500", "0.375", "0.400", "1.60x", "0.80x"]
    assert cells(performance_tables.forward()) == [line]
    assert cells(performance_tables.forward_shapes())[1] == [line[0], "16 / 8", "64", *line[1:]]


def test_a_step_that_loses_says_so(monkeypatch):
    times = {"mala_auto": 1.6, "mala": 2.5, "sdpa_cudnn": 2.0, "fa4": 1.8}
    row = {name: {"forward_and_backward_ms": time, "step_peak_bytes": 3 * 2**20} for name, time in times.items()}
    row |= {"seqlen": 8192, "key_slots_per_query": 389.0, "support_bytes": 2048}
    monkeypatch.setattr(performance_tables, "results", lambda name: {"operator_backward_h200": {"rows": [row]}}[name])
    assert cells(performance_tables.steps()) == [
        ["8,192", "389", "1.60", "2.50", "2.00", "1.80", "1.25x", "0.80x", "1.12x", "0.72x", "3", "3", "3", "2"]
    ]


def test_there_is_a_figure_of_every_stored_result_and_the_page_shows_it():
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    found = performance_figures.performance_figures()
    assert {"forward", "backward"} <= set(found)
    for name in ("forward", "backward"):
        assert f"(performance/{name}.svg)" in page

# SPDX-License-Identifier: Apache-2.0
"""The tables and figures of the benchmark show what their files say."""

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
import targets_table


def column(median_ms, **more):
    return {"median_ms": median_ms, "eager_ms": 0.2, "gb_s": 3000.0, "of_copy": 0.75, **more}


ROW = {
    "batch": 8,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "context": 131072,
    "flat_heads": 0,
    "captured": None,
    "auto": column(0.45),
    "two_pass": column(0.5, key_slots_per_query=401.6),
    "mala_int8": column(0.3, eager_ms=0.31, gb_s=2000.0, of_copy=0.5),
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
        "8 x 131,072", "16 / 8", "402", "450.0", "500.0", "300.0", "600.0", "3,250.0", "900.0", "950.0", "2.00x", "2.11x", "3.00x",
        "3.17x", "3,000", "75 %", "2,000", "50 %", "3,000", "90 %", "200", "310", "200",
    ]  # fmt: skip
    assert "| 131,072 (flat) | 450.0 | 1,000.0 | 300.0 | 600.0 | 3,250.0 | - | 950.0 | - | 2.11x |" in lines[5]


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
    assert all(label in svg for label in ("8 x 131,072", "402 slots", ">flat<"))


def cells(table):
    """The cells of a table's rows, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def operator_row(seqlen, slots, times, **more):
    """A row of bench_operator.py with a time in ms for each column."""
    found = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "seqlen": seqlen, "key_slots_per_query": slots}
    found |= {"flat_heads": 0, "captured": None, "requested_slots": 400, "best_dense": "fa4"}
    return found | {name: {"median_ms": time, "peak_bytes": 2**21} for name, time in times.items()} | more


TIMES = {"mala_auto": 0.25, "mala": 0.375, "mala_int8": 0.5, "mala_tau0": 0.4, "sdpa_cudnn": 0.5, "fa4": 0.2}


@pytest.fixture
def peers(monkeypatch):
    rows = [
        operator_row(512, 320.0, TIMES, flat_heads=16),
        operator_row(8192, 389.4, TIMES),
        operator_row(8192, 4000.0, TIMES, flat_heads=4),
        operator_row(2048, 871.0, TIMES, captured="a file"),
        operator_row(4096, 7.0, TIMES | {"fa4": 12.34}, head_dim=64),
    ]
    monkeypatch.setattr(performance_rows, "results", lambda name: {"operator_peers_h200": {"rows": rows}}[name])


def test_the_forward_shows_what_inputs_were_and_where_it_loses(peers):
    times = ["0.250", "0.500", "0.200", "2.00x", "0.80x"]
    assert cells(performance_tables.forward()) == [
        ["8,192", "389", *times],
        ["8,192", "4,000 (4 heads flat)", *times],
        ["512", "320 (flat)", *times],
        ["2,048", "871 (captured)", *times],
    ]


def test_other_shapes_come_after_the_main_one_and_a_column_that_failed_is_empty(peers):
    found = cells(performance_tables.forward_peers())
    assert [line[:4] for line in found[:2]] == [["8,192", "16 / 8", "128", "389"], ["4,096", "16 / 8", "64", "7"]]
    assert found[1][4:] == [
        "0.250",
        "0.375",
        "0.500",
        "0.400",
        "0.500",
        "12.3",
        "-",
        "2.00x",
        "49.36x",
        "30.85x",
        "2",
        "2",
    ]


def test_a_target_is_held_by_its_worst_row_and_needs_one():
    assert targets_table.line("x", 0.95, [1.2, 0.94]) == ["x", "0.95x", "0.94x", "**below**"]
    assert targets_table.line("x", 0.95, [1.2, 0.95])[-1] == "holds"
    with pytest.raises(ValueError, match="empty"):
        targets_table.line("x", 0.95, [])


def test_a_step_that_loses_says_so(monkeypatch):
    times = {"mala_auto": 1.6, "mala": 2.5, "sdpa_cudnn": 2.0, "fa4": 1.8}
    row = {name: {"forward_and_backward_ms": time, "step_peak_bytes": 3 * 2**20} for name, time in times.items()}
    row = operator_row(8192, 389.0, {}, support_bytes=2048) | row
    monkeypatch.setattr(
        performance_rows, "results", lambda name: {"rows": [row] if name == "operator_backward_h200" else []}
    )
    assert cells(performance_tables.steps()) == [
        ["8,192", "128", "389", "1.600", "2.500", "2.000", "1.800", "1.25x", "0.80x", "1.12x", "0.72x", "3", "3", "3", "2"]
    ]  # fmt: skip


def test_there_is_a_figure_of_every_stored_result_and_the_page_shows_it():
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    found = performance_figures.performance_figures()
    assert set(found) == {"forward", "backward", "decode"}
    for name in found:
        assert f"(performance/{name}.svg)" in page

# SPDX-License-Identifier: Apache-2.0
"""The report is one strictly well-formed file that asks for nothing, says the stored numbers, and works in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from project import ROOT

from mala_hf.heat_map import ERRORS, SHARES, heat_map
from mala_hf.work_page import head_map, save_report, tile_map, tile_shares, work_page
from mala_hf.work_tables import head_rows, percent, summary_rows

RESULT = json.loads((ROOT / "docs" / "work" / "work.json").read_text("utf-8"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def html():
    return work_page(RESULT)


def test_the_page_is_well_formed_and_closes_every_element(html):
    """XML is the strictest reading of it; HTML's own rules differ in void elements, whose slash they ignore."""
    root = ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>\n"))
    assert html.startswith("<!DOCTYPE html>\n")
    assert root.tag.endswith("html")

    opened = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag, attrs):
            opened.append(tag)

        def handle_endtag(self, tag):
            assert opened.pop() == tag

        def handle_startendtag(self, tag, attrs):
            assert tag in ("meta", "rect")

    Checker().feed(html)
    assert opened == []


def test_the_page_asks_for_nothing(html):
    without_names = html.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xhtml", "")
    assert not re.search(r"https?:|//[a-z]|\b(src|href)=|@import|url\(", without_names)


def test_every_picture_says_in_words_what_it_shows(html):
    pictures = list(ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>\n")).iter(f"{SVG}svg"))
    assert len(pictures) == 2 * 4 + 2
    labels = [picture.attrib["aria-label"] for picture in pictures]
    assert {picture.attrib["role"] for picture in pictures} == {"img"}
    assert len(set(labels)) == len(labels)
    fractions = [x for layer in RESULT["runs"][1]["layers"] for x in layer["work_fraction"]]
    assert f"from {min(fractions):.3g} to {max(fractions):.3g}" in labels[0]


def test_names_of_models_and_texts_are_shown_and_not_run():
    wild = '<script>alert("1 & 2")</script>'
    html = work_page(RESULT | {"model": wild, "text": wild})
    assert html.count("<script>") == 1
    assert "&lt;script&gt;" in html
    ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>\n"))


def test_the_table_of_heads_has_a_row_for_each_and_its_numbers():
    headings, rows = head_rows(RESULT)
    assert len(rows) == 2 * 30 * 9
    assert {len(row) for row in rows} == {len(headings)}
    row = next(row for row in rows if row[:3] == ["10", "19", "4"])
    layer = RESULT["runs"][2]["layers"][19]
    assert row[headings.index("work %")] == percent(layer["work_fraction"][4])
    assert row[headings.index("dK error %")] == percent(
        layer["dk_error"][1]
    )  # the second of three groups of three heads


def test_the_summary_has_a_column_for_each_tau():
    headings, rows = summary_rows(RESULT)
    assert headings == ["measure", "tau 0", "tau 1", "tau 10"]
    work = next(row for row in rows if row[0] == "work")
    assert work[1:] == [percent(run["summary"]["work_fraction"]) for run in RESULT["runs"]]


def test_the_page_of_evaluations_shows_the_committed_numbers():
    shown = (ROOT / "docs" / "evaluation.md").read_text("utf-8").splitlines()
    headings, rows = summary_rows(RESULT)
    lines = [" ".join(line.split()) for line in shown if line.startswith("    ")]
    for row in (headings, *rows):
        assert " ".join(row).strip() in lines
    layer = RESULT["runs"][1]["layers"][18]
    assert max(layer["dq_error"]) == layer["dq_error"][8] == RESULT["runs"][1]["summary"]["dq_error_worst_head"]


def test_a_report_without_an_audit_and_gradients_leaves_them_out():
    runs = [
        {
            **run,
            "layers": [
                {k: v for k, v in layer.items() if k[:3] not in ("dq_", "dk_", "dv_")} for layer in run["layers"]
            ],
        }
        for run in RESULT["runs"]
    ]
    html = work_page(RESULT | {"runs": runs, "audit": False})
    assert "omitted mass, bound" in html
    assert "dQ" not in html


def test_a_map_has_a_cell_for_each_value_in_its_colour():
    svg = heat_map([[0.0, 1.0], [None, 0.5], [0.25]], title="t & t", alt="a", x_label="x", y_label="y", cell=(9, 9))
    cells = [rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert [cell.find(f"{SVG}title").text for cell in cells] == ["0, 0: 0", "0, 1: 1", "1, 1: 0.5", "2, 0: 0.25"]
    assert [cell.attrib["fill"] for cell in cells] == ["#440154", "#fde725", "#21918c", "#3b528b"]
    assert (cells[2].attrib["x"], cells[2].attrib["y"]) == ("49", "35")


def test_small_cells_of_one_colour_are_drawn_at_once():
    svg = heat_map([[1.0] * 50 + [0.0] * 50], title="", alt="", x_label="", y_label="", cell=(2, 2))
    widths = [rect.attrib["width"] for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect")]
    assert widths[:2] == ["100", "100"]


def test_scales_end_where_they_say():
    assert [SHARES.place(x) for x in (-1, 0, 0.5, 1, 2)] == [0, 0, 0.5, 1, 1]
    assert [ERRORS.place(x) for x in (0, 1e-6, 1e-1, 1)] == [0, 0, 1, 1]
    assert ERRORS.place(1e-3) == pytest.approx(0.6)


def test_tile_maps_of_long_sequences_are_averaged():
    rows = ["#", "-#", "#-#", "--##"]
    assert tile_shares(rows, 1)[2] == [1, 0, 1, None]
    assert tile_shares(rows, 2) == [[2 / 3, None], [0.25, 1]]
    long = ["#" * (n + 1) for n in range(300)]
    svg = tile_map({"layer": 0, "head": 1, "tau": 1.0, "rows": long})
    assert "each cell is the share of 3 x 3 tiles" in svg
    assert "45150 of 45150 tiles retained" in svg


def test_the_committed_pictures_are_drawn_from_the_committed_numbers(tmp_path):
    save_report(RESULT, tmp_path)
    assert json.loads((tmp_path / "work.json").read_text("utf-8")) == RESULT
    for name in ("heads.svg", "tiles.svg"):
        assert (tmp_path / name).read_text("utf-8") == (ROOT / "docs" / "work" / name).read_text("utf-8")
    assert head_map(RESULT["runs"][1], "work_fraction", "work") + "\n" == (tmp_path / "heads.svg").read_text("utf-8")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as started:
        yield (chromium := started.chromium.launch(executable_path=found, args=["--no-sandbox"]))
        chromium.close()


def opened(browser, folder, **settings):
    """The page from its file, and everything that it asked for or complained about."""
    tab, seen = browser.new_page(**settings), []
    tab.on("request", lambda request: seen.append(request.url))
    tab.on("console", lambda message: seen.append(message.text))
    tab.on("pageerror", lambda error: seen.append(str(error)))
    tab.goto((folder / "work.html").as_uri())
    return tab, seen


def column(tab, number):
    cells = tab.locator("table.sortable").last.locator(f"tbody tr td:nth-child({number})")
    return [float(text) for text in cells.all_text_contents()]


def test_a_browser_opens_the_file_and_sorts_its_tables(browser, tmp_path):
    save_report(RESULT, tmp_path)
    tab, seen = opened(browser, tmp_path)
    assert seen == [(tmp_path / "work.html").as_uri()]
    assert tab.get_by_role("img").count() == 10
    in_order = column(tab, 6)
    heading = tab.locator("table.sortable").last.get_by_role("button", name="work %")
    heading.click()
    assert column(tab, 6) == sorted(in_order) != in_order
    heading.focus()
    tab.keyboard.press("Enter")
    assert column(tab, 6) == sorted(in_order, reverse=True)
    assert tab.locator("th[aria-sort=descending]").count() == 1
    assert seen == [(tmp_path / "work.html").as_uri()]


def test_a_browser_follows_the_colour_scheme_and_needs_no_script(browser, tmp_path):
    save_report(RESULT, tmp_path)
    inks = []
    for scheme in ("light", "dark"):
        tab, seen = opened(browser, tmp_path, color_scheme=scheme, java_script_enabled=False)
        assert len(seen) == 1
        assert tab.locator("tbody tr").count() > 600
        assert tab.get_by_role("columnheader", name="work %").is_visible()
        inks.append(
            tab.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
        )
        inks[-1].append(tab.evaluate("getComputedStyle(document.querySelector('svg text')).fill"))
    dark_grey, white, light_grey, black = (
        f"rgb({rgb})" for rgb in ("34, 34, 34", "255, 255, 255", "221, 221, 221", "22, 24, 28")
    )
    assert inks == [[dark_grey, white, dark_grey], [light_grey, black, light_grey]]

# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of the studies that compare methods: seeds are averaged, what failed says why, the paper's figures stand first."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

import method_study_tables as tables
from stored_results import ROOT

from mala_hf.studies.nsa import FIRST, LAST
from mala_hf.studies.operator_bench import METHODS as OPERATOR_METHODS
from mala_hf.studies.recall_model import CEILING, METHODS, nsa_shape

RECIPE = {
    "pairs": 8, "vocab_size": 64, "short_steps": 2, "short_tokens": 64, "steps": 3, "batch": 2, "test_sequences": 4, "ceiling": 320,
}  # fmt: skip


def recall_row(method, seqlen, d_model, seed, accuracy):
    return {
        "method": method,
        "seqlen": seqlen,
        "d_model": d_model,
        "seed": seed,
        "accuracy": accuracy,
        "key_slots_per_query": 128.5,
    }


@pytest.fixture(name="store")
def stored_runs(monkeypatch):
    found: dict[str, dict] = {}
    monkeypatch.setattr(tables, "runs", lambda study: found.get(study, {}))
    return found


def cells(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def test_names_are_those_of_the_studies():
    assert set(tables.NAMES) == set(METHODS)
    assert set(tables.OPERATOR_NAMES) == set(OPERATOR_METHODS)


def test_recall_shows_the_mean_and_the_range_of_seeds(store):
    rows = [recall_row("full", 512, 64, seed, accuracy) for seed, accuracy in enumerate((0.5, 0.7, 0.9))]
    rows += [recall_row("mala", 512, 64, 0, 0.25), recall_row("mala", 1024, 64, 0, 0.125)]
    store["recall"] = {"x": {"gpu": "a GPU", "versions": {"torch": "1"}, "recipe": RECIPE, "rows": rows}}
    header, _, paper, first, second = cells(tables.recall())
    assert paper[:5] == ["paper", "8,192", "512", "89.97", "89.67"]
    assert first[:6] == ["a GPU", "512", "64", "70.0 (50.0 to 90.0)", "25.0", ""]
    assert first[8:] == ["128", "50 %", "320", "3"]
    assert second[3:5] == ["", "12.5"]
    assert len({len(line) for line in (header, paper, first, second)}) == 1


def test_recall_is_drawn_by_length_where_there_are_several(store):
    rows = [recall_row("full", seqlen, 64, 0, seqlen / 2048) for seqlen in (512, 1024)]
    store["recall"] = {"x": {"gpu": "a GPU", "versions": {"torch": "1"}, "recipe": RECIPE, "rows": rows}}
    figures = tables.recall_figures()
    assert list(figures) == ["recall_x_d_model_64"]
    assert "full attention" in figures["recall_x_d_model_64"]
    assert "(studies/recall_x_d_model_64.svg)" in tables.recall_and_figures()


def test_the_operator_shows_speeds_over_full_attention_and_what_failed(store):
    def method(scale):
        times = {part: {"median_ms": scale} for part in ("forward", "backward", "decode")}
        memory = {"forward_peak_bytes": 2**20, "step_peak_bytes": 2**21}
        return {
            "key_slots_per_query": 100.0 * scale,
            "forward_flops": 1e12,
            "implementation": "code",
            **times,
            **memory,
        }

    found = {
        "gpu": "a GPU",
        "versions": {"torch": "1"},
        "seqlen": 1024,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
    }
    found |= {
        "index_heads": 8,
        "index_dim": 64,
        "mala_key_slots_per_query": 77.0,
        "mala_decode_key_slots_per_query": 50.0,
    }
    found |= {"full": method(2.0), "mala": method(1.0)}
    found |= {"nsa_package": {"implementation": "code", "failed": "no such package"}}
    store["operator"] = {"x": found}
    _, _, paper, full, mala, package = cells(tables.operator())
    assert paper[7:10] == ["2.2x", "3.0x", "1.6x"]
    assert full[2:9] == ["200", "1.00", "2.000", "2.000", "2.000", "1.00x", "1.00x"]
    assert mala[2:12] == ["100", "1.00", "1.000", "1.000", "1.000", "2.00x", "2.00x", "2.00x", "1", "2"]
    assert (package[1], package[-1]) == ("NSA, flash-linear-attention", "no such package")


def test_what_the_page_says_of_nsas_slots_is_so():
    page = (ROOT / "docs" / "studies.md").read_text("utf-8")
    shape = nsa_shape(8192, CEILING)
    said = re.search(
        r"a window of (\d+), the compressed keys \((\d+) at 8,192 tokens\), .* blocks of (\d+) .*: (\d) at 8,192", page
    )
    assert tuple(map(int, said.groups())) == (shape.window, shape.compressed_blocks(8192), shape.selected, shape.count)
    assert FIRST + LAST == 3


def test_the_small_run_ranks_as_the_page_says():
    rows = json.loads((ROOT / "results" / "study_recall_cpu.json").read_text("utf-8"))["rows"]
    accuracy = {row["method"]: row["accuracy"] for row in rows}
    assert abs(accuracy["full"] - accuracy["mala"]) < 0.005
    assert accuracy["mala"] > accuracy["dsa"] > accuracy["moba"] > accuracy["nsa"]


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("study_recall_*.json")), ids=lambda path: path.stem)
def test_stored_runs_are_whole_and_none_is_twice(path):
    rows = json.loads(path.read_text("utf-8"))["rows"]
    runs = [(row["method"], row["seqlen"], row["d_model"], row["seed"]) for row in rows]
    assert len(runs) == len(set(runs)) > 0
    assert all(0 <= row["accuracy"] <= 1 and row["commit"] for row in rows)

# SPDX-License-Identifier: Apache-2.0
"""The associative recall: what its sequences hold, that the model learns them, and that a sweep goes on where it was."""

import json
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from project import ROOT

from mala_hf.studies import recall_workers
from mala_hf.studies.recall_data import RecallTask, recall_batch
from mala_hf.studies.recall_model import METHODS, RecallModel, attention_layer, nsa_shape
from mala_hf.studies.recall_sweep import cells_of, sweep
from mala_hf.studies.recall_train import Cell, Clock, OutOfTime, Recipe, train_cell
from mala_hf.studies.row_store import RowStore

CPU = torch.device("cpu")
TINY = Recipe(
    short_steps=2, short_tokens=256, steps=3, batch=2, warmup=1, pairs=8, vocab_size=64, ceiling=320, test_sequences=2
)


def test_every_key_is_asked_for_once_and_its_value_is_the_one_beside_it():
    task = RecallTask(128, 16, 64)
    tokens, places, values = recall_batch(task, 5, torch.Generator().manual_seed(0))
    for row, where, answers in zip(tokens.tolist(), places.tolist(), values.tolist(), strict=True):
        pairs = dict(zip(row[0:32:2], row[1:32:2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == 16
        assert all(1 <= key < 32 <= value < 64 for key, value in pairs.items())
        assert sorted(row[i] for i in where) == sorted(pairs)
        assert [pairs[row[i]] for i in where] == answers
        assert all(i >= 32 and i % 2 == 0 for i in where)


def test_queries_come_at_distances_that_follow_the_power_law():
    task = RecallTask(64, 1, 64)
    places = recall_batch(task, 20000, torch.Generator().manual_seed(0))[1]
    counts = Counter(((places - 2) // 2).flatten().tolist())
    weights = torch.arange(1, 32, dtype=torch.float64) ** -0.99
    for distance in (0, 1, 7, 30):
        expected = (weights[distance] / weights.sum()).item()
        assert counts[distance] / 20000 == pytest.approx(expected, rel=0.15)


def test_the_same_seed_gives_the_same_sequences():
    first, again, other = (
        recall_batch(RecallTask(64, 8, 64), 2, torch.Generator().manual_seed(i))[0] for i in (0, 0, 1)
    )
    assert first.equal(again)
    assert not first.equal(other)


@pytest.mark.parametrize(
    "sizes", [{"seqlen": 63, "pairs": 4}, {"seqlen": 64, "pairs": 17}, {"seqlen": 256, "pairs": 64, "vocab_size": 128}]
)
def test_a_task_that_cannot_be_is_refused(sizes):
    with pytest.raises(ValueError, match=r"must be even"):
        RecallTask(**sizes)


@pytest.mark.parametrize("method", METHODS)
def test_a_later_token_changes_nothing_before_it(method):
    torch.manual_seed(0)
    layer, _ = attention_layer(method, 32, 400, 320)
    x = torch.randn(1, 400, 32)
    changed = x.clone()
    changed[:, 350:] += 1.0
    with torch.no_grad():
        first, second = layer.eval()(x), layer(changed)
    torch.testing.assert_close(first[:, :350], second[:, :350])
    assert not torch.allclose(first[:, 350:], second[:, 350:])


@pytest.mark.parametrize("seqlen", [1024, 2048, 4096, 8192])
def test_methods_with_a_budget_keep_to_the_ceiling(seqlen):
    shape = nsa_shape(seqlen, 1024)
    last = shape.compressed_blocks(seqlen) + shape.count * shape.selected + shape.window
    assert 1024 - shape.selected < last <= 1024
    for method in ("moba", "dsa", "nsa"):
        assert attention_layer(method, 64, seqlen)[1] <= 1024
    assert attention_layer("dsa", 64, seqlen)[1] == pytest.approx(1024 - 1023 * 512 / seqlen)


def test_a_method_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="methods are full, mala"):
        attention_layer("linear", 64, 1024)


def test_a_small_model_learns_the_task():
    recipe = Recipe(short_steps=150, short_tokens=1024, steps=20, batch=8, pairs=8, vocab_size=64, test_sequences=16)
    row = train_cell(Cell("full", 64, 32, 0), recipe, CPU)
    assert row["training_accuracy"][-1] > 0.8
    assert row["accuracy"] > 0.8  # a guess among the values is right in 3 of 100


def test_a_sweep_stores_rows_and_goes_on_where_it_was(tmp_path):
    cells = [Cell("full", 64, 32, 0), Cell("mala", 64, 32, 0)]
    store = RowStore(tmp_path / "rows.jsonl", {"recipe": "tiny"})
    assert sweep(cells[:1], TINY, store, CPU, commit="abc") == ([], {})
    shown = []
    again = RowStore(tmp_path / "rows.jsonl", {"recipe": "tiny"})
    assert sweep(cells, TINY, again, CPU, on_row=shown.append) == ([], {})
    assert [row["method"] for row in shown] == ["mala"]
    assert [row["commit"] for row in again.rows] == ["abc", None]
    # tiles of 64 keys and 64 queries: all that is visible is retained, or about that
    assert 0 < again.rows[1]["key_slots_per_query"] <= 128


def test_no_run_begins_when_the_budget_is_spent(tmp_path):
    cells = [Cell("full", 64, 32, seed) for seed in range(3)]
    store = RowStore(tmp_path / "rows.jsonl", {})
    assert sweep(cells, TINY, store, CPU, budget_seconds=-1.0) == (cells, {})
    assert store.rows == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, jobs):
    cells = [Cell("full", 66, 32, 0), Cell("none", 64, 32, 0), Cell("full", 64, 32, 0)]
    store = RowStore(tmp_path / "rows.jsonl", {})
    left, failed = sweep(cells, TINY, store, CPU, jobs=jobs)
    assert left == []
    assert list(failed) == [cells[1]]
    assert "methods are full" in failed[cells[1]]
    assert {row["seqlen"] for row in store.rows} == {64, 66}


def test_a_process_whose_run_failed_runs_no_other(tmp_path, monkeypatch):
    """After an error of the GPU every later call of a process fails."""
    started = []

    class Counted(recall_workers._Worker):
        def __init__(self, *arguments):
            started.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(recall_workers, "_Worker", Counted)
    cells = [Cell("full", 64, 32, 0), Cell("none", 64, 32, 0), Cell("full", 64, 32, 1)]
    store = RowStore(tmp_path / "rows.jsonl", {})
    _, failed = sweep(cells, TINY, store, CPU, run_seconds=60.0)
    assert list(failed) == [cells[1]]
    assert [row["seed"] for row in store.rows] == [0, 1]
    assert len(started) == 2
    assert sweep(cells[:1], TINY, store, CPU, run_seconds=60.0) == ([], {})
    assert len(started) == 2  # none for what is there


LONG = Cell("full", 65536, 32, 0)  # minutes on a CPU, where the others take a second


def test_of_several_jobs_one_that_hangs_is_stopped_and_the_others_go_on(tmp_path):
    cells = [LONG, Cell("full", 64, 32, 0), Cell("full", 66, 32, 0)]
    store = RowStore(tmp_path / "rows.jsonl", {})
    left, failed = sweep(cells, TINY, store, CPU, jobs=2, run_seconds=20.0)
    assert (left, failed) == ([], {LONG: "stopped after 20 s"})
    assert {row["seqlen"] for row in store.rows} == {64, 66}


def test_a_run_that_has_not_ended_after_the_deadline_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(recall_workers, "GRACE_SECONDS", 0.0)
    store = RowStore(tmp_path / "rows.jsonl", {})
    began = time.monotonic()
    cells = [LONG, Cell("full", 64, 32, 0)]
    assert sweep(cells[:1], TINY, store, CPU, jobs=2, budget_seconds=8.0) == (cells[:1], {})
    assert time.monotonic() - began < 20.0


def test_no_run_begins_that_a_smaller_one_of_its_method_says_will_not_end(tmp_path):
    store = RowStore(tmp_path / "rows.jsonl", {})
    store.append([{"method": "mala", "seqlen": 128, "d_model": 32, "seed": 0, "seconds": 1000.0}])
    longer, other, shorter = Cell("mala", 256, 32, 0), Cell("full", 64, 32, 0), Cell("mala", 64, 32, 0)
    assert sweep([longer, other, shorter], TINY, store, CPU, budget_seconds=500.0) == ([longer], {})
    assert [row["method"] for row in store.rows] == ["mala", "full", "mala"]


def test_a_run_whose_deadline_passes_is_given_up(monkeypatch):
    clock = Clock(time.time() - 1.0)
    clock.look(1, torch.zeros(()))
    with pytest.raises(OutOfTime, match="the deadline passed at step 10"):
        clock.look(10, torch.zeros(()))


def test_a_run_that_would_miss_its_deadline_is_given_up_early(monkeypatch):
    now = iter([0.0, 10.0, 30.0])
    monkeypatch.setattr(time, "time", lambda: next(now))
    clock = Clock(100.0)
    clock.check(10, 200, torch.zeros(()))
    with pytest.raises(OutOfTime, match="170 seconds more"):
        clock.check(30, 200, torch.zeros(()))


def test_the_longest_sequences_come_first_and_all_methods_of_a_place_together():
    cells = cells_of(METHODS, (1024, 8192), (64, 128, 512), range(2))
    assert len(cells) == len(set(cells)) == 5 * 2 * 3 * 2
    assert [cell.method for cell in cells[:5]] == list(METHODS)
    places = [(cell.seqlen, cell.d_model, cell.seed) for cell in cells[::5]]
    assert places[:4] == [(8192, 128, 0), (8192, 512, 0), (8192, 64, 0), (1024, 128, 0)]
    assert [seed for *_, seed in places] == [0] * 6 + [1] * 6


def test_logits_are_those_of_the_asked_places():
    torch.manual_seed(0)
    model = RecallModel(64, 32, attention_layer("full", 32, 64)[0])
    tokens, places, _ = recall_batch(RecallTask(64, 4, 64), 2, torch.Generator().manual_seed(0))
    everywhere = model(tokens, torch.arange(64).expand(2, -1))
    torch.testing.assert_close(model(tokens, places), everywhere.gather(1, places[..., None].expand(-1, -1, 64)))


def test_the_study_runs_all_methods_by_one_command(tmp_path):
    output = tmp_path / "recall.json"
    command = (
        "scripts/study_recall.py --device cpu --lengths 512 --widths 32 --seeds 1 --pairs 8 --vocab-size 64 --ceiling 320"
        " --short-steps 2 --short-tokens 256 --steps 2 --batch 1 --test-sequences 1 --commit abc"
    )

    def run(*more):
        words = [sys.executable, *command.split(), "--output", output, *more]
        return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)

    done = run()
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text("utf-8"))
    assert found["recipe"]["pairs"] == 8
    assert (found["not_run"], found["failed"]) == ([], {})
    assert [row["method"] for row in found["rows"]] == list(METHODS)
    assert all(0 <= row["accuracy"] <= 1 and row["commit"] == "abc" for row in found["rows"])
    assert "5 runs stored, 0 left" in done.stdout
    assert list(tmp_path.iterdir()) == [output]
    again = run()
    assert again.stdout == "5 runs stored, 0 left\n"
    assert json.loads(output.read_text("utf-8")) == found
    assert "other settings" in run("--steps", "3").stderr

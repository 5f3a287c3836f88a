# SPDX-License-Identifier: Apache-2.0
"""``study_scaling.py`` at a reduced size: a tokenizer that comes out the same, steps that resume, FLOPs by hand, a kept model."""

import json
import sys

import pytest
import torch
from project import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(ROOT / "scripts"))

import study_scaling
import training_study_tables
from scaling_models import SIZES, Size, Trained
from scaling_plan import Plan, Stage
from scaling_runs import Run
from study_data import read_data

import mala_hf
from mala_hf.flops import ModelShape

pytestmark = pytest.mark.transformers

SIZE = "32x2x2x1"
STAGES = ["64x4x6", "128x2x3"]
TEXT = "\n\n".join(f"Entry {n}: the value of key {n % 7} is {n * n}, and that of {n % 5} is not." for n in range(800))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A prepared folder."""
    folder = tmp_path_factory.mktemp("study5")
    (folder / "text.txt").write_text(TEXT, "utf-8")
    train_text = ["--train-text", str(folder / "text.txt"), "--vocabulary", "300"]
    study_scaling.main(["--prepare", "--data", str(folder / "data"), *train_text])
    return folder / "data"


def run(data, state, attention, *more):
    label = f"{SIZE}/{attention}"
    sizes = ["--sizes", SIZE, "--attn", attention, "--stages", *STAGES, "--lengths", "64", "128", "--every", "3"]
    place = ["--data", str(data), "--state", str(state), "--output", "unused", "--device", "cpu", "--only", label]
    study_scaling.main([*place, *sizes, "--held-out-tokens", "512", *map(str, more)])
    return json.loads((study_scaling.folder_of(state, label) / "result.json").read_text("utf-8"))


def test_the_same_texts_give_the_same_tokenizer_and_held_out_documents_are_not_trained_on(data):
    parts, tokenizer, about = read_data(data)
    documents = TEXT.split("\n\n")
    again = study_scaling.train_tokenizer([d for n, d in enumerate(documents, 1) if n % 25], 300)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer) == 300
    held_out = tokenizer.decode(parts["held_out"]).split(study_scaling.END)[:-1]
    assert held_out == documents[24::25]
    assert documents[24] not in tokenizer.decode(parts["train"])
    assert tokenizer.decode(parts["train"]).count(study_scaling.END) == 800 - 32
    assert about["sources"]["train"] == ["text.txt"]


def test_a_run_learns_and_says_what_it_cost(data, tmp_path):
    found = run(data, tmp_path, "mala:tile=[16,16]")
    assert found["complete"]
    assert found["loss"][-1][1] < found["loss"][0][1] - 0.2
    assert [entry[0] for entry in found["loss"]] == [0, 3, 5, 6, 8]
    assert [entry[:2] for entry in found["work"]] == [[0, 64], [3, 64], [5, 64], [6, 128], [8, 128]]
    assert all(0 < share <= 1 for _, _, share in found["work"])
    assert found["tokens"] == 6 * 4 * 64 + 3 * 2 * 128 == found["stages"][1]["tokens"]
    assert found["stages"][0]["tokens"] == 6 * 4 * 64
    saved, recomputed = (found["training_flops"][name] for name in ("saved_support", "state_only"))
    assert found["linear_flops"] < saved <= recomputed
    assert set(found["final"]["nll"]) == {"64", "128"}
    assert set(found["final"]["nll"]["64"]["held_out"]) == {"mala:tile=[16,16]", "sdpa", "mala"}


def test_full_attention_costs_what_a_hand_count_says(data, tmp_path):
    found = run(data, tmp_path, "sdpa", "--stages", "64x4x5")
    heads, head_dim, layers, sequences = 2, 16, 2, 4 * 5
    slots = 64 * 64 * heads * layers * sequences  # one tile of 64 x 64 for float32: all of it is visible
    # scores and values forward; scores, dP, dV, dQ and dK backward
    attention = 2 * slots * head_dim * 7
    weights = layers * (32 * 16 * (2 * 2 + 2 * 1) + 3 * 32 * 128) + 32 * 300
    assert found["linear_flops"] == 6 * weights * 64 * sequences
    assert found["training_flops"] == {"state_only": found["linear_flops"] + attention}
    assert found["parameters"] == weights + (2 * layers + 1) * 32  # the norms; embeddings are shared


def test_mala_that_retains_all_costs_what_full_attention_does():
    model = Size.parse(SIZE).build(300, 128, 0)
    slots = (1000.0, 1000.0)
    full = Trained.parse("sdpa").flops(model, 2, 64, slots)["state_only"]
    mala = Trained.parse("mala").flops(model, 2, 64, slots)
    assert mala["state_only"] == full
    assert mala["saved_support"].total == full.total
    some = Trained.parse("mala").flops(model, 2, 64, (1000.0, 250.0))
    assert some["state_only"].discovery_forward == full.discovery_forward
    assert some["state_only"].post_score_forward == full.post_score_forward / 4
    assert some["saved_support"].discovery_backward == full.discovery_backward / 4


def test_a_run_out_of_time_goes_on_to_the_same_losses(data, tmp_path, monkeypatch):
    whole = run(data, tmp_path / "whole", "sdpa")
    clock = iter(range(1000))
    monkeypatch.setattr("scaling_runs.time.monotonic", lambda: next(clock))
    parts, tokenizer, _ = read_data(data)
    plan = study_scaling.plan_of(study_scaling.build_parser().parse_args(
        ["--data", "d", "--stages", *STAGES, "--lengths", "64", "128", "--every", "3", "--device", "cpu", "--held-out-tokens", "512"]
    ))  # fmt: skip
    state = study_scaling.folder_of(tmp_path / "cut", f"{SIZE}/sdpa")
    study_scaling.check_plan(plan, state / "plan.json")
    place = (SIZE, "sdpa", plan, parts, len(tokenizer), torch.device("cpu"), state)
    from scaling_runs import run_one

    found, _ = run_one(*place, deadline=12)  # the clock ticks at every look
    assert not found["complete"]
    assert 0 < found["step"] < plan.steps
    assert found["final"] is None
    monkeypatch.undo()
    resumed = run(data, tmp_path / "cut", "sdpa")
    assert resumed["complete"]
    assert resumed["loss"] == whole["loss"]
    assert resumed["training_flops"] == whole["training_flops"]
    assert resumed["final"] == whole["final"]
    with pytest.raises(SystemExit, match="a plan with other seed"):
        run(data, tmp_path / "cut", "sdpa", "--seed", 1)


def test_moba_trains_and_costs_what_its_slots_say(data, tmp_path):
    found = run(data, tmp_path, "moba:block=16,topk=2", "--stages", "64x4x5")
    assert found["complete"]
    rows = 4 * 5 * 2 * 2 * 64
    slots = (
        rows * (16 * 8.5 + 48 * 24.5) / 64
    )  # the own block causally; with it one of 16 keys from the second block on
    attention = 2 * 16 * (7 * slots + rows * 64 / 16 / 2)
    assert found["training_flops"]["state_only"] - found["linear_flops"] == pytest.approx(attention)


def test_one_command_runs_all_and_keeps_a_model(data, tmp_path, monkeypatch):
    output, kept = tmp_path / "out" / "scaling.json", tmp_path / "kept"
    command = ["--data", data, "--state", tmp_path / "state", "--output", output, "--device", "cpu", "--sizes", SIZE]
    command += ["--attn", "mala", "--stages", "64x2x4", "--lengths", 64, "--held-out-tokens", 256]
    command = [*map(str, [*command, "--keep", f"{SIZE}/mala", "--keep-folder", kept])]
    monkeypatch.setattr(sys, "argv", ["study_scaling.py", *command])
    study_scaling.main()
    found = json.loads(output.read_text("utf-8"))
    assert [(run["size"], run["attention"], run["complete"]) for run in found["runs"]] == [(SIZE, "mala", True)]
    assert found["plan"]["stages"] == [{"seqlen": 64, "batch": 2, "steps": 4}]
    row = training_study_tables.scaling_table(found).splitlines()[2].split(" | ")
    assert row[0].endswith(SIZE)
    assert f"{found['runs'][0]['training_flops']['state_only']:.3e}" in row
    unfinished = found["runs"][0] | {"attention": "sdpa", "final": None}
    lines = training_study_tables.scaling_table(found | {"runs": [unfinished, *found["runs"]]}).splitlines()
    assert lines[2:] == training_study_tables.scaling_table(found).splitlines()[2:]  # no share of a part
    assert found["not_run"] == []
    points = training_study_tables.loss_by_flops(found["runs"][0])
    assert [loss for _, loss in points] == [loss for _, loss in found["runs"][0]["loss"]]
    assert points[-1][0] == pytest.approx(found["runs"][0]["training_flops"]["state_only"])
    model = AutoModelForCausalLM.from_pretrained(kept, attn_implementation="mala")
    assert model.config.mala == {"tau": 1.0}
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(kept)
    with mala_hf.record_work(model) as report:
        model(**tokenizer("Entry 3: the value", return_tensors="pt"))
    assert report.layers


def test_every_window_is_seen_once_in_a_pass_and_passes_differ():
    windows, stage = torch.arange(12).view(6, 2), Stage(2, 4, 3)
    seen = [row for step in range(6) for row in stage.windows_at(windows, step, 0)[:, 0].tolist()]
    passes = [seen[start : start + 6] for start in range(0, 24, 6)]
    assert all(sorted(one) == windows[:, 0].tolist() for one in passes)
    assert passes[0] != passes[1]


def test_sizes_are_what_their_names_say():
    for name, size in SIZES.items():
        with torch.device("meta"):
            model = size.build(8192, 1024, 0)
        assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(int(name[:-1]) * 1e6, rel=0.04)
        assert ModelShape.of(model.config).head_dim == 64


def test_rates_rise_and_fall_and_are_smaller_for_wider_models():
    plan = Plan(stages=(Stage(64, 1, 100),), lengths=(64,), learning_rate=1.0)
    rates = [plan.rate(step, 256) for step in range(100)]
    assert max(rates) == rates[4] == pytest.approx(1.0, abs=0.01)
    assert rates[0] == 0.2
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
    assert plan.rate(50, 512) == rates[50] / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "7m"], "a size is"),
        (["--sizes", "30x1x4x2"], "even multiple"),
        (["--attn", "flash"], "an attention is"),
        (["--attn", "moba:block=0"], "numbers above 0"),
        (["--attn", "mala:tau=-1"], "tau must be"),
        (["--attn", "sdpa", "sdpa"], "each size and attention once"),
        (["--stages", "64x4"], "SEQLENxBATCHxSTEPS"),
        (["--keep", "5m/moba"], "--keep takes one of"),
        (["--lengths", "0"], "at least 1"),
        ([], "make it with --prepare"),
    ],
)
def test_nonsense_is_refused_in_one_line(arguments, message, tmp_path):
    common = [
        "--data",
        str(tmp_path / "none"),
        "--state",
        str(tmp_path),
        "--output",
        str(tmp_path / "o"),
        "--device",
        "cpu",
    ]
    with pytest.raises(SystemExit, match=message):
        study_scaling.main([*common, *arguments])


def test_the_models_of_all_attentions_begin_alike(data):
    plan = Plan(stages=(Stage(64, 1, 1),), lengths=(64,))
    one, other = (
        Run(Size.parse(SIZE), Trained.parse(label), plan, 300, torch.device("cpu")) for label in ("sdpa", "mala")
    )
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)

# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint becomes a MALA checkpoint with its evidence, and loads with this package, and without it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import transformers as hf
from convert_runs import LENGTH, evidence, quietly, run
from models import NOISE, tiny, tokens
from project import ROOT
from tiny_model import byte_tokenizer, runs_of_tokens

import mala_hf
from mala_hf import MalaConfig, TauSearch, convert
from mala_hf.convert_output import work_folder

SEARCH = TauSearch(max_ppl_increase=0.05, max_omitted_mass=0.0035)


@pytest.fixture(scope="module")
def converted(place):
    """The report of a searched conversion with ``auto_map``, into ``out``."""
    return run(place, search=SEARCH, auto_map=True)


def logits(model):
    with torch.no_grad():
        return model(runs_of_tokens(LENGTH), use_cache=False).logits


def python(place, code, *, without_mala_hf=False):
    """Run code in a process of its own, where this package cannot be imported if so asked, with the tiny model's tokens as ``ids``."""
    blocker = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mala_hf":
            raise ModuleNotFoundError("No module named 'mala_hf'", name="mala_hf")
sys.meta_path.insert(0, Blocker())
"""
    torch.save(runs_of_tokens(LENGTH), place / "ids.pt")
    start = (
        f"import torch, transformers\nids = torch.load({str(place / 'ids.pt')!r})\nfolder = {str(place / 'out')!r}\n"
    )
    paths = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )  # another Transformers may be in front
    done = subprocess.run(
        [sys.executable, "-c", (blocker if without_mala_hf else "") + start + code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_MODULES_CACHE": str(place / "modules"), "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_mala_and_what_was_asked_for_is_added_to_the_config(place, converted):
    before, after = (json.loads((place / name / "config.json").read_text()) for name in ("tiny", "out"))
    assert after.pop("mala") == converted["settings"]
    assert after.pop("auto_map") == {"AutoModelForCausalLM": "modeling_mala.MalaLlamaForCausalLM"}
    assert after == before
    assert list(after) == list(before)
    assert not work_folder(place / "out").exists()


@pytest.mark.transformers
def test_with_mala_it_runs_with_the_saved_settings(place, converted):
    assert converted["settings"]["layers"]
    model = hf.AutoModelForCausalLM.from_pretrained(place / "out", attn_implementation="mala")
    with mala_hf.record_work(model) as work:
        found = logits(model)
    source = hf.AutoModelForCausalLM.from_pretrained(place / "tiny")
    full = logits(source)
    mala_hf.patch_model(source, MalaConfig.from_dict(converted["settings"]))
    assert torch.equal(found, logits(source))
    assert not torch.equal(found, full)
    taus = {layer: one.tau for layer, one in work.layers.items()}
    assert {str(layer): tau for layer, tau in taus.items()} == converted["search"]["taus"]


@pytest.mark.transformers
def test_without_mala_hf_it_loads_unchanged_and_runs_full_attention(place, converted):
    torch.save(logits(hf.AutoModelForCausalLM.from_pretrained(place / "tiny")), place / "expected.pt")
    python(
        place,
        f"""
model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
assert not any(info.values()), info
assert type(model).__name__ == "LlamaForCausalLM" and model.config._attn_implementation == "sdpa"
with torch.no_grad():
    assert torch.equal(model(ids, use_cache=False).logits, torch.load({str(place / "expected.pt")!r}))
transformers.AutoTokenizer.from_pretrained(folder)
try:
    import mala_hf
    raise SystemExit("mala_hf can be imported: nothing was tested")
except ModuleNotFoundError:
    pass
""",
        without_mala_hf=True,
    )


@pytest.mark.transformers
def test_with_auto_map_trusting_remote_code_is_enough(place, converted):
    torch.save(
        logits(hf.AutoModelForCausalLM.from_pretrained(place / "out", attn_implementation="mala")), place / "mala.pt"
    )
    python(
        place,
        f"""
import sys
load = transformers.AutoModelForCausalLM.from_pretrained
model = load(folder, trust_remote_code=True)
assert "mala_hf" in sys.modules and model.config._attn_implementation == "mala", model.config._attn_implementation
with torch.no_grad():
    assert torch.equal(model(ids, use_cache=False).logits, torch.load({str(place / "mala.pt")!r}))
assert model.generate(ids[:, :20], max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 23)
assert load(folder, trust_remote_code=True, attn_implementation="sdpa").config._attn_implementation == "sdpa"
model.save_pretrained(folder + "-again")
again = load(folder + "-again", trust_remote_code=True)
assert again.config._attn_implementation == "mala" and again.config.mala == model.config.mala
""",
    )


def test_the_report_has_all_evidence_and_says_what_the_search_bought(place, converted):
    report = json.loads((place / "out" / "mala" / "report.json").read_text())
    assert report == json.loads(json.dumps(converted))
    before, after = report["perplexity"]
    assert (before["implementation"], after["implementation"]) == ("sdpa", "mala")
    assert before["windows"] == 2
    assert 0 < report["work"]["summary"]["work_fraction"] < 1
    assert after["work_fraction"] == pytest.approx(report["work"]["summary"]["work_fraction"], rel=0.2)
    assert all(
        seconds > 0 for kind in ("prefill", "generate") for seconds in report["time"][f"{kind}_seconds"].values()
    )
    search = report["search"]
    assert max(search["increases"]) <= 0.05
    assert search["increases"][1] == pytest.approx(after["difference"]["mean"], abs=1e-9)
    assert report["full_attention"] == "sdpa"
    assert search["work"]["work_fraction"] <= search["work_at_tau_1"]["work_fraction"]
    assert str(place) not in json.dumps(report)
    page = (place / "out" / "mala" / "report.md").read_text()
    assert f"| {before['ppl']:.4f} | {after['ppl']:.4f} |" in page
    assert "The taus were chosen for at most 0.05 nats per token and at most 0.0035 omitted mass" in page
    for picture in ("work.svg", "output_error.svg", "search.svg"):
        assert f"]({picture})" in page
        assert ElementTree.parse(place / "out" / "mala" / picture).getroot().tag.endswith("svg")


def test_the_figures_of_each_head_are_those_of_its_own_tau(place, tmp_path):
    settings = MalaConfig(tau=1.0, layers={0: {"heads": {1: 100.0, "2-3": "sdpa"}}, 1: "sdpa"})
    first, second = run(place, "heads", settings)["work"]["layers"]
    assert first["taus"] == [1, 100, 0, 0]
    assert second["taus"] == [0] * 4
    assert first["work_fraction"][1] < first["work_fraction"][0] < 1
    assert first["work_fraction"][2:] == [1, 1]
    assert second["output_error_mean"] == pytest.approx([0] * 4, abs=1e-5)
    assert second["break_even"]["operations_fraction"] == 1


def test_the_card_is_kept_and_gets_one_section_however_often(place, converted):
    card = (place / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n\n# Tiny\n\nA card.\n\n<!-- mala-hf: begin -->")
    assert "trust_remote_code=True" in card
    convert(
        place / "out",
        place / "twice",
        MalaConfig(tau=0.5),
        evidence=evidence(place),
        device="cpu",
        quiet=True,
        say=print,
    )
    again = (place / "twice" / "README.md").read_text()
    assert again.count("## MassAlloc Attention") == 1
    assert "(tau 0.5)" in again
    assert 'attn_implementation="mala"' in again
    config = json.loads((place / "twice" / "config.json").read_text())
    assert config["mala"] == {"tau": 0.5}
    assert not (place / "twice" / "mala" / "search.svg").exists()


def test_the_same_call_gives_the_same_settings_and_figures(place, converted):
    report = run(place, "same", search=SEARCH, link=False)
    for name in ("settings", "search", "perplexity", "work"):
        assert report[name] == converted[name]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen2"])
def test_layers_with_windows_softcaps_and_sinks_are_searched_too(family, place, tmp_path):
    """Nothing may be omitted, so layers that no tau relieves are left to SDPA, where that has what they need."""
    tiny(family, peaked=4).save_pretrained(tmp_path / family)
    byte_tokenizer().save_pretrained(tmp_path / family)
    report = convert(
        tmp_path / family, tmp_path / "out", search=TauSearch(max_omitted_mass=0.0, max_ppl_increase=0.01, taus=(1.0, 10.0)),
        **quietly(place),
    )  # fmt: skip
    layers = report["settings"].get("layers", {})
    assert {"sdpa", 0.0, 1.0, 10.0} >= set(layers.values())
    assert ("sdpa" in layers.values()) == (family == "qwen2")
    assert report["work"]["summary"]["omitted_mass_mean"] == 0
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="mala")
    full = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    ids = tokens(1, 300)
    torch.testing.assert_close(model(ids).logits, full(ids).logits, **NOISE)


def test_ruler_is_scored_before_and_after(place):
    report = run(
        place,
        "ruler",
        evidence=evidence(place, length=2048, windows=1, ruler_samples=1, ruler_tasks=("niah_single_1", "fwe")),
    )
    assert [row["task"] for row in report["ruler"]["tasks"]] == ["niah_single_1", "fwe"] * 2
    assert "RULER, mean score" in (place / "ruler" / "mala" / "report.md").read_text()


def test_the_python_of_the_page_runs(place, tmp_path, converted, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "convert.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    stand_ins = {'"smollm2-mala"': repr(str(place / "out")), '"CKPT"': repr(str(place / "tiny"))}
    for block in blocks:
        for name, path in stand_ins.items():
            block = block.replace(name, path)
        exec(block, names)
    assert len(blocks) == 2
    assert names["model"].config._attn_implementation == "sdpa"
    assert names["report"]["settings"] == {"tau": 1.0, "layers": {"0": "sdpa", "1-": 0.5}}
    assert names["plan"]["settings"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["OUT"]


def test_the_numbers_of_the_page_are_those_of_the_stored_run():
    page = (ROOT / "docs" / "convert.md").read_text("utf-8")
    report = json.loads((ROOT / "docs" / "convert" / "report.json").read_text("utf-8"))
    (before, after), work = report["perplexity"], report["work"]["summary"]
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:4]]
        for line in page.splitlines()
        if len(cells := line.split("|")) == 5
    }
    assert rows["perplexity"] == [f"{row['ppl']:.4f}" for row in (before, after)]
    difference = after["difference"]
    assert (
        rows["increase, nats per token [95 %]"][1]
        == f"{difference['mean']:+.4f} [{difference['low']:+.4f}, {difference['high']:+.4f}]"
    )
    assert rows["post-score work, %"] == ["100", f"{100 * work['work_fraction']:.3g}"]
    assert rows["omitted mass, %"] == ["0", f"{100 * work['omitted_mass_mean']:.3g}"]
    assert rows["output error, %"] == [
        f"{100 * report['work']['rounding']:.5f}",
        f"{100 * work['output_error_mean']:.3g}",
    ]
    assert rows["prefill, s"] == [f"{report['time']['prefill_seconds'][name]:.3g}" for name in ("full", "mala")]
    assert f"{100 * report['search']['work_at_tau_1']['work_fraction']:.3g} % of the work is left" in page

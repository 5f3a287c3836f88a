# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint becomes a MALA checkpoint with its evidence, and loads with this package, and without it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import huggingface_hub
import pytest
import torch
import transformers as hf
from models import HEAD_DIM, NOISE, SMALL, WINDOW, tiny, tokens
from project import ROOT
from tiny_model import byte_tokenizer, runs_of_tokens, save_tiny_checkpoint

import mala_hf
from mala_hf import Evidence, MalaConfig, TauSearch, convert, convert_evidence
from mala_hf.cli import main
from mala_hf.convert_config import auto_map_of, converted_config
from mala_hf.convert_output import work_folder

LENGTH = 512  # tokens; eight tiles, of which the tiny model skips some
SEARCH = TauSearch(max_ppl_increase=0.05, max_omitted_mass=0.0035)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a checkpoint ``tiny``, a text on which it attends sparsely, and a module cache of its own."""
    folder = tmp_path_factory.mktemp("place")
    checkpoint = save_tiny_checkpoint(folder / "tiny", positions=4096)
    (checkpoint / "README.md").write_text("---\nlicense: mit\n---\n\n# Tiny\n\nA card.\n", "utf-8")
    text = "".join(chr(97 + 7 * n % 26) * 24 for n in range(240))
    (folder / "text.txt").write_text(text, "utf-8")
    return folder


def evidence(place, **settings):
    return Evidence(
        **({"text": str(place / "text.txt"), "length": LENGTH, "windows": 2, "ruler_samples": 0} | settings)
    )


def quietly(place):
    """How to measure in a test."""
    return {"evidence": evidence(place), "device": "cpu", "quiet": True, "say": lambda _: None}


def run(place, output="out", *arguments, **settings):
    return convert(place / "tiny", place / output, *arguments, **quietly(place) | settings)


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


KILL = """
import os, signal, sys
from pathlib import Path
from mala_hf import Evidence, convert, convert_evidence, convert_output
def kill(*arguments, **settings):
    os.kill(os.getpid(), signal.SIGKILL)
{point} = kill
convert({tiny!r}, {out!r}, evidence=Evidence(text={text!r}, length=512, windows=2, ruler_samples=0), device="cpu", link={link})
"""


@pytest.mark.parametrize(
    ("point", "link", "finished"),
    [
        ("convert_evidence._time", True, 2),
        ("convert_output._write", False, 3),
        ("convert_output.shutil.copyfile", False, 3),
    ],
)
def test_a_killed_run_leaves_nothing_that_loads_and_goes_on_where_it_stopped(
    place, tmp_path, monkeypatch, point, link, finished
):
    out, work = tmp_path / "out", work_folder(tmp_path / "out")
    names = {
        "point": point,
        "tiny": str(place / "tiny"),
        "out": str(out),
        "text": str(place / "text.txt"),
        "link": link,
    }
    killed = subprocess.run([sys.executable, "-c", KILL.format(**names)], capture_output=True, check=False, cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists()
    assert len(list(work.glob("*.json"))) == finished
    for folder in (work, *(path for path in work.rglob("*") if path.is_dir())):
        assert not (folder / "config.json").exists()
    measured = []

    def counted(measure):
        return lambda *arguments: measured.append(measure.__name__) or measure(*arguments)

    for measure in (convert_evidence._perplexity, convert_evidence._time):
        monkeypatch.setattr(convert_evidence, measure.__name__, counted(measure))
    convert(place / "tiny", out, link=link, **quietly(place))
    assert measured == (["_time"] if finished == 2 else [])
    assert hf.AutoModelForCausalLM.from_pretrained(out, attn_implementation="mala").config.mala == {"tau": 1.0}
    assert not work.exists()


def test_other_settings_are_measured_anew(place, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise RuntimeError("stopped")

    monkeypatch.setattr("mala_hf.convert_checkpoint.write_checkpoint", stop)
    counts = []
    for tau in (1.0, 2.0, 1.0):
        with pytest.raises(RuntimeError, match="stopped"):
            convert(place / "tiny", tmp_path / "out", MalaConfig(tau=tau), **quietly(place))
        counts.append(len(list(work_folder(tmp_path / "out").glob("*.json"))))
    assert counts == [3, 6, 6]


def test_a_dry_run_writes_nothing_and_tells_the_plan(place, tmp_path, monkeypatch):
    monkeypatch.setattr("mala_hf.convert_checkpoint.load_model", None)
    plan = convert(
        place / "tiny", tmp_path / "out", search=TauSearch(), evidence=evidence(place), dry_run=True, link=False
    )
    size = (place / "tiny" / "model.safetensors").stat().st_size
    assert (plan["weights"], plan["bytes"]) == (["model.safetensors"], size)
    assert plan["bytes_to_copy"] == size
    assert plan["search"]["max_ppl_increase"] == 0.001
    assert (plan["evidence"]["length"], plan["left_out"], plan["finished_measurements"]) == (LENGTH, [], 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"config": MalaConfig(layers={2: 0.5})}, "layer 2 does not exist|layers \\[2\\] do not exist"),
        ({"config": MalaConfig(tile=(32, 32))}, "leave out tile"),
        ({"config": MalaConfig(layers={0: {"window": 8}})}, "layer 0 has a window"),
        ({"config": MalaConfig(), "search": TauSearch()}, "not both"),
        ({"evidence": Evidence(length=8192, ruler_samples=0)}, "8192 is more than the model's 4096 positions"),
        ({"search": TauSearch(), "evidence": "long"}, "the text has 5760 tokens, fewer than the 8192 of 4 windows"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_before_anything_is_written(place, tmp_path, settings, said):
    if settings.get("evidence") == "long":
        settings = settings | {"evidence": evidence(place, length=2048)}
    with pytest.raises(ValueError, match=said):
        convert(place / "tiny", tmp_path / "out", **quietly(place) | settings)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_run_mala_is_refused_before_it_is_loaded(tmp_path):
    config = hf.BloomConfig(vocab_size=256, hidden_size=16, n_layer=1, n_head=2)
    hf.BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    with pytest.raises(ValueError, match="BloomForCausalLM computes its own attention"):
        convert(tmp_path / "bloom", tmp_path / "out", dry_run=True)


def test_a_task_without_a_sample_so_short_fails_before_anything_is_measured(place, tmp_path):
    with pytest.raises(ValueError, match=r"does not fit in 512 tokens.*; choose another length, or 0 samples of RULER"):
        run(place, tmp_path / "out", evidence=evidence(place, ruler_samples=1, ruler_tasks=("niah_multikey_2",)))
    assert list(work_folder(tmp_path / "out").glob("*.json")) == []


def test_weights_that_give_no_number_are_refused(place, tmp_path):
    model = hf.AutoModelForCausalLM.from_pretrained(place / "tiny")
    model.lm_head.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "tiny")
    hf.AutoTokenizer.from_pretrained(place / "tiny").save_pretrained(tmp_path / "tiny")
    with pytest.raises(ValueError, match="the perplexity with sdpa is no number: the weights are damaged"):
        convert(tmp_path / "tiny", tmp_path / "out", **quietly(place))
    assert not (tmp_path / "out").exists()


def composite():
    text = {**SMALL, **HEAD_DIM, "sliding_window": WINDOW}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return hf.Gemma3Config(text_config=text, vision_config=vision)


@pytest.mark.transformers
def test_a_composite_model_has_the_settings_in_its_text_part_alone():
    config = composite()
    raw = json.loads(config.to_json_string())
    found = converted_config(raw, config, MalaConfig(tau=0.5))
    assert found["text_config"].pop("mala") == {"tau": 0.5}
    assert found == raw
    mapped, code = auto_map_of(config)
    assert "AutoModelForImageTextToText" in mapped
    assert '{"text_config": "mala"}' in code


def test_a_name_of_an_attention_implementation_does_not_stay_in_the_config():
    config = hf.LlamaConfig(**SMALL)
    raw = json.loads(config.to_json_string())
    named = raw | {"attn_implementation": "mala", "_attn_implementation": "mala_reference"}
    assert converted_config(named, config, MalaConfig()) == raw | {"mala": {"tau": 1.0}}
    assert (
        converted_config(raw | {"attn_implementation": "eager"}, config, MalaConfig())["attn_implementation"] == "eager"
    )


def test_auto_map_needs_a_model_class_of_transformers():
    config = hf.LlamaConfig(**SMALL)
    config.auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    with pytest.raises(ValueError, match=r"its code is its own, modeling_own"):
        auto_map_of(config)
    with pytest.raises(ValueError, match="no automatic class loads it"):
        auto_map_of(hf.SiglipVisionConfig())


OWN = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({ran!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.filterwarnings("ignore:MALA is not tested with models of the type 'own'")
def test_remote_code_is_not_run_unless_asked_for(place, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    checkpoint, ran = shutil.copytree(place / "tiny", tmp_path / "remote"), tmp_path / "ran"
    (checkpoint / "own.py").write_text(OWN.format(ran=str(ran)))
    config = json.loads((checkpoint / "config.json").read_text()) | {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"trust_remote_code|custom code"):
        convert(checkpoint, tmp_path / "out", dry_run=True)
    assert not ran.exists()
    assert "own.py" in convert(checkpoint, tmp_path / "out", dry_run=True, trust_remote_code=True)["others"]
    assert ran.exists()
    with pytest.raises(ValueError, match=r"its code is its own, own\.OwnForCausalLM"):
        convert(checkpoint, tmp_path / "out", dry_run=True, trust_remote_code=True, auto_map=True)


@pytest.fixture
def command(place, tmp_path, capsys):
    """Runs the command on the tiny checkpoint; returns its exit code and what it printed."""

    def run_command(*arguments, checkpoint=str(place / "tiny")):
        fixed = (
            "--device",
            "cpu",
            "--quiet",
            "--text",
            str(place / "text.txt"),
            "--length",
            str(LENGTH),
            "--ruler",
            "0",
        )
        code = main(["convert", checkpoint, str(tmp_path / "out"), *fixed, *arguments])
        return code, capsys.readouterr()

    return run_command


def test_the_command_prints_before_and_after(command, tmp_path):
    code, printed = command("--search-tau", "--max-omitted-mass", "0.01")
    assert code == 0
    assert "full attention  MALA" in printed.out
    assert "at most 0.01 omitted mass in any layer" in printed.out
    assert printed.out.endswith(f"Written: {tmp_path / 'out'}\n")
    code, printed = command()
    assert code == 1
    assert "exists already" in printed.err


def test_the_command_prints_json_and_plans(command, tmp_path):
    code, printed = command("--dry-run", "--tau", "3")
    assert code == 0
    assert 'settings  {"tau": 3.0}' in printed.out
    assert printed.out.endswith("Nothing was written.\n")
    code, printed = command("--tau", "3", "--json")
    assert json.loads(printed.out) == json.loads((tmp_path / "out" / "mala" / "report.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-ppl-increase", "0.1"], "--max-ppl-increase is a budget of --search-tau"),
        (["--search-tau", "--tau", "1"], "leave out --tau"),
        (["--search-tau", "--max-omitted-mass", "2"], "max_omitted_mass must be a share"),
        (["--tau", "-1"], "tau must be a finite number"),
        (["--length", "8"], "length must be at least 32"),
        (["--ruler", "-1"], "RULER samples must be 0 or more"),
        (["--text", "absent.txt"], "absent.txt"),
    ],
    ids=" ".join,
)
def test_failures_of_the_command_are_one_line(command, tmp_path, arguments, message):
    code, printed = command(*arguments)
    lines = [line for line in printed.err.splitlines() if line.startswith("mala-hf: error:")]
    assert code == 1
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_name_without_a_network_is_one_line(command, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, printed = command("--ruler", "0", checkpoint="org/gated-model")
    (line,) = printed.err.strip().splitlines()
    assert code == 1
    assert line.startswith("mala-hf: error: cannot get org/gated-model: it is no folder here, not in the cache")
    assert list(tmp_path.iterdir()) == []

# SPDX-License-Identifier: Apache-2.0
"""Two processes on CPUs (gloo) that share a model's heads or its sequences compute what one does, or refuse and say what to use.

What one process computes with the same settings is exact up to the order of sums; the tokens are the same.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from parallel_steps import LEARNING_RATE, LENGTH, SETTINGS, packed_positions, results_of, sequence
from processes import PROCESSES, launch
from project import ROOT
from tiny_model import save_tiny_checkpoint
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from mala_hf import MalaConfig, patch_model, record_work, sequence_parallel
from mala_hf.text import read_text

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed"),
    pytest.mark.xdist_group("distributed"),
]

NOISE = {"atol": 1e-4, "rtol": 1e-4}
SCRIPTS = ROOT / "scripts"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model"), positions=1024)


def loaded(checkpoint: Path, config: MalaConfig = SETTINGS):
    return patch_model(hf.AutoModelForCausalLM.from_pretrained(checkpoint), config)


@pytest.fixture(scope="module")
def alone(checkpoint) -> dict:
    return results_of(loaded(checkpoint))


def saved_by(kind: str, checkpoint: Path, folder: Path) -> list[dict]:
    launch(ROOT / "tests" / "parallel_steps.py", kind, checkpoint, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


def assert_same_work(found: dict, expected: dict) -> None:
    """Reports as dicts; the order of sums may move a bound by a step of the histogram."""
    assert len(found["layers"]) == len(expected["layers"])
    for mine, theirs in zip(found["layers"], expected["layers"], strict=True):
        for name, value in theirs.items():
            if name == "name":
                assert mine[name].removeprefix("module.") == value
            elif name == "omitted_mass_bound_p95":
                assert mine[name] == pytest.approx(value, rel=0.06)
            elif name == "choices":  # processes that share heads make a call each
                assert [(one["way"], one["reason"]) for one in mine[name]] == [
                    (one["way"], one["reason"]) for one in value
                ]
                assert all(one["calls"] >= alone["calls"] for one, alone in zip(mine[name], value, strict=True))
            elif isinstance(value, list) and name not in ("impls", "tiles", "tau"):
                assert mine[name] == pytest.approx(value, rel=1e-4)
            else:
                assert mine[name] == value, name


def test_tensor_parallel_forward_backward_and_generation_are_those_of_one_process(checkpoint, alone, tmp_path):
    for rank, found in enumerate(saved_by("tensor", checkpoint, tmp_path)):
        assert_close(found["logits"], alone["logits"], **NOISE)
        assert_close(found["padded"][:, 40:], alone["padded"][:, 40:], **NOISE)
        assert found["tokens"].tolist() == alone["tokens"].tolist()
        assert found["gradients"].keys() == alone["gradients"].keys()
        largest = max(
            truth.norm() for truth in alone["gradients"].values()
        )  # of queries and keys they are small differences
        for name, gradient in found["gradients"].items():
            truth = alone["gradients"][name]
            assert (gradient - truth).norm() <= 1e-4 * max(truth.norm(), 0.01 * largest), name
        own = re.findall(r"^ +[01] .*?((?:\S+ ){3}\S+)$", found["report"], re.MULTILINE)
        assert [[head == "?" for head in line.split()] for line in own] == [[rank == 1] * 2 + [rank == 0] * 2] * 2
        assert_same_work(found["gathered"], alone["work"].to_dict())


def test_context_parallelism_is_refused_with_what_to_use_instead(checkpoint, tmp_path):
    """Each process would attend to its own part of the sequence and no more."""
    expected = loaded(checkpoint, MalaConfig(layers={"*": "sdpa"}))(sequence(), use_cache=False).logits
    for found in saved_by("context", checkpoint, tmp_path):
        assert len(found["messages"]) == 2
        assert all("Ulysses" in message for message in found["messages"])
        assert_close(found["outside"], expected, **NOISE)


def test_sequences_shared_by_ulysses_give_the_logits_and_the_step_of_one_process(checkpoint, tmp_path):
    pytest.importorskip("deepspeed")
    model = loaded(checkpoint)
    with torch.no_grad(), record_work(model) as work:
        expected = model(sequence(), use_cache=False).logits
    packed = model(sequence(), position_ids=packed_positions(), use_cache=False).logits
    assert not torch.allclose(packed[:, 100:], expected[:, 100:], **NOISE)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model(sequence(), labels=sequence()).loss.backward()
    optimizer.step()
    after = model(sequence(), use_cache=False).logits
    assert (after - expected).abs().max() > 0.1
    found = saved_by("ulysses", checkpoint, tmp_path)
    for name, truth in (("logits", expected), ("packed", packed), ("after", after)):
        assert_close(torch.cat([each[name] for each in found], 1), truth, **NOISE)
    for each in found:
        assert "drops attention masks" in each["refused"]
        assert_same_work(each["gathered"], work.to_dict())


def test_trainer_shares_sequences_by_ulysses(checkpoint, tmp_path):
    pytest.importorskip("deepspeed")
    expected = loaded(checkpoint).train()(sequence(), labels=sequence()).loss.item()
    for found in saved_by("trainer", checkpoint, tmp_path):
        first, second = found["losses"]
        assert first == pytest.approx(expected, rel=1e-5)
        assert second < first - 0.1


def test_ulysses_is_for_mala_and_says_what_it_needs(monkeypatch):
    deepspeed = "accelerate.utils.is_deepspeed_available"
    monkeypatch.setattr(deepspeed, lambda: False)
    with pytest.raises(ImportError, match="ulysses"):
        sequence_parallel.ulysses(2)
    monkeypatch.setattr(deepspeed, lambda: True)
    with pytest.raises(ValueError, match="sp_attn_implementation='sdpa'"):
        sequence_parallel.ulysses(2, sp_attn_implementation="sdpa")
    assert not sequence_parallel.is_active()
    assert sequence_parallel.place_and_size() is None


def windows(checkpoint: Path) -> torch.Tensor:
    ids = hf.AutoTokenizer.from_pretrained(checkpoint)(read_text()[0], return_tensors="pt", verbose=False).input_ids[0]
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def losses_of_one_process(checkpoint: Path, batches: list[torch.Tensor]) -> list[float]:
    """AdamW as the scripts have it; each batch is (sequences, LENGTH)."""
    model = loaded(checkpoint, MalaConfig()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for ids in batches:
        logits = model(ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("script", ["train_fsdp2.py", "train_ulysses.py"])
def test_the_training_examples_take_the_steps_of_one_process(script, checkpoint):
    if script == "train_ulysses.py":
        pytest.importorskip("deepspeed")
    text = windows(checkpoint)
    each = PROCESSES if script == "train_fsdp2.py" else 1  # sequences a step
    expected = losses_of_one_process(checkpoint, list(text[: 3 * each].split(each)))
    options = ["--model", checkpoint, "--seqlen", LENGTH, "--steps", 3, "--learning-rate", 1e-3]
    output = launch(SCRIPTS / script, *options)
    steps = re.findall(r"^step \d  loss (\S+)  work (\S+)%$", output, re.MULTILINE)
    assert [float(loss) for loss, _ in steps] == pytest.approx(expected, rel=5e-4)  # Adam makes much of small gradients
    assert expected[0] > expected[2] + 0.1 or each > 1
    assert all(0 < float(work) < 100 for _, work in steps)


@torch.no_grad()
def test_the_generating_examples_write_what_one_process_writes(checkpoint, tmp_path):
    tokenizer, ids = hf.AutoTokenizer.from_pretrained(checkpoint), windows(checkpoint)[:1]
    model = loaded(checkpoint, MalaConfig())
    with record_work(model) as work:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    expected = [repr(tokenizer.decode(out[0, LENGTH:])), f"all: work {work.work_fraction:.1%}"]
    options = ["--model", checkpoint, "--seqlen", LENGTH, "--new-tokens", 6]
    printed = launch(SCRIPTS / "generate_tensor_parallel.py", *options)
    assert all(part in printed for part in expected)
    offload = ["--max-memory", "cpu=900KB", "--offload-folder", tmp_path]
    command = [sys.executable, SCRIPTS / "generate_device_map.py", *options, *offload]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert all(part in done.stdout for part in [*expected, "layers on cpu, disk"])


def test_the_examples_say_how_they_are_started(checkpoint):
    command = [sys.executable, str(SCRIPTS / "train_fsdp2.py"), "--model", str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1] == "train_fsdp2.py: start it with torchrun --nproc-per-node N"
    output = launch(SCRIPTS / "train_fsdp2.py", "--model", checkpoint, "--seqlen", 10**7, fails=True)
    assert re.search(r"train_fsdp2.py: the text has \d+ tokens, fewer than the 10000000 of a sequence", output)

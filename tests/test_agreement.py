# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of MALA are those of full attention, and where they are not, the logits say how close it was."""

from __future__ import annotations

import json

import pytest
import torch
from models import SMALL_TILE, tiny, tokens
from tiny_model import save_tiny_checkpoint

from mala_hf.agreement import compare_generation, summaries
from mala_hf.cli import main
from mala_hf.implementations import Implementation

pytestmark = pytest.mark.transformers

FULL = Implementation("sdpa")
NEW = 64


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_full_attention_and_tau_0_generate_the_same_64_tokens_but_for_ties(family, cache):
    prompts = [tokens(1, 40, seed) for seed in range(3)]
    found = compare_generation(tiny(family), prompts, NEW, [FULL, Implementation("mala", 0.0)], cache=cache)
    assert [one.prompt for one in found] == [0, 1, 2]
    for one in found:
        assert one.typical_gap > 1e-2
        assert one.same_tokens == NEW or one.gap < 1e-4


def test_the_canonical_tau_generates_the_tokens_of_full_attention_but_for_close_calls():
    prompts = [tokens(1, 300, seed) for seed in range(4)]
    found = compare_generation(tiny("llama"), prompts, NEW, [FULL, Implementation("mala", 1.0)])
    assert sum(one.same_tokens for one in found) > NEW
    for one in found:
        assert one.same_tokens == NEW or one.gap < one.typical_gap


def test_a_disagreement_is_reported_with_its_gaps():
    """Many skips, and the figures are those of the two generations done by hand."""
    model, prompt = tiny("llama", peaked=4), tokens(1, 40)
    model.config.mala = {"tau": 300.0, "tile": SMALL_TILE}
    (one,) = compare_generation(model, [prompt], NEW, [FULL, Implementation("mala")])
    runs = []
    for name in ("sdpa", "mala"):
        model.set_attn_implementation(name)
        out = model.generate(
            prompt, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        runs.append((out.sequences[0, 40:].tolist(), torch.cat(out.logits)))
    (full, logits), (own, own_logits) = runs
    first = next(step for step in range(NEW) if full[step] != own[step])
    assert one.same_tokens == first
    assert one.gap == pytest.approx(float(logits[first, full[first]] - logits[first, own[first]]), abs=1e-5)
    assert one.own_gap == pytest.approx(float(own_logits[first, own[first]] - own_logits[first, full[first]]), abs=1e-5)
    assert min(one.gap, one.own_gap) > 0
    (row,) = summaries([one], NEW)
    assert (row["prompts"], row["prompts_same"], row["same_tokens_median"]) == (1, 0, first)
    assert row["largest_gap"] == one.gap
    assert [found["prompt"] for found in row["disagreements"]] == [0]


def test_comparisons_of_nothing_are_refused():
    for prompts, new, implementations in (([], 1, 2), ([tokens(1, 4)], 0, 2), ([tokens(1, 4)], 1, 1)):
        with pytest.raises(ValueError, match="a comparison needs two attentions"):
            compare_generation(tiny("llama"), prompts, new, [FULL, Implementation("mala", 1.0)][:implementations])


def test_the_command_compares_a_checkpoint(tmp_path, capsys):
    checkpoint = str(save_tiny_checkpoint(tmp_path))
    arguments = ["generate", "--model", checkpoint, "--prompts", "2", "--length", "30", "--new-tokens", "5", "--quiet"]
    assert main([*arguments, "--json", "--cache", "static"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["tau"], row["prompts"]) for row in result["rows"]] == [(0.0, 2), (1.0, 2)]
    assert result["rows"][0]["prompts_same"] == 2
    assert main([*arguments, "--taus", "0"]) == 0
    assert "mala, tau 0      the same on 2 of 2 prompts" in capsys.readouterr().out
    assert main([*arguments, "--prompts", "0"]) == 1
    assert "--prompts must be at least 1, got 0" in capsys.readouterr().err

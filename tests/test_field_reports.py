# SPDX-License-Identifier: Apache-2.0
"""Reports of the field that no other file has a test for, and that docs/reliability.md names tests that exist."""

from __future__ import annotations

import ast
import re

import pytest
import transformers as hf
from models import clone, logits, tiny, tokens
from project import KERNELS, ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)))


@pytest.mark.transformers
def test_a_model_runs_on_after_continuous_batching():
    """transformers#48735: the name for pages stays behind, and the next plain forward dies of it."""
    model = clone(tiny("llama"))
    inputs = {"input_ids": tokens(1, 12)}
    before = logits(model, "mala", inputs)
    model.set_attn_implementation("mala")
    generation = hf.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=96, pad_token_id=0)
    found = model.generate_batch([[5, 6, 7]], generation_config=generation, progress_bar=False)
    assert found
    assert model.config._attn_implementation == "mala"
    assert (model(**inputs).logits == before).all()


def test_nothing_is_tuned_at_run_time():
    """Tuning at the first call takes minutes and writes files; tiles come from a table."""
    used = set()
    for path in KERNELS.glob("*.py"):
        used |= {node.attr for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Attribute)}
    assert not used & {"autotune", "heuristics", "do_bench"}


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[f"{file}::{name}" for file, name in NAMED])
def test_a_test_that_the_page_names_exists(file, name):
    tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_page_names_a_test_in_each_row():
    rows = [
        line
        for line in PAGE.splitlines()
        if line.startswith("| ") and not line.startswith(("| what went", "| ---", "| trap"))
    ]
    reported = [line for line in rows if "::" in line]
    assert len(NAMED) > 50
    assert len(reported) == 37

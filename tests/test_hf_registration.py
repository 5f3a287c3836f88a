# SPDX-License-Identifier: Apache-2.0
"""What ``import mala_hf`` does to a process: names in two interfaces, one wrapped function, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import transformers
from models import tiny, tokens
from transformers import AttentionInterface, AttentionMaskInterface

import mala_hf
from mala_hf.registration import register

pytestmark = pytest.mark.transformers


def in_fresh_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_adds_names_wraps_one_function_and_changes_nothing_else_of_transformers():
    out = in_fresh_python("""
        import sys, torch, transformers
        from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM, PreTrainedModel, masking_utils
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
        from transformers.integrations import sdpa_attention
        from transformers.utils import import_utils

        def state():
            modules = {name: vars(module) for name, module in sys.modules.items() if name.split(".")[0] in ("transformers", "torch")}
            state = {(name, key): id(value) for name, names in modules.items() for key, value in dict(names).items()}
            for cls in (AttentionInterface, AttentionMaskInterface, PreTrainedModel, LlamaForCausalLM, ContinuousBatchingManager):
                state |= {(cls.__name__, key): id(value) for key, value in vars(cls).items()}
            for cls in (AttentionInterface, AttentionMaskInterface):
                state |= {("mapping of " + cls.__name__, key): id(value) for key, value in cls._global_mapping.items()}
            return state

        public = dir(transformers)
        before = state()
        import mala_hf
        after = state()
        lost = [key for key in before if after.get(key) != before[key]]
        loaded_before = {name for name, _ in before}
        added = [key for key in after.keys() - before.keys() if key[0] in loaded_before]
        # a submodule imported for the first time appears in its package, a public name used for the first time at the top
        added = [(name, key) for name, key in added if f"{name}.{key}" not in sys.modules]
        # torch silences a warning of its own where an operator writes to its arguments
        added = [(name, key) for name, key in added if key != "__warningregistry__"]
        added = [(name, key) for name, key in added if name != "transformers" or key not in public]
        print(sorted(lost), sorted(added))
    """)
    mappings = sorted(
        (f"mapping of {kind}", name)
        for kind in ("AttentionInterface", "AttentionMaskInterface")
        for name in ("mala", "mala_reference")
    )
    mappings.insert(2, ("mapping of AttentionInterface", "paged_mala"))
    wrapped = ("ContinuousBatchingManager", "switch_to_cb_friendly_attn")
    namespace_of_our_operators = ("torch.ops", "mala_hf")
    assert out.strip() == f"{[wrapped]} {[*mappings, namespace_of_our_operators]}"


def test_importing_needs_neither_triton_nor_cuda():
    out = in_fresh_python("""
        import sys
        sys.modules["triton"] = None  # makes any import of it fail
        import torch, mala_hf
        print(torch.cuda.is_initialized())
    """)
    assert out.strip() == "False"


def test_registering_twice_changes_nothing():
    before = [dict(interface._global_mapping) for interface in (AttentionInterface, AttentionMaskInterface)]
    register()
    assert [interface._global_mapping for interface in (AttentionInterface, AttentionMaskInterface)] == before


@pytest.mark.parametrize("name", ["mala", "mala_reference"])
def test_a_model_loads_with_the_name_and_runs_that_implementation(name, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    with mala_hf.record_work(model) as report:
        model(tokens(1, 9))
    assert report.layers[0].impls == {"blockwise" if name == "mala" else "reference"}
    assert report.layers[0].tau == 1

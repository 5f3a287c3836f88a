# SPDX-License-Identifier: Apache-2.0
"""The package flash-attn-4: whether it is there, what its failures do, how it is switched off, and to whom it is offered."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from fake_flash_attn_4 import FAKE, NAME, assert_full_attention, attend, inputs, write_package

import mala_hf
from mala_hf import flash_attn_4, hub
from mala_hf.ops import dense
from mala_hf.ops import hf as ours
from mala_hf.registration import register

pytest_plugins = ["fake_flash_attn_4"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FAKE.replace("fails = 0, False", "fails = 0, True"), r"RuntimeError: no kernel\)"),
        ("raise OSError('no libcuda')", "OSError: no libcuda"),
        ("raise ImportError", r"ImportError: \)"),
        (FAKE.replace("scores.logsumexp(-1)", "scores.logsumexp(-1).mT"), "another out or lse"),
        (FAKE.replace("scores.logsumexp(-1)", "None"), "another out or lse"),
    ],
    ids=["call", "import", "nothing said", "shape of lse", "no lse"],
)
def test_a_failure_is_warned_about_once_and_another_kernel_runs(text, words, install):
    install(text)
    x = inputs()
    with pytest.warns(RuntimeWarning, match=f"FlashAttention-4 is installed and failed.*{words}"):
        out, lse, work = attend(x)
    assert work.reason.endswith("; by torch")
    assert_full_attention(out, lse, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attend(x)[2].reason.endswith("; by torch")
    mala_hf.use_flash_attn_4()  # tries again
    with pytest.warns(RuntimeWarning, match="installed and failed"):
        attend(x)


def test_a_failure_is_one_of_its_kind_of_calls(installed):
    cute = importlib.import_module("flash_attn.cute")
    attend(inputs())
    cute.fails = True
    with pytest.warns(RuntimeWarning, match="bfloat16, head_dim 64 and 2 query heads to a KV head leave it alone"):
        attend(inputs(length=101))
    cute.fails = False
    assert NAME not in attend(inputs())[2].reason
    assert NAME in attend(inputs(head_dim=128))[2].reason
    assert NAME in attend(inputs(dtype=torch.float16))[2].reason
    mala_hf.use_flash_attn_4()
    assert NAME in attend(inputs())[2].reason


def test_running_out_of_memory_is_no_failure_of_the_kernel(install):
    install(FAKE.replace('RuntimeError("no kernel\\nfor this")', "torch.OutOfMemoryError"))
    attend(inputs())
    cute = sys.modules["flash_attn.cute"]
    cute.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        attend(inputs())
    cute.fails = False
    assert attend(inputs())[2].reason.endswith(NAME)


def test_it_can_be_switched_off_and_on(installed):
    mala_hf.use_flash_attn_4(False)
    assert attend(inputs())[2].reason.endswith("; by torch")
    register()  # does not switch it on
    assert attend(inputs())[2].reason.endswith("; by torch")
    assert installed() == 0
    mala_hf.use_flash_attn_4()
    assert attend(inputs())[2].reason.endswith(NAME)


@pytest.mark.parametrize("other", ["nothing", "flash_attn", "flash_attn with a folder cute"])
def test_where_it_is_not_installed_nothing_is_imported_or_said(other, install, tmp_path):
    if flash_attn_4.is_installed():
        pytest.skip("flash-attn-4 is installed here")
    if other != "nothing":  # FlashAttention-2 has such a folder from 2.8 on
        write_package(tmp_path, "raise RuntimeError('imported')", distribution="flash_attn")
        (tmp_path / "flash_attn" / "__init__.py").write_text("raise RuntimeError('imported')", "utf-8")
    if other == "flash_attn":
        shutil.rmtree(tmp_path / "flash_attn" / "cute")
    flash_attn_4.is_installed.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attend(inputs())[2].reason.endswith("; by torch")
    assert "flash_attn" not in sys.modules


def test_importing_mala_hf_offers_it_and_imports_nothing_of_it(tmp_path):
    write_package(tmp_path, "raise RuntimeError('imported')")
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import mala_hf
        from mala_hf.ops import dense
        print(dense.offered.name, mala_hf.flash_attn_4.is_installed(), "flash_attn.cute" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["FlashAttention-4", "True", "False"]


def test_a_hub_kernel_is_offered_it_too(hub_kernel, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"mala-hf/mala-flash-attn={hub_kernel}")
    monkeypatch.setattr(hub, "_loaded", {})
    kernel = mala_hf.load_kernel("mala-hf/mala-flash-attn")
    assert importlib.import_module(f"{kernel.__name__}.dense").offered is dense.offered
    assert kernel.__name__ != ours.__name__.rpartition(".")[0]

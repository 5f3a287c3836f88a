# SPDX-License-Identifier: Apache-2.0
"""Devices, and memory that is never clean by chance."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from quick_interpreter import speed_up

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:  # triton reads this once, when it is imported: kernels then run on the CPU, in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    speed_up()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped, saying so, where there is none."""
    if HAS_GPU:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture
def device() -> str:
    """Where the Triton kernels run: a GPU, or the CPU through the interpreter."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    """No test goes the way of another one's calls."""
    from mala_hf.ops.choice_memory import memory

    memory.clear()


@pytest.fixture(scope="session")
def hub_kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Kernel Hub artifact, built once per process: a folder with ``build`` and ``benchmarks``, as the Hub's version branch has."""
    pytest.importorskip("kernels")
    sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
    from publish_kernel import stage

    return stage(tmp_path_factory.mktemp("hub"), "mala-hf/mala-flash-attn")["v1"]


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN, or -1 in integer tensors, so that what is not written shows."""

    def poisoned(make):
        def poisoned_make(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan") if x.is_floating_point() else (True if x.dtype == torch.bool else -1))

        return poisoned_make

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint ``tiny``, a text on which it attends sparsely, and a module cache of its own."""
    from tiny_model import save_tiny_checkpoint

    folder = tmp_path_factory.mktemp("place")
    checkpoint = save_tiny_checkpoint(folder / "tiny", positions=4096)
    (checkpoint / "README.md").write_text("---\nlicense: mit\n---\n\n# Tiny\n\nA card.\n", "utf-8")
    text = "".join(chr(97 + 7 * n % 26) * 24 for n in range(240))
    (folder / "text.txt").write_text(text, "utf-8")
    return folder

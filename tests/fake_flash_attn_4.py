# SPDX-License-Identifier: Apache-2.0
"""A package of FlashAttention-4's interface that computes on the CPU, put where Python looks for packages; calls that may run by it."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mala_hf import flash_attn_4
from mala_hf.ops import call_options, mala_attn_func

FAKE = """
import torch

calls, fails = 0, False


def flash_attn_func(q, k, v, *, softmax_scale=None, causal=False, return_lse=False):
    global calls
    calls += 1
    if fails:
        raise RuntimeError("no kernel\\nfor this")
    assert causal and return_lse and not torch.is_autocast_enabled("cpu")
    groups = q.shape[2] // k.shape[2]
    query, key, value = (x.float().transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = softmax_scale * query @ key.mT
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).to(q.dtype), scores.logsumexp(-1)
"""
NAME = "by FlashAttention-4"


def write_package(folder: Path, text: str, distribution: str = "flash_attn_4") -> None:
    (folder / "flash_attn" / "cute").mkdir(parents=True)
    (folder / "flash_attn" / "__init__.py").touch()
    (folder / "flash_attn" / "cute" / "__init__.py").write_text(text, "utf-8")
    (folder / f"{distribution}-4.0.dist-info").mkdir()
    (folder / f"{distribution}-4.0.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution.replace('_', '-')}\nVersion: 4.0\n", "utf-8"
    )


def forget_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    flash_attn_4.is_installed.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Puts a flash_attn.cute of this text where Python looks for packages, and has "auto" treat a CPU as a measured device."""

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(call_options, "hands_over", lambda q: True)
    monkeypatch.setattr(flash_attn_4, "is_measured", lambda device: True)
    monkeypatch.setattr(flash_attn_4.kernel, "is_used", True)
    monkeypatch.setattr(flash_attn_4.kernel, "_ran", OrderedDict())
    monkeypatch.setattr(flash_attn_4.kernel, "_failed", set())
    forget_package(monkeypatch)
    yield partial(write_package, tmp_path)
    for name in ("flash_attn", "flash_attn.cute"):
        sys.modules.pop(name, None)
    flash_attn_4.is_installed.cache_clear()


@pytest.fixture
def installed(install) -> Callable[[], int]:
    """The stand-in is installed; returns how often it was called."""
    install(FAKE)
    return lambda: sys.modules["flash_attn.cute"].calls if "flash_attn.cute" in sys.modules else 0


def inputs(length: int = 100, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, **options) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, length, heads, head_dim, **options).to(dtype) for heads in (4, 2, 2)]


def attend(x: list[Tensor], **options):
    """out, lse and work of a short causal call."""
    return mala_attn_func(*x, **{"causal": True, "return_lse": True, "return_work": True} | options)


def assert_full_attention(out: Tensor, lse: Tensor, x: list[Tensor], **options) -> None:
    fused, fused_lse, _ = attend(x, discovery="fused", tau=0.0, **options)
    assert (out - fused).float().norm() < 1e-2 * fused.float().norm()
    assert (lse - fused_lse).abs().max() < 1e-3
    assert out.is_contiguous()
    assert (lse.dtype, lse.is_contiguous()) == (torch.float32, True)

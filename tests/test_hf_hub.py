# SPDX-License-Identifier: Apache-2.0
"""Models of this package on the Hub artifact's kernels: only when asked, whole, and only if both fit together."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
import transformers as hf
from models import SMALL_TILE, padding, tiny, tokens
from torch.utils.checkpoint import checkpoint

import mala_hf
from mala_hf import MalaConfig, hub
from mala_hf.ops import hf as ours

kernels = pytest.importorskip("kernels")

pytestmark = pytest.mark.transformers

REPOSITORY = "mala-hf/mala-flash-attn"
ON_KERNEL = MalaConfig(kernel=REPOSITORY, tile=tuple(SMALL_TILE))


@pytest.fixture(autouse=True)
def here(hub_kernel, monkeypatch):
    """The artifact under its name, not loaded yet as far as this package knows."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPOSITORY}={hub_kernel}")
    monkeypatch.setattr(hub, "_loaded", {})


@pytest.fixture
def calls(monkeypatch):
    """Which adapter each layer's attention ran in: "ours" or the kernel's name."""
    seen: list[str] = []
    adapters = {"ours": ours, REPOSITORY: sys.modules[f"{mala_hf.load_kernel(REPOSITORY).__name__}.hf"]}
    for name, adapter in adapters.items():
        real = adapter.mala_attn_func
        monkeypatch.setattr(
            adapter, "mala_attn_func", lambda *args, real=real, name=name, **options: seen.append(name) or real(*args, **options)
        )  # fmt: skip
    return seen


def test_a_patched_model_runs_on_the_kernel_and_back(calls):
    model, ids = tiny("llama", peaked=4, attention="mala"), tokens(2, 40)
    model.config.mala = {"tile": SMALL_TILE}
    with torch.no_grad():
        expected = model(ids, attention_mask=padding(40, (0, 40), (9, 40))).logits
        assert calls == ["ours"] * 2
        mala_hf.patch_model(model, ON_KERNEL)
        assert torch.equal(model(ids, attention_mask=padding(40, (0, 40), (9, 40))).logits, expected)
        assert calls == ["ours"] * 2 + [REPOSITORY] * 2
        mala_hf.unpatch_model(model)
        model(ids)
    assert calls[4:] == ["ours"] * 2


def test_the_reference_runs_from_the_kernel_too(calls):
    model = mala_hf.patch_model(tiny("llama"), ON_KERNEL)
    model.set_attn_implementation("mala_reference")
    with torch.no_grad():
        model(tokens(1, 9))
    assert calls == [REPOSITORY] * 2


def test_work_is_recorded_whichever_kernel_runs():
    model, ids = tiny("llama", peaked=4), tokens(1, 40)
    reports = []
    for config in (MalaConfig(tile=tuple(SMALL_TILE)), ON_KERNEL):
        with torch.no_grad(), mala_hf.mala_attention(model, config), mala_hf.record_work(model) as report:
            model(ids)
        reports.append(report.to_dict())
    assert reports[0] == reports[1]
    assert reports[0]["work_fraction"] < 1


def test_a_patched_model_compiles_on_the_kernel(calls):
    model = mala_hf.patch_model(tiny("llama"), ON_KERNEL)
    torch._dynamo.reset()
    with torch.no_grad():
        whole = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(whole(tokens(2, 20)).logits, model(tokens(2, 20)).logits)
    torch._dynamo.reset()


def test_settings_of_a_checkpoint_alone_start_no_kernel(tmp_path, calls):
    mala_hf.patch_model(tiny("llama"), ON_KERNEL).save_pretrained(tmp_path)
    hub._loaded.clear()
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="mala")
    assert MalaConfig.from_dict(model.config.mala) == ON_KERNEL
    with pytest.raises(ValueError, match=r"has not loaded: call mala_hf.load_kernel\('mala-hf/mala-flash-attn'\)"):
        model(tokens(1, 9))
    mala_hf.load_kernel(REPOSITORY)
    model(tokens(1, 9))
    assert calls == [REPOSITORY] * 2


def test_a_kernel_is_loaded_once_and_is_the_hub_s_module():
    kernel = mala_hf.load_kernel(REPOSITORY)
    assert mala_hf.load_kernel(REPOSITORY) is kernel
    assert kernels.get_kernel(REPOSITORY, version=1) is kernel
    assert kernel.__name__ != "mala_hf.ops"


@pytest.mark.parametrize(("name", "asked"), [("o/k", {"version": 1}), ("o/k@0f1e", {"revision": "0f1e"})])
def test_the_name_may_carry_a_revision(name, asked, monkeypatch):
    """Without one it is the version that this package was made for; trust is the Hub's unless it is given."""
    seen, kernel = [], mala_hf.load_kernel(REPOSITORY)
    monkeypatch.setattr(kernels, "get_kernel", lambda *args, **options: seen.append((args, options)) or kernel)
    mala_hf.load_kernel(name, trust_remote_code=True)
    assert seen == [(("o/k",), {"trust_remote_code": True, **asked})]


def test_another_version_of_the_adapter_is_refused(monkeypatch):
    monkeypatch.setattr(ours, "ADAPTER_VERSION", ours.ADAPTER_VERSION + 1)
    model = tiny("llama")
    said = f"has adapter version {ours.ADAPTER_VERSION - 1}, this mala-hf works with {ours.ADAPTER_VERSION}: name another revision"
    with pytest.raises(ValueError, match=said):
        mala_hf.patch_model(model, ON_KERNEL)
    assert model.config._attn_implementation == "eager"
    assert not hasattr(model.config, "mala")


def test_a_kernel_that_is_not_mala_is_refused(hub_kernel, tmp_path, monkeypatch):
    other = shutil.copytree(hub_kernel, tmp_path / "other")
    for variant in (other / "build").iterdir():
        (variant / "hf.py").unlink()
        for name in ("metadata.json", "_ops.py"):
            (variant / name).write_text((variant / name).read_text().replace('"_mala_', '"_other_'))
    monkeypatch.setenv("LOCAL_KERNELS", f"o/other={other}")
    with pytest.raises(ValueError, match="'o/other' is not a kernel of MALA"):
        mala_hf.load_kernel("o/other")


@pytest.mark.parametrize("name", ["mala", "a/b:c", "https://huggingface.co/a/b", "", None])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match="org/name"):
        mala_hf.load_kernel(name)


def test_without_the_package_kernels_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ImportError, match=r"mala-hf\[hub\]"):
        mala_hf.load_kernel(REPOSITORY)


def test_supports_are_reused_by_the_kernel_s_own_contexts_or_not_at_all():
    model, ids = mala_hf.patch_model(tiny("llama").train(), ON_KERNEL), tokens(1, 20)
    layer, x = model.model.layers[0].self_attn, torch.randn(1, 20, 32, requires_grad=True)
    rotary = model.model.rotary_emb(x, torch.arange(20)[None])

    def attend(x):
        return layer(x, position_embeddings=rotary, attention_mask=None)[0]

    with pytest.raises(ValueError, match="does not reach the Hub kernel"):
        checkpoint(attend, x, use_reentrant=False, context_fn=mala_hf.reuse_support)
    contexts = mala_hf.load_kernel(REPOSITORY).reuse_support
    again = torch.autograd.grad(checkpoint(attend, x, use_reentrant=False, context_fn=contexts).sum(), x)[0]
    assert torch.equal(again, torch.autograd.grad(attend(x).sum(), x)[0])
    assert ids.shape == (1, 20)

# SPDX-License-Identifier: Apache-2.0
"""Dense calls run by FlashAttention-4 where it is installed and was measured; on a CPU a package of the same interface stands in."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mala_hf
from mala_hf import flash_attn_4, hub
from mala_hf.ops import call_options, dense, mala_attn_func
from mala_hf.ops import hf as ours
from mala_hf.ops.choice_memory import asked_by
from mala_hf.registration import register

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


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_dense_call_without_a_gradient_runs_by_it(head_dim, dtype, mode, installed):
    x = inputs(head_dim=head_dim, dtype=dtype)
    with mode():
        out, lse, work = attend(x, softmax_scale=0.2)
    assert installed() == 1
    assert (work.choice, work.impl, work.support_bytes) == ("dense", "flash_attn_4", 0)
    assert work.reason.endswith(f"; {NAME}")
    assert (work.work_fraction == 1).all()
    assert not work.certificate.any()
    assert_full_attention(out, lse, x, softmax_scale=0.2)


def test_autocast_does_not_reach_it(installed):
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(inputs())[2].reason.endswith(NAME)
    assert installed() == 1


def test_a_gradient_keeps_it_away_and_no_grad_brings_it_back(installed):
    x = [leaf.requires_grad_() for leaf in inputs()]
    out, _, work = attend(x)
    assert NAME not in work.reason
    out.sum().backward()
    assert x[0].grad is not None
    with torch.no_grad():
        assert attend(x)[2].reason.endswith(NAME)
    assert installed() == 1


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (inputs(head_dim=32), {}),
        (inputs(dtype=torch.float32), {}),
        (inputs(), {"causal": False}),
        (inputs(), {"discovery": "dense"}),
        (inputs(), {"discovery": "fused"}),
        (inputs(), {"deterministic": True}),
        (inputs(length=1), {}),
        ([x[..., 4:] for x in inputs(head_dim=68)], {}),
        ([inputs()[0], *(x[:1].expand(2, -1, -1, -1) for x in inputs()[1:])], {}),
    ],
    ids=["head_dim", "float32", "not causal", "torch's", "fused", "deterministic", "one query", "address", "stride 0"],
)
def test_other_calls_stay_as_they_are(x, options, installed):
    _, _, work = attend(x, **options)
    assert installed() == 0
    assert NAME not in work.reason


def test_a_step_over_a_short_cache_stays_as_it_is(installed):
    q, k, v = inputs()
    assert NAME not in attend([q[:, -1:], k, v])[2].reason
    assert NAME not in attend([q[:, -5:], k, v])[2].reason
    assert installed() == 0


def test_a_compiler_does_not_meet_it(installed):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: mala_attn_func(*x, causal=True), fullgraph=True, backend="eager", dynamic=False)
    with torch.no_grad():
        compiled(*inputs())
    torch._dynamo.reset()
    assert installed() == 0


def test_other_gpus_stay_as_they_are(installed, monkeypatch):
    monkeypatch.setattr(flash_attn_4, "is_measured", lambda device: False)
    assert NAME not in attend(inputs())[2].reason
    assert installed() == 0


def test_a_cuda_graph_records_it_only_for_a_call_that_has_run(installed, monkeypatch):
    def captured(x: list[Tensor], **options) -> bool:
        with monkeypatch.context() as during:
            during.setattr(flash_attn_4, "is_capturing", lambda: True)
            return NAME in attend(x, **options)[2].reason

    assert not captured(inputs())
    assert installed() == 0  # nor was it imported
    assert NAME in attend(inputs())[2].reason
    assert captured(inputs())
    others = [inputs(length=101), inputs(head_dim=128), inputs(dtype=torch.float16), [x[:1] for x in inputs()]]
    others.append([inputs()[0], *(x[:, :, :1] for x in inputs()[1:])])  # another number of groups
    assert not any(captured(x) for x in others)
    assert not captured(inputs(), softmax_scale=0.5)
    monkeypatch.setattr(flash_attn_4, "MAX_CALLS", 1)
    attend(inputs(length=101))
    assert captured(inputs(length=101))
    assert not captured(inputs())


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


def test_an_empty_batch_does_not_reach_it(installed):
    assert attend([x[:0] for x in inputs()])[0].shape[0] == 0
    assert installed() == 0


class Layer(torch.nn.Module):
    """Projections and attention, as a model has them; ``reasons``: of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = torch.nn.Linear(64, 8 * 64, bias=False)
        self.reasons: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(x).to(torch.bfloat16).unflatten(-1, (8, 64)).split([4, 2, 2], 2)
        with asked_by(self):
            out, work = mala_attn_func(q, k, v, causal=True, return_work=True)
        self.reasons.append(work.reason)
        return out


def test_a_reentrant_checkpoint_goes_the_same_way_twice(installed):
    layer = Layer()
    x = torch.randn(1, 100, 64, requires_grad=True)
    checkpoint(layer, x, use_reentrant=True).float().sum().backward()
    assert len(layer.reasons) == 2
    assert layer.reasons[0] == layer.reasons[1]
    assert installed() == 0
    with torch.no_grad():
        layer.eval()(x)
    assert NAME in layer.reasons[-1]


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


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [100, 1024, 8192])
def test_on_a_gpu_out_and_lse_are_full_attentions_also_in_a_cuda_graph(length, head_dim):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("measured on Hopper")
    if not flash_attn_4.is_installed():
        pytest.skip("flash-attn-4 is not installed")
    x = [y.cuda() for y in inputs(length, head_dim)]
    call = {"tau": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # no failure
        out, lse, work = attend(x, **call)
    assert work.reason.endswith(NAME)
    assert_full_attention(out, lse, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again, again_lse = mala_attn_func(*x, causal=True, return_lse=True, **call)
    again.zero_()
    graph.replay()
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)

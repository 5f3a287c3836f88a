# SPDX-License-Identifier: Apache-2.0
"""Two builds of the kernels in one process, as the Kernel Hub may load them: each has its operators to itself."""

from __future__ import annotations

import importlib
import shutil
import sys

import pytest
import torch
from calls import build
from inputs import Case
from project import KERNELS
from torch.testing import assert_close

from mala_hf.ops import mala_attn_func, operators

# what the builder writes, with a namespace of the build's own
GENERATED = """
import torch
ops = torch.ops.{namespace}

def add_op_namespace_prefix(op_name: str):
    return f"{namespace}::{{op_name}}"
"""


@pytest.fixture
def builds(tmp_path, monkeypatch):
    """Two packages of the same sources, one of which doubles every output."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["_mala_test_build_1", "_mala_test_build_2"]
    for name in names:
        shutil.copytree(KERNELS, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / name / "_ops.py").write_text(GENERATED.format(namespace=name))
    operators_file = tmp_path / names[1] / "operators.py"
    text = operators_file.read_text()
    assert text.count("\n        out,\n") == 1
    operators_file.write_text(text.replace("\n        out,\n", "\n        2 * out,\n"))
    yield [importlib.import_module(name) for name in names]
    for module in [module for module in sys.modules if module.startswith("_mala_test_build_")]:
        del sys.modules[module]


def test_builds_with_namespaces_of_their_own_do_not_clash(builds):
    call = build(Case(seqlen_q=40))
    arguments = {"causal": True, "tile": (16, 16)}
    first, second = builds
    for _ in range(2):  # also after the other build was called
        plain = mala_attn_func(call.q, call.k, call.v, **arguments)
        assert_close(first.mala_attn_func(call.q, call.k, call.v, **arguments), plain, rtol=0, atol=0)
        assert_close(second.mala_attn_func(call.q, call.k, call.v, **arguments), 2 * plain, rtol=0, atol=0)


def test_each_build_differentiates_through_its_own_backward(builds, monkeypatch):
    gradients = []
    for module in (operators, *(importlib.import_module(f"{copy.__name__}.operators") for copy in builds)):
        monkeypatch.setattr(module, "needs_operator", lambda tensors: True)
    for module in (None, *builds):
        q, k, v = (x.requires_grad_() for x in torch.ones(3, 1, 20, 2, 16))
        attend = mala_attn_func if module is None else module.mala_attn_func
        out = attend(q, k, v, causal=True, tile=(16, 16))
        name = "mala_hf" if module is None else module.__name__
        assert name in out.grad_fn.name()
        gradients.append(torch.autograd.grad(out.sum(), v)[0])
    assert torch.equal(gradients[1], gradients[0])
    assert gradients[0].any()


def test_our_own_copy_has_a_namespace_of_ours():
    assert operators.forward._qualname == "mala_hf::forward"
    assert torch.ops.mala_hf.forward is not None
    assert torch.ops.mala_hf.backward is not None

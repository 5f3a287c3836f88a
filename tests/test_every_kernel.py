# SPDX-License-Identifier: Apache-2.0
"""The driver for sanitizers launches each kernel there is."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
import torch
from project import KERNELS, ROOT

sys.path.append(str(ROOT / "scripts"))

import run_every_kernel

from mala_hf.ops import decode
from mala_hf.ops.tma import HAS_GLUON_FOR_HOPPER

# on the CPU each kernel once; the GPU runs all calls
ONE_OF_EACH = (
    "forward and backward",
    "INT8 discovery",
    "decode, two passes",
    "decode, split",
    "decode from an INT8 plane",
    "the look before INT8 discovery",
)
HOPPERS = {"mala_forward_hopper_kernel", "discover_hopper_kernel"}


def kernels() -> set[str]:
    """Names of all jitted functions that are launched; the others are called from them."""
    found = set()
    for path in KERNELS.glob("*.py"):
        functions = (x for x in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(x, ast.FunctionDef))
        found |= {x.name for x in functions if any("jit" in ast.unparse(mark) for mark in x.decorator_list)}
    return {name for name in found if name.endswith("_kernel")}


def test_each_kernel_is_launched_by_the_driver(device):
    names = list(run_every_kernel.CALLS) if device == "cuda" else list(ONE_OF_EACH)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    launched = set(run_every_kernel.run_calls(names, device, dtype))
    has_hoppers = HAS_GLUON_FOR_HOPPER and device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    expected = kernels() if has_hoppers else kernels() - HOPPERS
    assert len(kernels()) >= 15
    assert launched == expected


def test_no_kernel_alone_gets_another_launch_that_the_count_would_miss():
    with pytest.raises(AttributeError):
        decode.COMBINE.launch = decode.COMBINE.launch


def test_the_portable_kernels_alone_are_those_that_every_gpu_has(device, monkeypatch):
    from mala_hf.ops import backward, discover, forward

    switches = [(backward, "has_tma"), (forward, "has_tma")] + [
        (x, "HAS_GLUON_FOR_HOPPER") for x in (discover, forward)
    ]
    for module, name in switches:
        monkeypatch.setattr(module, name, getattr(module, name))  # put back
    if HAS_GLUON_FOR_HOPPER:
        from mala_hf.ops import forward_hopper_launch

        monkeypatch.setattr(forward_hopper_launch, "has_tma", forward_hopper_launch.has_tma)
    run_every_kernel.portable_only()
    assert not any(getattr(module, name) is True for module, name in switches)
    assert not forward.has_tma(torch.empty(1, 64, 1, 64, dtype=torch.float16, device=device))
    names = ["forward", "INT8 discovery"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    assert not HOPPERS & set(run_every_kernel.run_calls(names, device, dtype))


def test_without_a_sanitizer_the_script_says_so(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path), "CUDA_HOME": str(tmp_path), "CUDA_PATH": str(tmp_path)}
    environment.pop("COMPUTE_SANITIZER", None)
    if os.path.exists("/usr/local/cuda/bin/compute-sanitizer"):
        pytest.skip("the CUDA toolkit is where it is looked for")
    command = [sys.executable, ROOT / "scripts" / "sanitize.py", tmp_path / "found.json", "--logs", tmp_path / "logs"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no compute-sanitizer here" in done.stderr
    assert not (tmp_path / "found.json").exists()

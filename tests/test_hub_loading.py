# SPDX-License-Identifier: Apache-2.0
"""The Kernel Hub artifact where this package does not exist: a Python with torch, triton, kernels and Transformers, and no network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from project import KERNELS

kernels = pytest.importorskip("kernels")

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

from build_kernel import KERNEL, build  # noqa: E402

REPOSITORY = "mala-hf/mala-flash-attn"
LENT = ("torch", "triton", "kernels", "transformers")

# each sets ``mala``
LOADING = {
    "folder": "mala = kernels.get_local_kernel(Path(sys.argv[1]))",
    "local override": f"mala = kernels.get_kernel({REPOSITORY!r}, version=1)",
    "cache": f"mala = kernels.get_kernel({REPOSITORY!r}, version=1)",
}

RUN = """
import importlib.util, socket, sys
from pathlib import Path

def no_network(*args, **kwargs):
    raise AssertionError("the network was asked for")

socket.getaddrinfo = socket.socket.connect = no_network
assert importlib.util.find_spec("mala_hf") is None, "this package is here"
import torch, kernels

LOADING
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(3, 2, 100, 4, 32, generator=torch.Generator().manual_seed(0)).to(device)
q, k, v = (y.requires_grad_() for y in x)
out = mala.mala_attn_func(q, k, v, tau=0.0, causal=True)
full = torch.nn.functional.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True).transpose(1, 2)
torch.testing.assert_close(out, full, atol=1e-5, rtol=1e-5)
for gradient, expected in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(full.sum(), (q, k, v))):
    torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-4)
with torch.no_grad():
    step = mala.mala_attn_with_kvcache_func(q[:, 99:], k, v, cache_seqlens=torch.tensor([100, 100], device=device), tau=0.0)
torch.testing.assert_close(step, full[:, 99:], atol=1e-5, rtol=1e-5)
print(mala.__name__, Path(mala.__file__).parent)
"""

MODEL = f"""
mala.set_default_tau(0.0)
import transformers
sizes = {{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}}
config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
torch.manual_seed(0)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[2])
load = transformers.AutoModelForCausalLM.from_pretrained
models = [load(sys.argv[2], attn_implementation=name).to(device) for name in ("sdpa", {REPOSITORY!r})]
ids = torch.arange(30, device=device).view(2, 15)
mask = torch.ones_like(ids)
mask[1, :4] = 0
expected, logits = (model(ids, attention_mask=mask).logits[mask.bool()] for model in models)
torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
"""


def closure(names: tuple[str, ...]) -> set[str]:
    """The named distributions and all that they need, normalized; what is not installed is left out."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            parsed = (Requirement(line) for line in requirements)
            pending += [one.name for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> tuple[Path, Path]:
    """Python of a virtual environment without packages, and a folder with links to those that ``LENT`` needs, no others."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    lent = folder / "lent"
    lent.mkdir()
    names = closure(LENT)
    assert {"torch", "kernels", "transformers"} <= names
    assert not {"mala-hf", "accelerate", "pytest"} & names
    for name in names:
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or () if not file.parts[0].startswith((".", "__"))}:
            target = Path(str(installed.locate_file(top)))
            if target.exists() and not (lent / top).exists():
                (lent / top).symlink_to(target)
    return folder / "env" / "bin" / "python", lent


def hub_cache(folder: Path, version_branch: Path) -> Path:
    """A Hub cache that holds the branch v1 of the repository, as a download leaves it."""
    repository, commit = folder / "hub" / f"kernels--{REPOSITORY.replace('/', '--')}", "0" * 40
    shutil.copytree(version_branch, repository / "snapshots" / commit, ignore=shutil.ignore_patterns("__pycache__"))
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(commit)
    return folder


@pytest.mark.parametrize("way", LOADING)
def test_it_loads_and_runs_without_this_package_and_without_the_network(way, bare_python, hub_kernel, tmp_path):
    python, lent = bare_python
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(lent), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONDONTWRITEBYTECODE": "1"}
    if way == "local override":
        environment["LOCAL_KERNELS"] = f"{REPOSITORY}={hub_kernel}"
    elif way == "cache":
        hub_cache(tmp_path / "hf", hub_kernel)
    code = RUN.replace("LOADING", LOADING[way]) + (MODEL if way == "cache" else "")
    command = [str(python), "-c", code, str(hub_kernel), str(tmp_path / "model")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    name, folder = done.stdout.split()
    assert name.startswith("_mala_cuda_" if torch.version.cuda else "_mala_cpu_")
    assert Path(folder, "rule.py").read_bytes() == (KERNELS / "rule.py").read_bytes()
    assert Path(folder).is_relative_to(tmp_path if way == "cache" else hub_kernel)


def test_the_folder_inside_a_build_is_the_same_module(hub_kernel):
    """Old releases of kernels import that one."""
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("anything", sys.argv[1])
old = importlib.util.module_from_spec(spec)
spec.loader.exec_module(old)
from kernels import get_local_kernel
from pathlib import Path
new = sys.modules[next(name for name in sys.modules if name.startswith("_mala_"))]
assert all(getattr(old, name) is getattr(new, name) for name in new.__all__), new
"""
    inner = next((hub_kernel / "build").glob("torch-cpu")) / "mala" / "__init__.py"
    done = subprocess.run([sys.executable, "-c", code, str(inner)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def two_kernels(tmp_path):
    """Two versions of the kernel in this process; the second doubles every output."""
    loaded = []
    for name in ("first", "second"):
        copy = shutil.copytree(KERNEL, tmp_path / name, ignore=shutil.ignore_patterns("build", "__pycache__"))
        operators = copy / "torch-ext" / "mala" / "operators.py"
        text = operators.read_text()
        assert text.count("\n        out,\n") == 1
        factor = {"first": "1", "second": "2"}[name]
        operators.write_text(text.replace("\n        out,\n", f"\n        {factor} * out,\n"))
        build(copy / "build", copy)
        loaded.append(kernels.get_local_kernel(copy))
    yield loaded
    for name in [name for name in sys.modules if name.startswith(tuple(module.__name__ for module in loaded))]:
        del sys.modules[name]


def test_two_versions_in_one_process_share_no_module_operator_or_setting(two_kernels):
    first, second = two_kernels
    q, k, v = torch.randn(3, 1, 300, 2, 16, generator=torch.Generator().manual_seed(0))
    out = first.mala_attn_func(q, k, v, tau=0.0, causal=True)
    assert torch.equal(second.mala_attn_func(q, k, v, tau=0.0, causal=True), 2 * out)
    assert torch.equal(first.mala_attn_func(q, k, v, tau=0.0, causal=True), out)
    first.set_default_tau(0.0)
    assert (first.default_tau(), second.default_tau()) == (0.0, 1.0)

    def modules(kernel) -> dict[str, object]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] == kernel.__name__}

    assert not modules(first).keys() & modules(second).keys()
    assert len(modules(first)) > 5
    for kernel in two_kernels:
        operator = getattr(torch.ops, kernel.__name__).forward.default
        assert operator.name() == f"{kernel.__name__}::forward"
        folder = Path(kernel.__file__).parent
        assert all(Path(module.__file__).is_relative_to(folder) for module in modules(kernel).values())


def test_one_build_from_two_folders_is_one_kernel(hub_kernel, tmp_path):
    """As with two revisions of a repository that differ in other files."""
    copy = shutil.copytree(hub_kernel, tmp_path / "copy")
    first, second = (kernels.get_local_kernel(folder) for folder in (hub_kernel, copy))
    assert first.mala_attn_func is second.mala_attn_func
    q, k, v = torch.randn(3, 1, 20, 2, 16)
    assert torch.equal(first.mala_attn_func(q, k, v), second.mala_attn_func(q, k, v))

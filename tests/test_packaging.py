# SPDX-License-Identifier: Apache-2.0
"""What users install is what the repository holds: the same kernel bytes in every form, and it runs."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from project import KERNELS, PROJECT, ROOT

# the artifacts are built once, by the one process that gets this file
pytestmark = pytest.mark.xdist_group("packaging")

FORWARD = """
import torch, mala_hf
from mala_hf.ops import mala_attn_func
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
q = torch.randn(1, 100, 4, 32, generator=torch.Generator().manual_seed(0))
out = mala_attn_func(q, q[:, :, :2], q[:, :, 2:], tau=0.0, causal=True)
x = q.transpose(1, 2)
full = torch.nn.functional.scaled_dot_product_attention(x, x[:, :2], x[:, 2:], is_causal=True, enable_gqa=True)
torch.testing.assert_close(out, full.transpose(1, 2))
assert "mala" in ALL_ATTENTION_FUNCTIONS.valid_keys()
print(mala_hf.__version__, mala_hf.__file__)
"""


def run(*command, cwd=None, **environment) -> str:
    """Run a command, return its output, and show what it said when it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": "", **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(python: Path, *what: str, cwd: Path, **environment: str) -> None:
    """Install into the environment of ``python`` with this one's pip, from no index."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    run(*pip, *what, cwd=cwd, **environment)


def copy_working_tree(folder: Path) -> Path:
    """Copy the files that git tracks or would add, links kept as links."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return folder


@pytest.fixture
def checkout(tmp_path):
    return copy_working_tree(tmp_path / "checkout")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """(wheel built from the sdist, sdist), by the declared build backend, without the network."""
    checkout, folder = copy_working_tree(tmp_path_factory.mktemp("checkout")), tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(checkout))
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture
def empty_environment(tmp_path):
    """Python of a virtual environment without packages, and a PYTHONPATH that lends it those of this one, ours excepted.

    Torch is lent, not installed again: minutes and gigabytes; that our own imports are declared is another test's question.
    """
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    lent = tmp_path / "lent"
    lent.mkdir()
    for place in {
        Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages") or "overlays" in path
    }:
        for entry in place.iterdir():
            if not (
                entry.name.startswith(("mala", "_mala", "__editable__"))
                or entry.suffix == ".pth"
                or (lent / entry.name).exists()
            ):
                (lent / entry.name).symlink_to(entry)
    return tmp_path / "env" / "bin" / "python", lent


def kernel_files():
    return {path.relative_to(KERNELS).as_posix(): path.read_bytes() for path in KERNELS.rglob("*.py")}


def test_the_wheel_holds_the_repository_s_kernels_byte_for_byte(artifacts):
    with zipfile.ZipFile(artifacts[0]) as wheel:
        prefix = "mala_hf/ops/"
        shipped = {name.removeprefix(prefix): wheel.read(name) for name in wheel.namelist() if name.startswith(prefix)}
        data = {"mala_hf/py.typed", "mala_hf/data/persuasion.txt.gz", "mala_hf/lm_eval/configs/mala_ruler.yaml"}
        assert data <= set(wheel.namelist())
        assert not [name for name in wheel.namelist() if not name.startswith(("mala_hf/", "mala_hf-"))]
    assert shipped == kernel_files()


def test_the_sdist_holds_the_repository_s_kernels_as_files_byte_for_byte(artifacts):
    with tarfile.open(artifacts[1]) as sdist:
        members = {member.name.partition("/")[2]: member for member in sdist.getmembers() if not member.isdir()}
        prefix = "mala_hf/ops/"
        inside = {name.removeprefix(prefix): member for name, member in members.items() if name.startswith(prefix)}
        assert all(member.isreg() for member in members.values())
        shipped = {name: sdist.extractfile(member).read() for name, member in inside.items()}
    assert shipped == kernel_files()
    assert {"LICENSE", "README.md", "pyproject.toml", "tests/test_packaging.py"} <= set(members)


def test_the_wheel_installs_into_an_empty_environment_and_runs_on_the_cpu(artifacts, empty_environment, tmp_path):
    python, lent = empty_environment
    install(python, str(artifacts[0]), cwd=tmp_path)
    version, file = run(str(python), "-c", FORWARD, cwd=tmp_path, PYTHONPATH=str(lent)).split()
    assert version == PROJECT["version"]
    assert Path(file).is_relative_to(tmp_path / "env")
    listed = run(str(python.with_name("mala-hf")), "info", "--json", cwd=tmp_path, PYTHONPATH=str(lent))
    assert f'"mala-hf": "{version}"' in listed


def test_an_editable_install_follows_the_link(checkout, empty_environment, tmp_path):
    python, lent = empty_environment
    install(python, "--no-build-isolation", "--editable", str(checkout), cwd=tmp_path, PYTHONPATH=str(lent))
    version, file = run(str(python), "-c", FORWARD, cwd=tmp_path, PYTHONPATH=str(lent)).split()
    assert version == PROJECT["version"]
    assert Path(file).is_relative_to(checkout)


def test_a_bare_checkout_runs_and_says_that_it_is_one(checkout, empty_environment):
    python, lent = empty_environment
    version, file = run(str(python), "-c", FORWARD, cwd=checkout, PYTHONPATH=str(lent)).split()
    assert version == "0.0.0+checkout"
    assert Path(file).is_relative_to(checkout)


def test_the_kernels_are_in_git_once():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    links = run("git", "ls-files", "--stage", "mala_hf/ops", cwd=ROOT).split()
    assert links[0] == "120000"
    assert os.readlink(ROOT / "mala_hf" / "ops") == "../kernels_hub/mala/torch-ext/mala"
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    assert [name for name in tracked if name.endswith("/blockwise.py")] == [
        "kernels_hub/mala/torch-ext/mala/blockwise.py"
    ]


def test_importing_the_package_needs_no_extra_and_no_triton():
    blocked = ["accelerate", "datasets", "gguf", "kernels", "matplotlib", "triton"]
    modules = "mala_hf, mala_hf.cli, mala_hf.fidelity, mala_hf.info, mala_hf.perplexity"
    run(
        sys.executable, "-c", f"import sys\nfor name in {blocked}: sys.modules[name] = None\nimport {modules}", cwd=ROOT
    )

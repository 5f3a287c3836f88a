# SPDX-License-Identifier: Apache-2.0
"""What users install is what the repository holds: one copy of the kernels, declared imports, layers that point one way."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest and mypy there

# the artifacts are built once, by the one process that gets this file
pytestmark = pytest.mark.xdist_group("packaging")

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "kernels_hub" / "mala" / "torch-ext" / "mala"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

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
        assert {"mala_hf/py.typed", "mala_hf/data/persuasion.txt.gz"} <= set(wheel.namelist())
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
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        str(artifacts[0]),
    ]
    run(*command, cwd=tmp_path)
    version, file = run(str(python), "-c", FORWARD, cwd=tmp_path, PYTHONPATH=str(lent)).split()
    assert version == PROJECT["version"]
    assert Path(file).is_relative_to(tmp_path / "env")
    listed = run(str(python.with_name("mala-hf")), "info", "--json", cwd=tmp_path, PYTHONPATH=str(lent))
    assert f'"mala-hf": "{version}"' in listed


def test_an_editable_install_follows_the_link(checkout, empty_environment, tmp_path):
    python, lent = empty_environment
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    run(*command, "--editable", str(checkout), cwd=tmp_path, PYTHONPATH=str(lent))
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


# import layers


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it; relative ones start with their dots, one name each."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            dots = "." * node.level
            found |= {dots + node.module} if node.module else {dots + alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


def top_level(module: str) -> str:
    return module.split(".")[0]


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


PACKAGE = sorted((ROOT / "mala_hf").glob("*.py"))
OUTSIDE_OPS = {"torch", "triton"}

# file -> what it may import of its own folder; files not named are kernels, which may import all but the last three layers
LAYERS = {
    "reference": set(),
    "rule": set(),
    "work": set(),
    "visibility": {"work"},
    "tile_config": set(),
    "checks": {"tile_config"},
}
UPPER = ("interface", "hf")


@pytest.mark.parametrize("path", python_files(KERNELS), ids=lambda path: path.name)
def test_kernels_import_only_the_standard_library_torch_triton_and_one_another(path):
    for module in imports_of(path):
        if not module.startswith("."):
            assert top_level(module) in OUTSIDE_OPS | sys.stdlib_module_names, f"{path.name} imports {module}"
        else:
            assert not module.startswith("..") or path.parent != KERNELS, f"{path.name} imports {module} from outside"


@pytest.mark.parametrize("path", python_files(KERNELS), ids=lambda path: path.name)
def test_kernel_layers_point_one_way(path):
    name = path.stem
    ours = {module.lstrip(".").split(".")[0] for module in imports_of(path) if module.startswith(".")}
    if name in LAYERS:
        assert ours <= LAYERS[name], f"{name} imports {ours - LAYERS[name]}"
    elif name.startswith("hf"):
        assert "__init__" not in ours
    elif name == "interface":
        assert not {module for module in ours if module.startswith("hf")}
    elif name != "__init__":
        assert not {module for module in ours if module.startswith(UPPER)}, f"{name} imports an upper layer"


def test_the_reference_imports_no_triton():
    assert "triton" not in {top_level(module) for module in imports_of(KERNELS / "reference.py")}


def declared(*extras: str) -> set[str]:
    """Normalized names of the distributions that the project declares, and those of the extras."""
    requirements = [
        *PROJECT["dependencies"],
        *(line for extra in extras for line in PROJECT["optional-dependencies"][extra]),
    ]
    return {re.sub(r"[-_.]+", "-", Requirement(line).name).lower() for line in requirements}


installed_distributions = functools.cache(packages_distributions)


def distributions_of(module: str) -> set[str]:
    names = installed_distributions().get(top_level(module), [top_level(module)])
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


# modules behind a command that asks for its extra first
BEHIND_EXTRAS = {"demo": "demo", "report": "demo", "checkpoint": "demo", "cli": "demo"}


@pytest.mark.parametrize("path", [*PACKAGE, *python_files(KERNELS)], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_third_party_import_is_declared(path):
    extras = [BEHIND_EXTRAS[path.stem]] if path.parent.name == "mala_hf" and path.stem in BEHIND_EXTRAS else []
    allowed = declared(*extras)
    for module in imports_of(path):
        if not module.startswith(".") and top_level(module) not in sys.stdlib_module_names:
            assert distributions_of(module) & allowed, f"{path.name} imports {module}, which is not declared"


def test_importing_the_package_needs_no_extra_and_no_triton():
    blocked = ["accelerate", "datasets", "gguf", "kernels", "matplotlib", "triton"]
    modules = "mala_hf, mala_hf.cli, mala_hf.fidelity, mala_hf.info, mala_hf.perplexity"
    run(
        sys.executable, "-c", f"import sys\nfor name in {blocked}: sys.modules[name] = None\nimport {modules}", cwd=ROOT
    )


def test_every_file_names_its_licence():
    unnamed = [
        path.name
        for folder in (ROOT / "mala_hf", KERNELS, ROOT / "tests", ROOT / "scripts")
        for path in python_files(folder)
        if not path.read_text("utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n")
    ]
    assert unnamed == []

# SPDX-License-Identifier: Apache-2.0
"""The Kernel Hub artifact: the sources' bytes, the same from every build, and what the ecosystem's own tools say of it."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import KERNELS, PROJECT, ROOT

kernels = pytest.importorskip("kernels")

sys.path.append(str(ROOT / "scripts"))

from build_kernel import KERNEL, build, content_id, read_settings, sources  # noqa: E402
from publish_kernel import check_name, publish, stage  # noqa: E402

# what reads and checks metadata; a package of its own up to kernels 0.16
DATA = importlib.import_module("kernels._rust" if importlib.util.find_spec("kernels._rust") else "kernels_data")
since_kernels_17 = pytest.mark.skipif(not hasattr(DATA, "Build"), reason="kernels 0.17 brought it")
BACKENDS = ["cpu", "cuda", "rocm"]
# what a build adds to the sources or changes in them
OF_THE_BUILD = {"_ops.py", "metadata.json", "mala/__init__.py"}


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    build(folder := tmp_path_factory.mktemp("build"))
    return folder


@pytest.fixture(params=BACKENDS)
def variant(request, built) -> Path:
    return built / f"torch-{request.param}"


def test_there_is_a_build_for_each_backend_and_a_card(built):
    assert sorted(path.name for path in built.iterdir()) == ["CARD.md", *(f"torch-{name}" for name in BACKENDS)]


def test_a_build_holds_the_sources_byte_for_byte(variant):
    ours = {path.relative_to(KERNELS).as_posix(): path.read_bytes() for path in KERNELS.rglob("*.py")}
    theirs = files_in(variant)
    assert theirs.keys() - ours.keys() == OF_THE_BUILD - {"_ops.py"}
    assert [name for name in ours if theirs[name] != ours[name]] == ["_ops.py"]
    build_id = json.loads(theirs["metadata.json"])["id"]
    assert theirs["_ops.py"] == ours["_ops.py"].replace(b'"mala_hf"', f'"{build_id}"'.encode())


def test_a_build_imports_only_the_standard_library_torch_triton_and_itself(variant):
    for name, content in files_in(variant).items():
        for node in ast.walk(ast.parse(content)) if name.endswith(".py") else ():
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, f"{name} reaches outside"
                modules = [] if node.level else [node.module]
            for module in modules:
                assert module.split(".")[0] in {"torch", "triton"} | sys.stdlib_module_names, f"{name}: {module}"


def test_building_again_elsewhere_gives_the_same_bytes(built, tmp_path):
    copy = shutil.copytree(KERNEL, tmp_path / "copy", ignore=shutil.ignore_patterns("build", "__pycache__"))
    for path in copy.rglob("*"):
        os.utime(path, (0, 0))
    stale = tmp_path / "out" / "torch-xpu"
    stale.mkdir(parents=True)
    build(tmp_path / "out", copy)
    assert files_in(tmp_path / "out") == files_in(built)
    assert not stale.exists()


def test_the_identity_follows_the_content():
    files = sources(KERNEL)
    changed = [
        files | {"rule.py": files["rule.py"] + b"\n"},
        files | {"new.py": b""},
        {("rules.py" if name == "rule.py" else name): content for name, content in files.items()},
    ]
    assert len({content_id(one) for one in (files, dict(files), *changed)}) == 4


def test_the_metadata_is_what_kernels_reads(variant):
    Digest, DigestAlgorithm, Metadata = (getattr(DATA, name) for name in ("Digest", "DigestAlgorithm", "Metadata"))
    metadata = Metadata.read_from_file(variant / "metadata.json")
    settings = read_settings()["general"]
    assert (str(metadata.name), metadata.version, metadata.license) == ("mala", 1, PROJECT["license"])
    assert settings["version"] == 1, "transformers asks for version 1"
    assert metadata.id.isidentifier()
    assert variant.name.removeprefix("torch-") in metadata.id
    assert metadata.backend.archs == {"torch-cuda": ["8.0+PTX"], "torch-rocm": ["gfx942"]}.get(variant.name)
    assert metadata.python_depends == []
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    stored = json.loads((variant / "metadata.json").read_text())["digest"]["files"]
    assert stored["rule.py"] == base64.b64encode(hashlib.sha256((KERNELS / "rule.py").read_bytes()).digest()).decode()


@since_kernels_17
def test_build_toml_is_what_kernels_parses():
    assert sorted(str(backend).lower() for backend in DATA.Build.open(KERNEL).general.backends) == BACKENDS


def test_operators_are_registered_in_the_namespace_of_the_build(variant):
    """The check that kernel-builder runs on a source tree; decorators with arguments only, as there."""
    found = []
    for path in variant.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            for decorator in getattr(node, "decorator_list", []):
                if isinstance(decorator, ast.Call) and decorator.args and "torch.library" in ast.unparse(decorator):
                    found.append(ast.unparse(decorator.args[0]))
    assert len(found) == 3  # forward, backward, and what writes the INT8 plane of a cache
    assert all(name.startswith("add_op_namespace_prefix(") for name in found)


def test_a_build_needs_no_binary_interface_check(variant):
    """``kernel-builder check-abi`` looks at shared objects: there are none."""
    assert {Path(name).suffix for name in files_in(variant)} == {".py", ".json"}


def in_shell(*command, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


@since_kernels_17
def test_kernels_describes_the_artifact(hub_kernel):
    done = in_shell(sys.executable, "-c", "from kernels.cli import main; main()", "info", hub_kernel, "--json")
    assert done.returncode == 0, done.stderr
    described = json.loads(done.stdout)
    assert (described["name"], described["version"], described["backends"]) == ("mala", 1, BACKENDS)


def test_the_kernels_own_tests_pass_on_the_artifact(hub_kernel, tmp_path):
    done = in_shell(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", KERNEL / "tests",
        LOCAL_KERNELS=f"mala-hf/mala-flash-attn={hub_kernel}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_kernels_benchmark_runs_and_verifies(hub_kernel, tmp_path):
    pytest.importorskip("tabulate")
    command = ["benchmark", hub_kernel, "--iterations", "1", "--warmup", "0", "--output", tmp_path / "out.json"]
    done = in_shell(sys.executable, "-c", "from kernels.cli import main; main()", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    workloads = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {"Mala.decode_2048", "Mala.prefill_2048"} <= {one["workload"] for one in workloads}
    assert all(one["verified"] for one in workloads)


class Hub:
    """The calls that publishing makes of ``huggingface_hub.HfApi``."""

    def __init__(self):
        self.calls = []

    def whoami(self):
        return {"name": "me", "orgs": [{"name": "mine"}]}

    def __getattr__(self, name):
        return lambda **arguments: self.calls.append((name, arguments))


def test_publishing_uploads_builds_to_the_version_and_the_card_to_main(tmp_path):
    branches, hub = stage(tmp_path, "mine/a-flash-attn"), Hub()
    assert sorted(path.name for path in branches["v1"].iterdir()) == ["benchmarks", "build"]
    assert sorted(path.name for path in (branches["v1"] / "build").iterdir()) == [f"torch-{name}" for name in BACKENDS]
    card = (branches["main"] / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    assert 'get_kernel("mine/a-flash-attn", version=1' in card
    assert "mala-hf/mala-flash-attn" not in card
    publish(hub, "mine/a-flash-attn", branches)
    assert [name for name, _ in hub.calls] == ["create_repo", "upload_folder", "create_branch", "upload_folder"]
    assert {(call["repo_id"], call["repo_type"]) for _, call in hub.calls} == {("mine/a-flash-attn", "kernel")}
    uploads = {call["revision"]: call for name, call in hub.calls if name == "upload_folder"}
    assert uploads["main"]["folder_path"] == branches["main"]
    assert uploads["main"]["delete_patterns"] is None
    assert uploads["v1"]["folder_path"] == branches["v1"]
    assert uploads["v1"]["delete_patterns"] == ["build/**", "benchmarks/**"]


def test_publishing_to_somebody_else_s_repository_is_refused_before_anything_is_made(tmp_path):
    hub = Hub()
    with pytest.raises(PermissionError, match="me, mine"):
        publish(hub, "theirs/a-flash-attn", {})
    assert hub.calls == []


@pytest.mark.parametrize("name", ["mala-flash-attn", "me/mala", "me/mala-flash-attn3", "me/flash-attn-h200", "me2/x"])
def test_a_name_that_transformers_would_misread_is_refused(name):
    with pytest.raises(ValueError, match="OWNER/NAME"):
        check_name(name)


def test_publishing_uploads_nothing_unless_asked_and_needs_a_token(tmp_path):
    script = ROOT / "scripts" / "publish_kernel.py"
    nothing = {"HF_TOKEN": "", "HF_HOME": str(tmp_path)}
    dry = in_shell(sys.executable, script, "me/mala-flash-attn", **nothing)
    assert dry.returncode == 0, dry.stderr
    assert "build/torch-cuda/rule.py" in dry.stdout
    assert dry.stdout.splitlines()[-1] == "nothing was uploaded to me/mala-flash-attn: add --upload"
    refused = in_shell(sys.executable, script, "me/mala-flash-attn", "--upload", **nothing)
    assert refused.returncode == 2
    assert "uploading needs a token" in refused.stderr.splitlines()[-1]

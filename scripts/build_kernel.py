# SPDX-License-Identifier: Apache-2.0
"""Build the Kernel Hub artifact from kernels_hub/mala: one folder per backend, the same bytes on every machine, without Nix.

    python scripts/build_kernel.py                  # into kernels_hub/mala/build
    python scripts/build_kernel.py --output FOLDER

A build holds the sources as they are, but for the namespace of their operators: each build has its own, derived from its content, so
that two builds in one process do not clash.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KERNEL = Path(__file__).resolve().parent.parent / "kernels_hub" / "mala"
CARD = "CARD.md"
NAMESPACE = 'NAMESPACE = "{}"\n'
OURS = "mala_hf"  # the namespace of the sources in place

# old releases of kernels import the folder inside the build; both ways give one module
INNER_PACKAGE = '''\
"""The package around this folder, for old releases of kernels."""

import importlib.util
import sys
from pathlib import Path

_NAME = "{id}"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).parent.parent / "__init__.py")
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])
globals().update({{name: getattr(sys.modules[_NAME], name) for name in sys.modules[_NAME].__all__}})
'''


def read_settings(kernel: Path = KERNEL) -> dict[str, Any]:
    """What build.toml says."""
    return tomllib.loads((kernel / "build.toml").read_text("utf-8"))


def sources(kernel: Path) -> dict[str, bytes]:
    """Content of each source file by its path inside the package, in order."""
    package = kernel / "torch-ext" / python_name(read_settings(kernel))
    files = sorted(path for path in package.rglob("*.py") if "__pycache__" not in path.parts)
    return {path.relative_to(package).as_posix(): path.read_bytes() for path in files}


def python_name(settings: dict[str, Any]) -> str:
    """Name of the package, which is that of the kernel but for dashes."""
    return settings["general"]["name"].replace("-", "_")


def content_id(files: dict[str, bytes]) -> str:
    """Twelve hexadecimal digits that change with any name or byte."""
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def variant_files(settings: dict[str, Any], files: dict[str, bytes], backend: str) -> dict[str, bytes]:
    """Every file of one backend's build."""
    name = python_name(settings)
    build_id = f"_{name}_{backend}_{content_id(files)}"
    ops = files["_ops.py"].decode()
    if ops.count(NAMESPACE.format(OURS)) != 1:
        raise ValueError(f"_ops.py must set {NAMESPACE.format(OURS).strip()} once: a build replaces that line")
    built = dict(files)
    built["_ops.py"] = ops.replace(NAMESPACE.format(OURS), NAMESPACE.format(build_id)).encode()
    built[f"{name}/__init__.py"] = INNER_PACKAGE.format(id=build_id).encode()
    built["metadata.json"] = (json.dumps(metadata(settings, built, backend, build_id), indent=2) + "\n").encode()
    return built


def metadata(settings: dict[str, Any], files: dict[str, bytes], backend: str, build_id: str) -> dict[str, Any]:
    """metadata.json, which says what a build is, for whom, and the digest of each file."""
    general, noarch = settings["general"], settings["torch-noarch"]
    archs = noarch.get({"cuda": "cuda_capabilities", "rocm": "rocm_archs"}.get(backend, ""))
    digests = {name: base64.b64encode(hashlib.sha256(files[name]).digest()).decode() for name in sorted(files)}
    return {
        "id": build_id,
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": backend} | ({"archs": archs} if archs else {}),
        "digest": {"algorithm": "sha256", "files": digests},
    }


def build(output: Path, kernel: Path = KERNEL) -> list[Path]:
    """Write the builds of all backends of build.toml, and the card, into ``output``; what was there before goes.

    Returns the folders of the builds, ``output/torch-<backend>``.
    """
    settings, files = read_settings(kernel), sources(kernel)
    folders = [output / f"torch-{backend}" for backend in sorted(settings["general"]["backends"])]
    for stale in output.glob("torch-*"):
        shutil.rmtree(stale)
    for folder in folders:
        for name, content in variant_files(settings, files, folder.name.removeprefix("torch-")).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    shutil.copyfile(kernel / CARD, output / CARD)
    return folders


def main() -> None:
    """Build, and say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=KERNEL / "build", help="folder of the builds (%(default)s)")
    for folder in build(parser.parse_args().output):
        print(folder)


if __name__ == "__main__":
    main()

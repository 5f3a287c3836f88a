# SPDX-License-Identifier: Apache-2.0
"""Imports point one way, stay within what each layer may use, and every third-party one is declared."""

import ast
import functools
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from project import KERNELS, PROJECT, ROOT


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
    return sorted(path for path in folder.rglob("*.py") if not {"__pycache__", "build"} & set(path.parts))


PACKAGE = sorted((ROOT / "mala_hf").rglob("*.py"))
OUTSIDE_OPS = {"torch", "triton"}

# file -> what it may import of its own folder; files not named are Triton kernels and their launchers, which may import
# one another and all in PLAIN
PLAIN = {
    "_ops": set(),
    "reference": set(),
    "rule": set(),
    "work": set(),
    "visibility": set(),
    "support_bits": set(),
    "tile_config": set(),
    "query_tile": {"visibility"},
    "blockwise": {"query_tile", "support_bits", "visibility", "work"},
    "key_plane": set(),
    "reference_decode": {"key_plane", "reference"},
    "decode_blockwise": {"blockwise", "key_plane", "query_tile", "visibility", "work"},
}
LAYERS = {
    **PLAIN,
    "operators": {*PLAIN, "backward", "decode", "forward"},
    "support_reuse": set(),
    "choice_memory": {"query_tile", "visibility", "work"},
    "cudnn_plans": {"choice_memory"},
    "dense": {*PLAIN, "cudnn_plans", "program_order"},
    "discover_choice": {*PLAIN, "choice_memory", "cudnn_plans", "discover_probe"},
    "attend": {*PLAIN, "choice_memory", "dense", "discover_choice", "operators", "support_reuse"},
    "checks": set(),
    "call_options": {*PLAIN, "checks"},
    "decode_choice": {
        *PLAIN,
        "attend",
        "choice_memory",
        "cudnn_plans",
        "dense",
        "discover_choice",
        "discover_probe",
        "support_reuse",
    },
    "key_plane_write": {*PLAIN, "call_options", "checks", "key_plane_kernel", "operators"},
    "paged": {"checks"},
    "interface": {*PLAIN, "attend", "call_options", "checks", "decode_choice", "dense"},
    "kvcache": {*PLAIN, "attend", "call_options", "checks", "decode_choice", "key_plane_write", "paged"},
    "packed_steps": {"interface", "kvcache"},
    "flash_attn_interface": {"checks", "interface", "kvcache", "packed_steps"},
    "hf_mask": set(),
    "hf_dense": {"hf_mask", "visibility"},
    "hf_settings": {"checks", "work"},
    "hf_heads": {"hf_settings", "work"},
    "hf_visible": {"hf_dense", "hf_mask"},
    "hf": {
        "choice_memory",
        "decode_choice",
        "hf_dense",
        "hf_heads",
        "hf_mask",
        "hf_settings",
        "hf_visible",
        "interface",
        "key_plane",
        "packed_steps",
        "work",
    },
    "__init__": {
        "flash_attn_interface",
        "interface",
        "key_plane",
        "key_plane_write",
        "kvcache",
        "support_reuse",
        "work",
    },
}


@pytest.mark.parametrize("path", python_files(KERNELS), ids=lambda path: path.name)
def test_kernels_import_only_the_standard_library_torch_triton_and_one_another(path):
    for module in imports_of(path):
        if not module.startswith("."):
            assert top_level(module) in OUTSIDE_OPS | sys.stdlib_module_names, f"{path.name} imports {module}"
        else:
            assert not module.startswith("..") or path.parent != KERNELS, f"{path.name} imports {module} from outside"


@pytest.mark.parametrize("path", python_files(KERNELS), ids=lambda path: path.name)
def test_kernel_layers_point_one_way(path):
    ours = {module.lstrip(".").split(".")[0] for module in imports_of(path) if module.startswith(".")}
    kernels = {path.stem for path in python_files(KERNELS)} - LAYERS.keys()
    allowed = LAYERS.get(path.stem, {*PLAIN, *kernels})
    assert ours <= allowed, f"{path.stem} imports {ours - allowed}"


def test_every_named_layer_is_a_file():
    assert LAYERS.keys() <= {path.stem for path in python_files(KERNELS)}


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


# modules behind a command that asks for its extra first, and a folder that nothing else imports
BEHIND_EXTRAS = {
    "convert_evidence": "demo",
    "convert_ruler": "demo",
    "demo": "demo",
    "report": "demo",
    "checkpoint": "demo",
    "cli": "demo",
    "documents": "eval",
    "ruler": "eval",
    "hub": "hub",
    "lm_eval": "eval",
    "sequence_parallel": "ulysses",
}


@pytest.mark.parametrize("path", [*PACKAGE, *python_files(KERNELS)], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_third_party_import_is_declared(path):
    extra = BEHIND_EXTRAS.get(path.stem if path.parent.name == "mala_hf" else path.parent.name)
    allowed = declared(*([] if extra is None else [extra]))
    for module in imports_of(path):
        if not module.startswith(".") and top_level(module) not in sys.stdlib_module_names:
            assert distributions_of(module) & allowed, f"{path.name} imports {module}, which is not declared"


def test_every_file_names_its_licence():
    unnamed = [
        path.name
        for folder in (ROOT / "mala_hf", ROOT / "kernels_hub", ROOT / "tests", ROOT / "scripts")
        for path in python_files(folder)
        if not path.read_text("utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n")
    ]
    assert unnamed == []

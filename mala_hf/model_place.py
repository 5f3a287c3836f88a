# SPDX-License-Identifier: Apache-2.0
"""Where a model is to come from, a folder or the hub, looked at before anything is loaded; every error is one line with the way out."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG = "config.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def one_line(error: BaseException) -> str:
    """The whole message of an error on one line; its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def check_model(name: str | Path, *, ask_hub: bool = True) -> None:
    """Raise for what cannot be a model to load.

    ``ValueError`` for a folder that holds none, and for a file; ``FileNotFoundError`` for a folder that is not there; ``OSError`` for
    a name that the hub does not give. The hub is asked once, and only for a name that its cache lacks; not without ``ask_hub``.
    """
    folder = Path(name)
    if not folder.is_dir():
        _check_elsewhere(name, "model", CONFIG, ask_hub)
        return
    if not (folder / CONFIG).is_file():
        raise ValueError(no_config(folder, str(name)))
    files = sorted(path.name for path in folder.iterdir())
    if not any(one.endswith(WEIGHTS) or one.endswith(".index.json") for one in files):
        raise ValueError(f"no weights in {name}, only {', '.join(files[:5])}{', ...' if len(files) > 5 else ''}")


def no_config(folder: Path, name: str) -> str:
    """Why a folder, called ``name``, without ``config.json`` is no model, and what to do."""
    files = sorted(path.name for path in folder.iterdir())
    packed = [one for one in files if one.endswith(".gguf")]
    if "adapter_config.json" in files:
        return f"no {CONFIG} in {name}: an adapter; merge it into its model first"
    if packed:
        return f"no {CONFIG} in {name}: unpack its GGUF file first, mala-hf convert {folder / packed[0]} OUT"
    held = "the folder is empty" if not files else f"it holds {', '.join(files[:3])}{', ...' if len(files) > 3 else ''}"
    return f"no {CONFIG} in {name}, {held}: give the folder that a model was saved to, or its name on the hub"


def check_tokenizer(name: str | Path) -> None:
    """Raise, as ``check_model`` does, for what cannot be a tokenizer to load."""
    folder = Path(name)
    if not folder.is_dir():
        _check_elsewhere(name, "tokenizer", "tokenizer_config.json")
    elif not any(folder.iterdir()):
        raise ValueError(f"the folder {name} is empty: give one that a tokenizer was saved to")


def check_hub(name: str, file: str = CONFIG, revision: str | None = None) -> None:
    """Ask the hub once for a file of ``name``, unless its cache has the file; ``OSError`` if the name cannot be had.

    That the hub has the name, but not the file, and that it is busy, are no errors here: who loads it next finds out.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(huggingface_hub.try_to_load_from_cache(name, file, revision=revision), str):
        return
    with hub_errors(name, revision):
        try:
            huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, file, revision=revision))
        except HfHubHTTPError as error:
            if _is_about_the_name(error):
                raise


def hub_answers(seconds: float = 5) -> bool:
    """Whether the hub can be reached; without waiting for the retries of a download."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    request = urllib.request.Request(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=seconds):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@contextmanager
def hub_errors(name: str, revision: str | None = None) -> Iterator[None]:
    """Inside, what the hub answers and a network that does not are raised as an ``OSError`` of one line: the name, and what to do."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise OSError(
            f"{name} is gated: accept its terms on its page of the hub, then log in (hf auth login)"
        ) from error
    except RevisionNotFoundError as error:
        raise OSError(f"{name} has no revision {revision} on the hub") from error
    except RepositoryNotFoundError as error:
        raise OSError(
            f"the hub has no model {name}, or it is private: check the name, log in (hf auth login), or give a folder"
        ) from error
    except Exception as error:  # each network library has errors of its own, which share no class
        raise OSError(
            f"cannot get {name}: it is no folder here, not in the cache, and the hub does not give it ({one_line(error)}); "
            "without a network give a folder that holds the model"
        ) from error


@contextmanager
def loading_errors(name: str | Path, what: str) -> Iterator[None]:
    """Inside, errors of Transformers that are an ``OSError`` or ``ValueError`` get one line that names what could not be loaded."""
    try:
        yield
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"cannot load the {what} of {name}: {one_line(error)}") from error


def _check_elsewhere(name: str | Path, what: str, file: str, ask_hub: bool = True) -> None:
    text, is_packed = str(name), str(name).endswith(".gguf")
    if Path(name).exists():
        way = f"make a folder of it with mala-hf convert {text} OUT" if is_packed else f"give the folder of the {what}"
        raise ValueError(f"{text} is a file: {way}")
    if is_packed or not HUB_NAME.fullmatch(text):
        raise FileNotFoundError(f"{text}: no such folder, and no name of the hub, which is ORGANISATION/NAME")
    if ask_hub:
        check_hub(text, file)


def _is_about_the_name(error: Exception) -> bool:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error, (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError))

# SPDX-License-Identifier: Apache-2.0
"""An existing checkpoint becomes a MALA checkpoint: the same weights, settings in its config, and the evidence of what they do."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from .checkpoint import check_device, load_model
from .config import MalaConfig
from .convert_bench import Bench, Evidence
from .convert_config import MODELING, attention_choice, auto_map_of, converted_config
from .convert_evidence import gather, taus_in
from .convert_gguf import check_named, gguf_name, gguf_place, is_gguf, unpack_gguf
from .convert_output import bytes_to_copy, check_output, check_room, work_folder, write_checkpoint
from .convert_report import FOLDER, card_with_section, report_files
from .convert_ruler import draw_ruler
from .convert_search import TauSearch
from .convert_source import CONFIG, Source, open_source, read_folder
from .convert_store import Measurements
from .convert_tuning import search_taus
from .extras import require_packages
from .info import device_name, versions
from .patch import patch_model
from .quiet import quietly
from .text import read_text

FORMAT = "mala-hf conversion 1"
CARD = "README.md"


def tell(message: str) -> None:
    """Tell the user, on stderr, what is going on."""
    print(f"mala-hf: {message}", file=sys.stderr)


def convert(
    checkpoint: str | Path,
    output: str | Path,
    config: MalaConfig | None = None,
    *,
    search: TauSearch | None = None,
    evidence: Evidence | None = None,
    auto_map: bool = False,
    link: bool = True,
    trust_remote_code: bool = False,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    dry_run: bool = False,
    quiet: bool = False,
    say: Callable[[str], None] = tell,
) -> dict[str, Any]:
    """Write the checkpoint with MALA's settings into the new folder ``output``, and return the report (JSON types) that lies in it.

    The output appears when everything in it is finished. What was measured until then is kept in a hidden folder beside it, so that
    the same call goes on after it was stopped; that folder is gone when the output is there.

    Args:
        checkpoint: a folder with safetensors, a name of the hub (``org/name`` or ``org/name@revision``), a GGUF file, which is
            unpacked to float32, or "smollm2" for the offline checkpoint.
        config: the settings, by default tau 1 in all layers; taus and "sdpa" of layers and heads.
        search: choose a tau for each layer under this budget, in place of ``config``.
        evidence: on what to measure before and after.
        auto_map: let ``trust_remote_code=True`` alone load it with MALA, through a module that imports this package.
        link: hard-link the weights where the file system can, so that they take no room. A file that is linked is one file: what
            writes into it changes both checkpoints.
        trust_remote_code: run code that comes with the checkpoint; it is carried along in any case.
        device, dtype: to measure on, as ``checkpoint.load_model`` chooses by default. The weights stay as they are.
        dry_run: check the checkpoint and return the plan; no weights are loaded or downloaded, and nothing is written.
        say: is told what is going on; ``quiet``: without progress bars, and without warnings of Transformers.

    Raises:
        FileExistsError: if the output is there already.
        OSError: for a name or folder that cannot be had, and a full disk; nothing that was finished is lost.
        ValueError: for a checkpoint that is damaged, has no safetensors or cannot run MALA, and for settings that do not fit it.
        ImportError: without the packages of the extra ``demo``, or for RULER ``eval``.
    """
    output, evidence = Path(output), Evidence() if evidence is None else evidence
    settings = MalaConfig() if config is None else config
    if config is not None and search is not None:
        raise ValueError("give settings or a search for them, not both")
    if settings.tile is not None:
        raise ValueError(
            f"a conversion measures the shipped tiles, which fit each device: leave out tile={settings.tile}"
        )
    place = check_device(device)
    _check_measurable(settings, place)
    check_output(output)
    text, text_name = read_text(evidence.text)
    check_named(str(checkpoint))
    if evidence.ruler_samples:
        require_packages("eval", ("numpy", "wonderwords"), instead="leave RULER out (--ruler 0, ruler_samples=0)")
    work = work_folder(output)
    with quietly(quiet):
        source, model_config = _open(
            str(checkpoint), work, unpack=not dry_run, trust_remote_code=trust_remote_code, say=say
        )
    full_attention = _check_model(model_config, settings, trust_remote_code)
    length = evidence.length_for(model_config, place)
    modules = auto_map_of(model_config) if auto_map else None
    to_copy = bytes_to_copy(source, output, link=link)
    finished = len(list(work.glob("*.json")))
    if dry_run:
        return {
            "model": source.name,
            "settings": None if search else settings.to_dict(),
            "search": asdict(search) if search else None,
            "evidence": asdict(evidence) | {"text": text_name, "length": length},
            "auto_map": modules[0] if modules else None,
            "weights": list(source.weights),
            "bytes": source.bytes_of(source.weights),
            "bytes_to_copy": to_copy,
            "others": list(source.others),
            "left_out": list(source.left_out),
            "finished_measurements": finished,
        }
    check_room(to_copy, output)
    if source.left_out:
        say(f"left out, weights in other forms: {', '.join(source.left_out)}")
    if finished:
        say(f"{finished} measurements of an earlier run are here; those with the same settings are used")
    with quietly(quiet):
        model, tokenizer = load_model(
            str(source.folder),
            attn_implementation=full_attention,
            device=place,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    facts = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "versions": versions(),
        "full_attention": full_attention,
        "length": length,
        "windows": evidence.windows,
    }
    made_with = facts | {"source": source.fingerprint(), "text": sha256(text.encode()).hexdigest()}
    parts = 2 if search else 1  # of the text: one to choose on, and one for the evidence
    bench = Bench.open(model, tokenizer, text, Measurements(work, made_with), parts=parts, say=say, quiet=quiet)
    if evidence.ruler_samples:
        draw_ruler(bench, evidence)
    settings, found = search_taus(bench, search) if search else (settings, None)
    measured = gather(bench, settings, evidence, source.name, part=parts - 1)
    report = {
        "format": FORMAT, "model": source.name, "settings": settings.to_dict(), "text": text_name,
        **facts, "search": found, **measured,
    }  # fmt: skip
    texts = report_files(report) | _changed_files(source, model_config, settings, modules, report)
    done = write_checkpoint(source, output, texts, link=link)
    say(f"{output}: {done['linked']} weight files linked, {done['copied']} copied")
    shutil.rmtree(work, ignore_errors=True)
    return report


def _open(
    checkpoint: str, work: Path, *, unpack: bool, trust_remote_code: bool, say: Callable[[str], None]
) -> tuple[Source, Any]:
    """Return the source, and its config as Transformers reads it. unpack: else nothing is unpacked, and no weights are downloaded."""
    from transformers import AutoConfig

    unpacked = work / "unpacked"
    if not is_gguf(checkpoint):
        source = open_source(checkpoint, download=unpack)
    elif unpacked.exists() or unpack:
        if not unpacked.exists():
            say(f"unpacking {gguf_name(checkpoint)} to float32")
            work.mkdir(exist_ok=True)
            unpack_gguf(checkpoint, unpacked)
        source = read_folder(unpacked, gguf_name(checkpoint))
    else:
        place, arguments = gguf_place(checkpoint)
        packed = arguments["gguf_file"]
        source = Source(place, gguf_name(checkpoint), {}, weights=(packed,), others=(), left_out=())
        return source, AutoConfig.from_pretrained(place, gguf_file=packed)
    source = replace(source, others=tuple(one for one in source.others if not one.startswith(f"{FOLDER}/")))
    return source, AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)


def _check_measurable(settings: MalaConfig, place: torch.device) -> None:
    """Raise ``ValueError`` for settings that what measures them cannot run on this device."""
    if settings.discovery == "int8" and place.type != "cuda":
        raise ValueError(
            f"discovery='int8' is measured on a GPU, and this is {place}: choose another --device, or --discovery auto"
        )


def _check_model(model_config: Any, settings: MalaConfig, trust_remote_code: bool) -> str:
    """Return the attention that a model of this config runs by itself: "sdpa", or "eager" where it has no other.

    Raises ``ValueError`` unless it can run MALA with the settings. It is built without memory.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(model_config), trust_remote_code=trust_remote_code)
    full_attention: str = model.config.get_text_config()._attn_implementation
    patch_model(model, replace(settings, kernel=None))
    taus_in(settings, model_config.get_text_config())
    return full_attention


def _changed_files(
    source: Source,
    model_config: Any,
    settings: MalaConfig,
    modules: tuple[dict[str, str], str] | None,
    report: dict[str, Any],
) -> dict[str, str]:
    """Return ``config.json``, the model card, and the module of ``auto_map`` if there is one."""
    raw = converted_config(source.config, model_config, settings)
    card = (source.folder / CARD).read_text("utf-8") if CARD in source.others else None
    choice = json.dumps(attention_choice(model_config))
    argument = f"attn_implementation={choice}" if modules is None else "trust_remote_code=True"
    files = {CARD: card_with_section(card, report, argument)}
    if modules is not None:
        raw["auto_map"] = raw.get("auto_map", {}) | modules[0]
        files[f"{MODELING}.py"] = modules[1]
    return files | {CONFIG: json.dumps(raw, indent=2, ensure_ascii=False) + "\n"}

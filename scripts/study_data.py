# SPDX-License-Identifier: Apache-2.0
"""A folder of token ids that a study trains and evaluates on: prepared once, small enough to travel, read everywhere alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mala_hf.checkpoint import load_tokenizer
from mala_hf.ruler.sample_file import fingerprint
from mala_hf.windows import tokenize

TOKENS, ABOUT, TOKENIZER = "tokens.safetensors", "about.json", "tokenizer"
TRAIN = "train"


def write_data(
    folder: Path, tokenizer: Any, train: Sequence[str], held_out: Mapping[str, str], sources: Any
) -> dict[str, Any]:
    """Tokenise documents to train on, one after another, and named texts to evaluate on; store them, the tokenizer and what they are.

    sources: what the texts are, in JSON types. Returns what ``about.json`` says: it, and number and sha256 of each text's tokens.
    """
    parts = {TRAIN: torch.cat([tokenize(tokenizer, text) for text in train])}
    parts |= {name: tokenize(tokenizer, text) for name, text in held_out.items()}
    dtype = torch.uint16 if len(tokenizer) <= 1 << 16 else torch.int32
    tokens = {name: ids.to(dtype) for name, ids in parts.items()}
    about = {
        "sources": sources,
        "tokenizer": fingerprint(tokenizer),
        "tokens": {name: len(ids) for name, ids in tokens.items()},
        "sha256": {name: hashlib.sha256(ids.numpy().tobytes()).hexdigest() for name, ids in tokens.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tokens, folder / TOKENS)
    tokenizer.save_pretrained(folder / TOKENIZER)
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return about


def read_data(folder: Path) -> tuple[dict[str, Tensor], Any, dict[str, Any]]:
    """Return ids (n,) int64 by name, the tokenizer and what ``about.json`` says.

    Raises ``ValueError`` for a folder that was not prepared, or whose tokenizer came out another here.
    """
    missing = [name for name in (TOKENS, ABOUT, TOKENIZER) if not (folder / name).exists()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}: make it with --prepare")
    about = json.loads((folder / ABOUT).read_text("utf-8"))
    tokenizer = load_tokenizer(str(folder / TOKENIZER))
    if fingerprint(tokenizer) != about["tokenizer"]:
        raise ValueError(
            f"the tokenizer in {folder} reads differently here: {fingerprint(tokenizer)}, {about['tokenizer']}"
        )
    return {name: ids.long() for name, ids in load_file(folder / TOKENS).items()}, tokenizer, about


def windows_of(ids: Tensor, seqlen: int, count: int | None = None) -> Tensor:
    """The first ``count`` whole windows (n, seqlen) of ids (n,), by default all. ``ValueError`` for fewer, or none."""
    windows = ids[: len(ids) // seqlen * seqlen].view(-1, seqlen)
    if len(windows) < (count or 1):
        raise ValueError(f"{len(ids)} tokens are {len(windows)} windows of {seqlen}, fewer than {count or 1}")
    return windows[:count]

# SPDX-License-Identifier: Apache-2.0
"""Fine-tune one real model with each of several attentions, from the same weights and on the same batches; write JSON.

    python scripts/train_compare.py --attn sdpa eager mala --steps 300 --seqlen 2048 --output results/training_h200.json

An attention is "sdpa", "eager" or "mala", the last with fields of MalaConfig if wanted: mala:tau=10 or mala:tau=0,tile=[64,64].
The first one is what the others are compared with; "eager" among them shows how far two exact attentions drift apart.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training_runs import Attention, Settings, compare, text_windows

from mala_hf.checkpoint import OFFLINE_MODEL, load_model
from mala_hf.info import checked_out_commit, device_name, versions
from mala_hf.perplexity import check_positions
from mala_hf.text import read_text


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attn", nargs="+", required=True, metavar="ATTENTION")
    parser.add_argument("--model", help="Hub name or folder (default: SmolLM2-135M-Instruct from the package index)")
    parser.add_argument("--text", help="UTF-8 text, plain or .gz (default: the novel Persuasion)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step (default: 4)")
    parser.add_argument("--seqlen", type=int, default=2048, help="tokens a sequence (default: 2048)")
    parser.add_argument("--held-out", type=int, default=8, help="sequences at the end of the text (default: 8)")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    parser.add_argument("--commit", help="commit to record; default: that of this checkout")
    parser.add_argument("--output", type=Path, required=True)
    return parser


def run(options: argparse.Namespace) -> None:
    """Train with every attention and write the file after each."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(
        steps=options.steps,
        batch=options.batch,
        seqlen=options.seqlen,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        dtype=options.dtype or ("bfloat16" if device == "cuda" else "float32"),
        seed=options.seed,
    )
    attentions = [Attention.parse(label) for label in options.attn]
    if len(set(options.attn)) < max(len(attentions), 2):
        raise ValueError(f"--attn needs at least two attentions that differ, got {' '.join(options.attn)}")
    if device == "cuda" and torch.cuda.device_count() > 1:
        raise ValueError("several GPUs are visible and one is used: set CUDA_VISIBLE_DEVICES")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    text, text_name = read_text(options.text)
    model, tokenizer = load_model(options.model, device=device, dtype=torch.float32)
    check_positions(model, settings.seqlen)
    train, held_out = text_windows(tokenizer, text, settings.seqlen, options.held_out)
    result = {
        "device": device_name(model.device),
        "commit": options.commit or checked_out_commit(),
        "versions": versions(),
        "model": Path(options.model).name if options.model else OFFLINE_MODEL,
        "data": {
            "text": text_name,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "train_windows": len(train),
            "held_out_windows": len(held_out),
        },
        "settings": asdict(settings),
        "runs": [],
    }
    for found in compare(model, train, held_out, attentions, settings):
        result["runs"].append(found)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        print(
            f"{found['attention']:<16} {found['seconds']:.1f} s  held-out loss {found['held_out_before']['sdpa']:.4f} -> "
            f"{found['held_out_after']['sdpa']:.4f}  work {found['work_before']['work_fraction']:.1%} -> "
            f"{found['work_after']['work_fraction']:.1%}",
            flush=True,
        )


def main() -> None:
    options = build_parser().parse_args()
    try:
        run(options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"train_compare.py: {error}") from error


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Study 2, operator fidelity: work of forward and backward, omitted mass, errors of output, dQ, dK and dV by length; write JSON.

    python scripts/study_fidelity.py --output results/study_fidelity.json
    python scripts/study_fidelity.py --small --model FOLDER --output fidelity.json

The operator gets every layer's real inputs, and the gradient of the language-model loss by that layer's output, from a pass with full
attention; it is compared with full attention in float32 on the same inputs. Tau 0 is full attention in the same precision: its errors
are rounding. Every length has as many windows as make up ``--tokens``, at least one; lengths beyond the model's positions run under
YaRN. A run that was stopped goes on when the same command is given again.
"""

from __future__ import annotations

from typing import Any

from study_command import Budget, finish, loaded, parsed, parser_of, store_of
from transformers import AutoConfig

from mala_hf.checkpoint import GGUF_CONTEXT
from mala_hf.studies.activations import text_windows
from mala_hf.studies.operator_fidelity import fidelity_rows, layer_steps
from mala_hf.text import read_text

SIZES = {
    "lengths": ((1024, 2048, 4096, 8192, 16384, 32768), (256, 512)),
    "taus": ((0.0, 1.0), (0.0, 1.0)),
    "tokens": (8192, 512),
    "dtypes": (("float32", "bfloat16"), ("float32",)),
}


def positions_of(name: str | None) -> int:
    """How many tokens a model was trained for."""
    return GGUF_CONTEXT if name is None else AutoConfig.from_pretrained(name).max_position_embeddings


def scaling_of(length: int, positions: int) -> dict[str, Any] | None:
    """YaRN that reaches the length, or nothing."""
    return None if length <= positions else {"rope_type": "yarn", "factor": length / positions}


def main() -> None:
    """Measure every length in every precision, one model load for each kind of positions."""
    options = parsed(parser_of(__doc__, SIZES), SIZES)
    budget = Budget(options)
    store = store_of(options, taus=options.taus, tokens=options.tokens)
    text, _ = read_text(options.text)
    positions = positions_of(options.model)
    model, ready = None, None
    for dtype in options.dtypes:
        seconds = 0.0  # of the last window, which is no longer than the next
        for length in options.lengths:
            scaling, windows = scaling_of(length, positions), max(1, options.tokens // length)
            for number in range(windows):
                part = f"{length:,} tokens, {dtype}, window {number}"
                if store.has(length=length, dtype=dtype, window=number) or not budget.allows(part, seconds):
                    continue
                if ready != (dtype, scaling):
                    model, tokenizer = loaded(options, dtype, rope_scaling=scaling)
                    ready = dtype, scaling
                ids = text_windows(tokenizer, text, length, windows)[number]
                rows = fidelity_rows(layer_steps(model, ids), options.taus)
                place = {"length": length, "dtype": dtype, "window": number, "yarn": scaling and scaling["factor"]}
                store.append(place | row for row in rows)
                seconds = budget.took(part)
    finish(options, store, budget.not_run)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Study 1, matched-work allocation: what is omitted when the same post-score work is allocated in different ways; write JSON.

    python scripts/study_allocation.py --output results/study_allocation.json
    python scripts/study_allocation.py --small --model FOLDER --output allocation.json

MALA runs at each tau on windows of a text; position-only budgets, budgets by layer, head and position, and a reference-mass oracle that
sees each window get exactly as many tiles (``mala_hf/studies/allocation.py``). The budgets are averages over as many other windows of
the same text. Everything is float32. A run that was stopped goes on when the same command is given again.
"""

from __future__ import annotations

from study_command import Budget, finish, loaded, parsed, parser_of, store_of

from mala_hf.studies.activations import text_windows
from mala_hf.studies.matched_work import matched_work, typical_budgets
from mala_hf.text import read_text

SIZES = {
    "lengths": ((2048, 8192), (256,)),
    "taus": ((1.0, 10.0, 100.0, 1000.0), (1.0, 100.0)),
    "tile": ((64, 128), (16, 32)),
    "windows": (3, 1),
}


def main() -> None:
    """Measure every window of every length."""
    options = parsed(parser_of(__doc__, SIZES), SIZES)
    budget = Budget(options)
    store = store_of(options, taus=options.taus, tile=options.tile, windows=options.windows)
    model, tokenizer = loaded(options)
    text, _ = read_text(options.text)
    for length in options.lengths:
        windows = text_windows(tokenizer, text, length, 2 * options.windows)
        typical = None
        for number, ids in enumerate(windows[::2]):
            part = f"{length:,} tokens, window {number}"
            if store.has(length=length, window=number) or not budget.allows(part):
                continue
            if typical is None:
                typical = typical_budgets(model, windows[1::2], options.taus, options.tile)
            rows = matched_work(model, ids, options.taus, options.tile, typical)
            store.append({"length": length, "window": number, **row} for row in rows)
            budget.took(part)
    finish(options, store, budget.not_run)


if __name__ == "__main__":
    main()

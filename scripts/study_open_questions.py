# SPDX-License-Identifier: Apache-2.0
"""Study 7, what the paper left open: visiting orders, splits, tiles of few keys, tau by layer and head, certified bounds; write JSON.

    python scripts/study_open_questions.py --output results/study_open_questions.json
    python scripts/study_open_questions.py --small --model FOLDER --output open.json

Each variant replaces attention in every layer and is compared with full attention: layer by layer on the same inputs, and by what the
model predicts. The taus of layers and heads are chosen on a window that no other figure uses. Then decode: the forms of its test,
for new tokens in the second half of each window. Everything is float32. A run that was stopped goes on when the same command is
given again.
"""

from __future__ import annotations

from study_command import Budget, finish, loaded, parsed, parser_of, store_of

from mala_hf.studies.activations import text_windows
from mala_hf.studies.decode_forms import decode_rows
from mala_hf.studies.open_questions import Baseline, Variant, head_points, measure, path_variants, variants_of
from mala_hf.text import read_text

SIZES = {
    "length": (8192, 256),
    "taus": ((1.0, 3.0, 10.0, 30.0, 100.0), (1.0, 10.0, 100.0)),
    "bounds": ((0.003, 0.03, 0.1, 0.3), (0.1,)),
    "tile": ((64, 128), (16, 32)),
    "windows": (2, 1),
    "steps": (5, 2),
    "places": (16, 4),
}


def main() -> None:
    """Measure every variant on every window."""
    options = parsed(parser_of(__doc__, SIZES), SIZES)
    budget = Budget(options)
    settings = {name: getattr(options, name) for name in SIZES}
    store = store_of(options, **settings)
    model, tokenizer = loaded(options)
    text, _ = read_text(options.text)
    first, *windows = text_windows(tokenizer, text, options.length, options.windows + 1)

    def run(variants: list[Variant]) -> None:
        for number, ids in enumerate(windows):
            baseline = None
            for variant in variants:
                part = f"window {number}, {variant.name} {variant.setting:g}"
                place = {"window": number, "variant": variant.name, "setting": variant.setting}
                if store.has(**place) or not budget.allows(part):
                    continue
                baseline = baseline or Baseline.of(model, ids)
                store.append([place | measure(model, baseline, variant)])
                budget.took(part)

    run(variants_of(options.taus, options.bounds, options.tile))
    for number, ids in enumerate(windows):
        part = f"window {number}, decode"
        if not store.has(window=number, variant="decode") and budget.allows(part):
            rows = decode_rows(model, ids, options.taus[::2], options.tile[1], options.places)
            store.append({"window": number, "variant": "decode", **row} for row in rows)
            budget.took(part)
    if budget.allows("taus by layer and head"):  # chosen anew in every run, always the same ones
        points = head_points(model, first, options.taus, options.tile)
        budget.took("taus by layer and head")
        run(path_variants(points, options.tile, options.steps))
    finish(options, store, budget.not_run)


if __name__ == "__main__":
    main()

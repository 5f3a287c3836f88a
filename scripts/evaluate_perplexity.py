# SPDX-License-Identifier: Apache-2.0
"""``mala-hf ppl`` from a checkout: ``python scripts/evaluate_perplexity.py --help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mala_hf.cli import main

if __name__ == "__main__":
    sys.exit(main(["ppl", *sys.argv[1:]]))

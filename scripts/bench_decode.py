# SPDX-License-Identifier: Apache-2.0
"""``mala-hf bench --decode`` from a checkout; without shapes those of docs/performance.md, and none begun after a minute.

python scripts/bench_decode.py --output results/decode_h200.json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mala_hf.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--decode", "--seconds", "60", *sys.argv[1:]]))

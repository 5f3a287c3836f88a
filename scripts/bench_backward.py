# SPDX-License-Identifier: Apache-2.0
"""``mala-hf bench --backward`` from a checkout, with torch's own attention as its baselines unless others are asked for.

python scripts/bench_backward.py --lengths 8192 32768 131072 --slots 400 1000 --output results/backward.json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mala_hf.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--backward", "--baselines", "sdpa_cudnn", "sdpa_flash", *sys.argv[1:]]))

# SPDX-License-Identifier: Apache-2.0
"""``mala-hf bench`` from a checkout: the rows that ``docs/performance.md`` asks for, unless others are named.

python scripts/bench_operator.py --output results/operator_h200.json
python scripts/bench_operator.py --backward --output results/operator_backward_h200.json
python scripts/bench_operator.py --lengths 8192 32768 131072 --slots 400 1000 --output results/forward.json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mala_hf.cli import main

ROOT = Path(__file__).resolve().parent.parent
CAPTURED = (
    ROOT / "tests" / "data" / "smollm2_layer19_kv1.safetensors"
)  # post-RoPE q, k, v of a real layer, 2,048 tokens
# query heads, KV heads, head_dim, tokens, retained slots to aim at
LONG = [
    *(f"16,8,128,{length},{slots}" for length in (8192, 32768, 131072) for slots in (400, 1000)),
    "16,8,64,131072,400", "32,8,128,131072,400",
]  # fmt: skip
MIXED = ["16,8,128,32768,400:0.25", "16,8,128,131072,400:0.25"]
SHORT = [f"16,8,128,{length},flat" for length in (512, 1024, 2047)] + [
    "16,8,128,512,400",
    "16,8,128,1024,400",
    "16,8,128,2048,400",
]
FLAT = [f"16,8,128,{length},flat" for length in (2048, 4096, 8192, 16384, 32768, 131072)]
FLAT += ["16,8,64,32768,flat", "32,8,128,32768,flat"]
ROWS = {
    "forward": SHORT + FLAT + MIXED + LONG,
    "backward": [*LONG, "16,8,128,1024,flat", "16,8,128,32768,flat", *MIXED[1:]],
}
INPUTS = {"--lengths", "--slots", "--heads", "--head-dim", "--shapes", "--flat-share", "--captured", "--decode"}


def arguments(given: list[str]) -> list[str]:
    """Those of ``mala-hf bench``; what is given comes last, and wins."""
    if INPUTS.isdisjoint(given):
        rows = ROWS["backward" if "--backward" in given else "forward"]
        given = ["--shapes", *rows, "--captured", str(CAPTURED), *given]
    return ["bench", *given]


if __name__ == "__main__":
    sys.exit(main(arguments(sys.argv[1:])))

# SPDX-License-Identifier: Apache-2.0
"""Where things lie in the repository, and what pyproject.toml says."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest and mypy there

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "kernels_hub" / "mala" / "torch-ext" / "mala"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

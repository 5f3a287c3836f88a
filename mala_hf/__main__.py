# SPDX-License-Identifier: Apache-2.0
"""``python -m mala_hf`` is the ``mala-hf`` command."""

import sys

from .cli import main

sys.exit(main())

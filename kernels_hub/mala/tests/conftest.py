# SPDX-License-Identifier: Apache-2.0
"""Where the tests of the kernel run."""

import pytest
import torch


@pytest.fixture
def device() -> str:
    """A GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"

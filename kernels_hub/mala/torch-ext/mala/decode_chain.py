# SPDX-License-Identifier: Apache-2.0
"""Kernels that start while the one before still runs (programmatic dependent launch, compute capability 9.0 and newer).

The second one comes as far as ``gdc_wait``, which returns when the first has finished and its writes are visible.
"""

import torch
import triton

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a triton before 3.4, or one without CUDA

    @triton.jit
    def gdc_wait():
        """Nothing to wait for."""

    @triton.jit
    def gdc_launch_dependents():
        """Nothing to launch."""

    HAS_CHAINS = False
else:
    HAS_CHAINS = True


def chain_options(major: int) -> dict:
    """Launch options of a kernel that follows another in a chain; none where a GPU of compute capability ``major`` cannot chain."""
    return {"launch_pdl": True} if HAS_CHAINS and major >= 9 and torch.version.hip is None else {}

# SPDX-License-Identifier: Apache-2.0
"""The namespace of our operators in ``torch.ops``.

The Kernel Hub's builder puts a file of its own here, with a namespace for each build: two builds in one process do not clash.
"""

import torch

NAMESPACE = "mala_hf"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """``op_name`` as ``torch.ops`` knows it: namespace::op_name."""
    return f"{NAMESPACE}::{op_name}"

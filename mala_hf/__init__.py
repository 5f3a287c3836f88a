# SPDX-License-Identifier: Apache-2.0
"""MassAlloc Attention (MALA) for Hugging Face Transformers.

Importing this package adds the attention implementations "mala" and "mala_reference" to Transformers, the operators behind them to
``torch.ops.mala_hf``, keeps "mala" in continuous batching (``continuous_batching``), lets dense calls look for FlashAttention-4
(``flash_attn_4``), and does nothing else.
"""

from .cache import MalaCache
from .config import MalaConfig
from .convert_bench import Evidence
from .convert_checkpoint import convert
from .convert_search import TauSearch
from .flash_attn_4 import use_flash_attn_4
from .hub import load_kernel
from .ops.support_reuse import reuse_support
from .patch import mala_attention, patch_model, unpatch_model
from .recording import WorkReport, record_work
from .registration import register
from .version import __version__

register()

__all__ = [
    "Evidence",
    "MalaCache",
    "MalaConfig",
    "TauSearch",
    "WorkReport",
    "__version__",
    "convert",
    "load_kernel",
    "mala_attention",
    "patch_model",
    "record_work",
    "reuse_support",
    "unpatch_model",
    "use_flash_attn_4",
]

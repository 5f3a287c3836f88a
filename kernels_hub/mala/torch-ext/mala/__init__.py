# SPDX-License-Identifier: Apache-2.0
"""MassAlloc Attention (MALA): score every tile, then work only where a tile can matter."""

from .flash_attn_interface import (
    default_tau,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    set_default_tau,
)
from .interface import mala_attn_func, mala_attn_varlen_func
from .key_plane import KeyPlane
from .key_plane_write import quantize_keys
from .kvcache import mala_attn_with_kvcache_func
from .support_reuse import reuse_support
from .work import Work

__all__ = [
    "KeyPlane",
    "Work",
    "default_tau",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "mala_attn_func",
    "mala_attn_varlen_func",
    "mala_attn_with_kvcache_func",
    "quantize_keys",
    "reuse_support",
    "set_default_tau",
]

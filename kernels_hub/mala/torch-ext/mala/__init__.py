# SPDX-License-Identifier: Apache-2.0
"""MassAlloc Attention (MALA): score every tile, then work only where a tile can matter."""

from .interface import mala_attn_func, mala_attn_varlen_func, mala_attn_with_kvcache_func
from .work import Work

__all__ = ["Work", "mala_attn_func", "mala_attn_varlen_func", "mala_attn_with_kvcache_func"]

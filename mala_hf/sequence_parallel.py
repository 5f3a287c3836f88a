# SPDX-License-Identifier: Apache-2.0
"""MALA under Ulysses sequence parallelism, which accelerate takes from DeepSpeed.

Each process holds a part of the sequence; for attention they exchange, so that each has the whole sequence for its share of the heads.
DeepSpeed puts a function of its own in the place of "mala" among Transformers' attention functions, and drops all masks there.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .extras import how_to_install
from .ops.hf_mask import PACKING_DTYPE

NAME = "mala"
STATE = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


def ulysses(size: int, **options: Any) -> Any:
    """Return accelerate's ``ParallelismConfig`` for ``size`` processes that share each sequence, with MALA as their attention.

    ``options`` are those of accelerate's ``DeepSpeedSequenceParallelConfig``. Give the result to ``Accelerator`` or to Trainer's
    arguments (``parallelism_config``), and a model that runs "mala". See docs/scaling.md.

    Raises:
        ImportError: without accelerate 1.12 or newer, or without DeepSpeed.
        ValueError: for another attention among the options.
    """
    try:
        from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig, is_deepspeed_available
    except ImportError as error:
        raise ImportError(
            f"sequence parallelism needs accelerate 1.12 or newer: {how_to_install('ulysses')}"
        ) from error
    if not is_deepspeed_available():
        raise ImportError(f"sequence parallelism in accelerate runs on DeepSpeed: {how_to_install('ulysses')}")
    attention = options.pop("sp_attn_implementation", NAME)
    if attention != NAME:
        raise ValueError(f"this is for {NAME!r}, got sp_attn_implementation={attention!r}")
    handler = DeepSpeedSequenceParallelConfig(**options)
    # its constructor accepts SDPA and names of FlashAttention only; DeepSpeed takes whatever Transformers has registered
    handler.sp_attn_implementation = NAME
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    return ParallelismConfig(sp_backend="deepspeed", sp_size=size, sp_handler=handler)


def is_active() -> bool:
    """Whether DeepSpeed has put its function in the place of "mala" in this process."""
    function = ALL_ATTENTION_FUNCTIONS.get(NAME)
    return str(getattr(function, "__module__", "")).startswith("deepspeed.")


def place_and_size() -> tuple[int, int] | None:
    """Which of how many processes that share a sequence this is; None where there are none."""
    state = sys.modules.get(STATE)
    if state is None or not is_active():
        return None
    return state.get_sequence_parallel_rank(), state.get_sequence_parallel_world_size()


def check_mask_is_not_lost(mask: Tensor | None) -> None:
    """ValueError for a mask that DeepSpeed would drop; of packed sequences ``position_ids`` tell the layer again."""
    if mask is not None and mask.dtype != PACKING_DTYPE and is_active():
        raise ValueError(
            "DeepSpeed's sequence parallelism drops attention masks, and this batch needs one (padding, a window that the layers do "
            "not pass on, or a pattern of its own): pack sequences by position_ids in batches of 1, or use tensor parallelism"
        )

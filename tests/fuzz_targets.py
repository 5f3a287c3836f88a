# SPDX-License-Identifier: Apache-2.0
"""The fuzz's targets: a public function, an implementation, what is drawn and how it is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import fuzz_adapter
import fuzz_caches
import fuzz_checks
import fuzz_inputs
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

# what Triton's interpreter computes
IN_KERNELS = {"dtypes": (torch.float32, torch.float16), "tiles": fuzz_inputs.KERNEL_TILES}


@dataclass(frozen=True)
class Target:
    """``check`` takes what the ``drawn`` strategy gives. ``share``: of a hundred cases; ``subset``: cases of the test suite."""

    drawn: st.SearchStrategy
    check: Callable
    share: int
    subset: int

    def run(self, cases: int, chosen_seed: int | None = None, shrinks: bool = True) -> int:
        """The number of cases tried, raises where one fails, made small if it ``shrinks``; the same cases each time without a seed."""
        tried = 0

        def case(drawn) -> None:
            nonlocal tried
            tried += 1
            self.check(drawn)

        options = settings(
            max_examples=cases,
            deadline=None,
            database=None,
            derandomize=chosen_seed is None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
            report_multiple_bugs=False,
            print_blob=False,
        )
        test = options(given(self.drawn)(case))
        (test if chosen_seed is None else seed(chosen_seed)(test))()
        return tried


def _values_and_gradients(impl: str) -> Callable:
    def check(drawn) -> None:
        call, save_support = drawn
        fuzz_checks.check_gradients(call, impl, fuzz_checks.check_values(call, impl), save_support)

    return check


def _decode(impl: str) -> Callable:
    return lambda drawn: fuzz_checks.check_decode(*drawn, impl)


def _step(impl: str) -> Callable:
    return lambda drawn: fuzz_caches.check_step(drawn, impl)


def _with_flag(calls: st.SearchStrategy) -> st.SearchStrategy:
    return st.tuples(calls, st.booleans())


TARGETS = {
    "mala_attn_func": Target(_with_flag(fuzz_inputs.fixed_calls()), _values_and_gradients("blockwise"), 25, 60),
    "mala_attn_varlen_func": Target(_with_flag(fuzz_inputs.packed_calls()), _values_and_gradients("blockwise"), 20, 60),
    "decode": Target(fuzz_inputs.decode_calls(), _decode("blockwise"), 20, 100),
    "mala_attn_with_kvcache_func": Target(fuzz_caches.steps(), _step("blockwise"), 15, 100),
    "Transformers adapter": Target(fuzz_adapter.layers(), fuzz_adapter.check_layer, 15, 80),
    "mala_attn_func, kernels": Target(
        _with_flag(fuzz_inputs.fixed_calls(**IN_KERNELS)), _values_and_gradients("triton"), 2, 4
    ),
    "mala_attn_varlen_func, kernels": Target(
        _with_flag(fuzz_inputs.packed_calls(**IN_KERNELS)), _values_and_gradients("triton"), 1, 3
    ),
    "decode, kernels": Target(fuzz_inputs.decode_calls(**IN_KERNELS), _decode("triton"), 1, 3),
    "mala_attn_with_kvcache_func, kernels": Target(fuzz_caches.steps(**IN_KERNELS), _step("triton"), 1, 3),
}

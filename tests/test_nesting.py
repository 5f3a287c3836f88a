# SPDX-License-Identifier: Apache-2.0
"""The backward's support lies inside the forward's: drawn inputs, and tiles that miss the limit by single roundings."""

from __future__ import annotations

import pytest
import torch
from calls import build
from gradients import check_both_forms
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import FAMILIES, Case
from ties import Walk, assert_nested_at_ties

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# tiles, and with each the features that a kernel is compiled for; the rest of an input is drawn
KINDS = [
    Case(tile=(16, 16), head_dim=32, num_heads=1),
    Case(tile=(32, 16), head_dim=32, num_heads=1, sinks="learned", window=(20, -1)),
    Case(tile=(16, 32), head_dim=32, num_heads=1, causal=False, softcap=8.0),
    Case(tile=(32, 64), head_dim=32, num_heads=1, causal=False, sinks="learned"),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda case: "x".join(map(str, case.tile)))
def test_drawn_inputs_give_the_rules_tiles_in_both_forms(kind, device):
    @settings(max_examples=12, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        family=st.sampled_from(sorted(FAMILIES)),
        seqlen_q=st.integers(1, 40),
        seqlen_k=st.integers(1, 90),
        tau=st.sampled_from([1.0, 0.3, 4.0, 30.0]),
        seed=st.integers(0, 2**31),
    )
    def check(family, seqlen_q, seqlen_k, tau, seed):
        case = kind.with_(family=family, seqlen_q=seqlen_q, seqlen_k=seqlen_k, tau=tau)
        check_both_forms(build(case, torch.float32, device, seed))

    check()


@pytest.mark.parametrize(("shift", "cancelling"), [(0.0, 0.0), (60.0, 0.0), (1000.0, 0.0), (-7.0, 300.0)])
def test_a_tile_that_forward_skipped_by_a_rounding_is_skipped_again(shift, cancelling, device):
    assert_nested_at_ties(Walk(Case(head_dim=32), torch.float32, device, shift, cancelling))

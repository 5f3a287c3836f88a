# SPDX-License-Identifier: Apache-2.0
"""Who adds the splits of a decode up: a kernel of its own, or the last program of a group of few rows."""

from __future__ import annotations

import pytest
import torch
from calls import build
from decode_truth import SPLITS
from inputs import ids
from test_decode import CASES, FORMS

from mala_hf.ops import decode
from mala_hf.ops.launch_cache import CachedKernel


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_the_last_program_of_a_group_adds_up_what_the_kernel_would(case, form, device, monkeypatch, poisoned_memory):
    call = build(case, device=device)
    launch, answers, sums = CachedKernel.launch, [], []

    def recorded(kernel: CachedKernel, grid: tuple[int, int], *rest) -> None:
        if kernel is decode.COMBINE:
            sums.append(grid)
        launch(kernel, grid, *rest)

    monkeypatch.setattr(CachedKernel, "launch", recorded)
    for last_sums in (False, True):
        monkeypatch.setattr(decode, "LAST_SUMS", last_sums)
        answers.append(call.run("triton", decode=form, num_splits=SPLITS, return_lse=True, return_work=True))
    rows = sums[0][1]
    assert len(sums) == (1 if rows <= decode.MAX_ROWS_OF_LAST else 2)  # with many rows the kernel stays
    (out, lse, work), found = answers
    for mine, theirs in ((found[0], out), (found[1], lse), (found[2].certificate, work.certificate)):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-6, equal_nan=True)

# SPDX-License-Identifier: Apache-2.0
"""Tests that share what is slow to make, or start processes that would share its cores, stay in one worker of pytest-xdist."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("groups")
def test_the_scheduler_sees_the_group_of_a_test(request):
    """It reads groups off the names of tests, where pytest 9.2 does not let the plugin write them."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("not distributed by groups")
    assert request.node.nodeid.endswith("@groups")

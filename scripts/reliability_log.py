# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that writes a line of JSON as each test ends, into the file that RELIABILITY_LOG names; for reliability_runs.py.

First one with all names, ``{"collected": [...]}``, from the first worker where pytest-xdist has several.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Workers only say what there is; the process that hands tests out hears how each ended."""
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker is None:
        config.pluginmanager.register(_Outcomes())
    if worker in (None, "gw0"):
        config.pluginmanager.register(_Names())


def _write(entry: dict[str, Any]) -> None:
    with open(os.environ["RELIABILITY_LOG"], "ab", buffering=0) as log:  # a line at once: several processes write
        log.write(json.dumps(entry).encode() + b"\n")


class _Names:
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """A process that only hands tests out has none."""
        if session.items:
            _write({"collected": [item.nodeid for item in session.items]})


class _Outcomes:
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of setting up, the test and tearing down."""
        counted = {name: value for name, value in report.user_properties if isinstance(value, int)}
        _write(
            {
                "name": report.nodeid,
                "when": report.when,
                "outcome": report.outcome,
                "seconds": report.duration,
                "counted": counted if report.when == "call" else {},
            }
        )

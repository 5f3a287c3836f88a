# SPDX-License-Identifier: Apache-2.0
"""Silence of the libraries that load models and data: no progress bars and no warnings of their loggers; as they were afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging


def is_quiet() -> bool:
    """Whether Transformers shows no progress bars, and so nobody should."""
    return not logging.is_progress_bar_enabled()


@contextmanager
def quietly(quiet: bool = True) -> Iterator[None]:
    """Inside, Transformers and the hub's client show no progress bars and log nothing but errors; without ``quiet`` nothing changes."""
    if not quiet:
        yield
        return
    was_quiet, hub_was_quiet = is_quiet(), are_progress_bars_disabled()
    levels = logging.get_verbosity(), hub_logging.get_verbosity()
    logging.disable_progress_bar()
    disable_progress_bars()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(levels[0])
        hub_logging.set_verbosity(levels[1])
        if not was_quiet:
            logging.enable_progress_bar()  # switches the hub's on, too
        (disable_progress_bars if hub_was_quiet else enable_progress_bars)()


@contextmanager
def quiet_data(datasets: Any) -> Iterator[None]:
    """Inside, the package datasets shows progress bars only where Transformers does."""
    if not is_quiet() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()

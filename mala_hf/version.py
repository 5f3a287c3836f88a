# SPDX-License-Identifier: Apache-2.0
"""The version of the installed distribution, or of a bare checkout that was never installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mala-hf")
except PackageNotFoundError:
    __version__ = "0.0.0+checkout"

# SPDX-License-Identifier: Apache-2.0
"""Conversions of the tiny checkpoint in ``place`` (see conftest), as the tests of mala-hf convert measure them."""

from __future__ import annotations

from mala_hf import Evidence, convert

LENGTH = 512  # tokens; eight tiles, of which the tiny model skips some


def evidence(place, **settings):
    return Evidence(
        **({"text": str(place / "text.txt"), "length": LENGTH, "windows": 2, "ruler_samples": 0} | settings)
    )


def quietly(place):
    """How to measure in a test."""
    return {"evidence": evidence(place), "device": "cpu", "quiet": True, "say": lambda _: None}


def run(place, output="out", *arguments, **settings):
    return convert(place / "tiny", place / output, *arguments, **quietly(place) | settings)

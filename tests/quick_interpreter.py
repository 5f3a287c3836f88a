# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without work that it repeats or throws away: the same numbers, sooner.

At each call of a jitted function, not only at a launch, it looks through all of ``triton.language`` for what to replace; each sum of
integers is formed again in 64 bit for an assertion that only its debug mode would make; each value looks up its dtype in a new table.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect


def speed_up() -> None:
    """Once in a process, before the first launch. What a kernel computes, and what it may call, stay as they are."""
    from triton.runtime import interpreter

    interpreter._patch_lang = _patching_once(interpreter._patch_lang, interpreter.tl)
    interpreter._get_np_dtype = _remembering(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # device_assert does nothing then
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patching_once(patch_lang, tl):
    """Replaces the languages that a function sees at the first call that sees them, until the launch restores them."""
    replaced: set[str] = set()

    @functools.cache
    def languages(fn) -> frozenset[str]:
        return frozenset(x.__name__ for x in fn.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core))

    @functools.wraps(patch_lang)
    def patch_once(fn):
        if replaced and languages(fn) <= replaced:
            return None  # a call inside of a launch, whose scope nobody keeps
        scope = patch_lang(fn)
        replaced.update(languages(fn))
        restore = scope.restore

        def restore_and_forget() -> None:
            restore()
            replaced.clear()

        scope.restore = restore_and_forget
        return scope

    return patch_once


def _remembering(get_np_dtype):
    known: dict[str, object] = {}

    @functools.wraps(get_np_dtype)
    def np_dtype(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = get_np_dtype(dtype)
        return known[name]

    return np_dtype

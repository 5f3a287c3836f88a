# SPDX-License-Identifier: Apache-2.0
"""A support's bits in the kernels: set one, load words of a row, walk through them up or down (``support_bits.py`` says what they are).

The same bits by key tile, (num_sequences, num_heads, k_tiles, words of query tiles), serve the gradients of keys and values.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORDS = tl.constexpr(32)  # that a walk holds at a time


@triton.jit
def set_bit(words, index, mask):
    """Set bit ``index`` of a row of words; other programs may be setting other bits of it."""
    tl.atomic_or(words + index // 32, 1 << (index % 32), mask=mask, sem="relaxed")


@triton.jit
def count_bits(words):
    """How many bits are set in all of the words."""
    counts = words - ((words >> 1) & 0x55555555)  # bits of each pair, then of each four, then of each byte
    counts = (counts & 0x33333333) + ((counts >> 2) & 0x33333333)
    counts = (counts + (counts >> 4)) & 0x0F0F0F0F
    return tl.sum((counts * 0x01010101) >> 24, 0)


@triton.jit
def load_words(row, chunk, num_words):
    """(WORDS,) words of a row from word ``chunk * WORDS`` on, and how many bits are set in them."""
    offset = chunk * WORDS + tl.arange(0, WORDS)
    words = tl.load(row + offset, mask=offset < num_words, other=0)
    return words, count_bits(words)


@triton.jit
def next_bit(words, place, word):
    """The next set bit of a walk through ``words``, and the walk's state after it. It starts with place = -1, word = 0.

    ``place`` is the word that the walk is in, ``word`` what is left of it.
    """
    lanes = tl.arange(0, WORDS)
    later = tl.min(tl.where((words != 0) & (lanes > place), lanes, WORDS), 0)
    place = tl.where(word == 0, later, place)
    word = tl.where(word == 0, tl.sum(tl.where(lanes == later, words, 0), 0), word)
    lowest = (
        (word & -word).to(tl.uint32, bitcast=True).to(tl.float32)
    )  # a power of two: its exponent is the place of the bit
    bit = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
    return place * 32 + bit, place, word & (word - 1)


@triton.jit
def previous_bit(words, place, word):
    """As :func:`next_bit` from the highest bit down; it starts with place = WORDS, word = 0."""
    lanes = tl.arange(0, WORDS)
    earlier = tl.max(tl.where((words != 0) & (lanes < place), lanes, -1), 0)
    place = tl.where(word == 0, earlier, place)
    word = tl.where(word == 0, tl.sum(tl.where(lanes == earlier, words, 0), 0), word)
    upper = (word >> 16) & 0xFFFF
    half = tl.where(upper != 0, upper, word & 0xFFFF)  # 16 bits, which a float holds exactly
    bit = (half.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127 + tl.where(upper != 0, 16, 0)
    return place * 32 + bit, place, word & ~(1 << bit)

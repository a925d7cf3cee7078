"""Triton kernels of `lossless`, which describes the code and launches them.

Imported only if Triton is installed. `TRITON_INTERPRET=1` runs them on CPU tensors. A program works
on one block. Nothing is specialized but by constants, as in `compression.triton_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_ckpt.compression.triton_kernels import get_bits, kernel
from ds_ckpt.weights import lossless_format

BLOCK = tl.constexpr(lossless_format.BLOCK)
GROUP = tl.constexpr(lossless_format.GROUP)
ESCAPE = tl.constexpr(lossless_format.ESCAPE)
MAX_LOW_BITS = tl.constexpr(lossless_format.MAX_LOW_BITS)
FLAGS = tl.constexpr(lossless_format.FLAGS)
FLAG_WORDS = tl.constexpr(lossless_format.FLAG_WORDS)
UNCOMPRESSED = tl.constexpr(lossless_format.UNCOMPRESSED)


@triton.jit
def _ordinal(bits):
    """Map int16 in int32 to the order of the floats. Its own inverse."""
    return ((bits >> 31) & 0x7FFF) ^ bits


@triton.jit
def _low_bits(exponent, c):
    return tl.minimum(tl.maximum(c - exponent, 0), MAX_LOW_BITS)


@triton.jit
def _words(bits):
    return (tl.sum(bits, axis=0) + 31) // 32


@triton.jit
def _write(words, limit, values, places, widths):
    """Add values at ascending places, in bits, to zeros that end at word `limit`.

    The sum of a word's values is a difference of running sums. The value that reaches the end of
    its word adds its running sum there. It subtracts that sum from the next word, and adds its
    remaining bits there.
    """
    word, shift = places >> 5, places & 31
    placed = values << shift
    sums = tl.cumsum(placed, axis=0)
    ends = (places + widths) >> 5 > word
    rest = (values >> 1) >> (31 - shift)
    tl.atomic_add(words + word, sums, mask=ends, sem="relaxed")
    tl.atomic_add(words + word + 1, rest - sums, mask=ends & (word + 1 < limit), sem="relaxed")
    last = tl.max(places + widths, axis=0) >> 5
    is_last = tl.arange(0, BLOCK) == BLOCK - 1
    tl.atomic_add(words + word * 0 + last, sums, mask=is_last & (last < limit), sem="relaxed")


@kernel
def encode(
    old, new, headers, ends, words, numel: tl.int64, MANTISSA: tl.constexpr, WRITE: tl.constexpr
):
    """Write headers; or, if `WRITE`, the words, of which each block's end at `ends`."""
    GROUPS: tl.constexpr = BLOCK // GROUP
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    count = tl.minimum(numel - block * BLOCK, BLOCK).to(tl.int32)
    there = i < count
    before = tl.load(old + block * BLOCK + i, mask=there, other=0).to(tl.int32)
    after = tl.load(new + block * BLOCK + i, mask=there, other=0).to(tl.int32)
    change = (_ordinal(after) - _ordinal(before)) << 16 >> 16
    z = ((change << 1) ^ (change >> 31)) & 0xFFFF
    exponent = (before >> MANTISSA) & ((1 << (15 - MANTISSA)) - 1)
    if WRITE:
        header = tl.load(headers + block)
        c = (header >> 16) & 255
        is_flagged = header >> 24 == FLAGS
    else:
        header = 0
        sample = there & (i % 4 == 0)
        top = tl.max(tl.where(sample, exponent, 0), axis=0)
        down = tl.minimum(tl.maximum(top - exponent, 0), 31)
        sizes = tl.where(sample, (tl.minimum(z, 255) << 14) >> down, 0)
        mean = (tl.sum(sizes, axis=0) // ((count + 3) // 4)).to(tl.float32)
        c = top - 14 + (mean.to(tl.int32, bitcast=True) >> 23) - 127
        c = tl.minimum(tl.maximum(c, 0), 255)
        is_flagged = False
    exponent = tl.where(there, exponent, 1 << 10)
    rare = exponent > c
    changes = tl.reshape((rare & (z != 0)).to(tl.int32), (GROUPS, GROUP))
    flags = tl.max(changes, axis=1)
    every = tl.reshape(tl.broadcast_to(flags[:, None], (GROUPS, GROUP)), (BLOCK,))
    silent = rare & (every == 0)
    if not WRITE:
        is_flagged = tl.sum(silent.to(tl.int32), axis=0) > GROUPS
    k = _low_bits(exponent, c)
    zeros = tl.minimum(z >> k, ESCAPE)
    coded = ((silent & is_flagged) == 0).to(tl.int32)
    widths = (zeros + 1) * coded
    escaped = (zeros == ESCAPE).to(tl.int32)
    low_words = _words(k)
    flag_words = is_flagged.to(tl.int32) * FLAG_WORDS
    if not WRITE:
        size = flag_words + _words(widths) + (tl.sum(escaped, axis=0) + 1) // 2 + low_words
        header = size | c << 16 | is_flagged.to(tl.int32) << 24
        whole = (count + 1) // 2
        header = tl.where(size >= whole, whole | UNCOMPRESSED << 24, header)
        tl.store(headers + block, header)
    else:
        size = header & 0xFFFF
        words += tl.load(ends + block) - size
        if header >> 24 == UNCOMPRESSED:
            tl.store(words.to(tl.pointer_type(tl.int16)) + i, after.to(tl.int16), mask=there)
        else:
            if is_flagged:
                bits = tl.reshape(flags, (FLAG_WORDS, 32)) << tl.arange(0, 32)[None, :]
                tl.store(words + tl.arange(0, FLAG_WORDS), tl.sum(bits, axis=1))
            places = tl.cumsum(widths, axis=0) - widths
            unary = coded << zeros
            _write(words + flag_words, size - flag_words, unary, places, widths)
            low_words = size - low_words
            places = tl.cumsum(k, axis=0) - k
            low = z & ((1 << k) - 1)
            _write(words + low_words, size - low_words, low, places, k)
            rank = tl.cumsum(escaped, axis=0)
            place = words.to(tl.pointer_type(tl.int16)) + 2 * low_words - rank
            tl.store(place, z.to(tl.int16), mask=escaped == 1)


@kernel
def find_ones(headers, ends, words, places):
    """Write the places of the ones of each block behind its flags, as int16 [blocks, BLOCK]."""
    ROUND: tl.constexpr = BLOCK // 32
    block = tl.program_id(0).to(tl.int64)
    header = tl.load(headers + block)
    size = header & 0xFFFF
    words += tl.load(ends + block) - size
    places += block * BLOCK
    i = tl.arange(0, BLOCK)
    first = tl.where(header >> 24 == FLAGS, FLAG_WORDS, 0)
    found = tl.where(header >> 24 == UNCOMPRESSED, BLOCK, 0)
    at = first
    while (at < size) & (found < BLOCK):
        word = at + tl.arange(0, ROUND)
        bits = tl.load(words + word, mask=word < size, other=0)
        ones = (bits[:, None] >> tl.arange(0, 32)[None, :]) & 1
        ones = tl.reshape(ones, (BLOCK,))
        rank = found + tl.cumsum(ones, axis=0) - 1
        place = ((at - first) * 32 + i).to(tl.int16)
        tl.store(places + rank, place, mask=(ones == 1) & (rank < BLOCK))
        found += tl.sum(ones, axis=0)
        at += ROUND


@kernel
def decode(weights, headers, ends, words, places, numel: tl.int64, MANTISSA: tl.constexpr):
    """Turn the old weights into the new ones."""
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    there = i < tl.minimum(numel - block * BLOCK, BLOCK).to(tl.int32)
    weights += block * BLOCK
    places += block * BLOCK
    header = tl.load(headers + block)
    size, c = header & 0xFFFF, (header >> 16) & 255
    words += tl.load(ends + block) - size
    halves = words.to(tl.pointer_type(tl.int16))
    if header >> 24 == UNCOMPRESSED:
        tl.store(weights + i, tl.load(halves + i, mask=there, other=0), mask=there)
    else:
        before = tl.load(weights + i, mask=there, other=0).to(tl.int32)
        exponent = (before >> MANTISSA) & ((1 << (15 - MANTISSA)) - 1)
        exponent = tl.where(there, exponent, 1 << 10)
        group = i // GROUP
        is_flagged = (header >> 24 == FLAGS) & (i >= 0)
        # a copy that differs from its owner's weights has other exponents: stay inside the block
        inside = is_flagged & (group // 32 < size)
        flags = tl.load(words + group // 32, mask=inside, other=-1)
        coded = ((exponent <= c) | ((flags >> group % 32) & 1 == 1)).to(tl.int32)
        rank = tl.cumsum(coded, axis=0) - 1
        place = tl.load(places + rank, mask=coded == 1, other=0).to(tl.int32)
        last = tl.load(places + rank - 1, mask=(coded == 1) & (rank > 0), other=-1).to(tl.int32)
        zeros = (place - last - 1) * coded
        k = _low_bits(exponent, c)
        low_words = tl.maximum(size - _words(k), 0)
        at = tl.cumsum(k, axis=0) - k
        low = get_bits(words + low_words, at, k, 32 * (size - low_words), k > 0)
        z = (zeros << k) | low
        escaped = zeros == ESCAPE
        half = 2 * low_words - tl.cumsum(escaped.to(tl.int32), axis=0)
        whole = tl.load(halves + half, mask=escaped & (half >= 0), other=0).to(tl.int32)
        z = tl.where(escaped, whole & 0xFFFF, z)
        change = (z >> 1) ^ -(z & 1)
        after = _ordinal((_ordinal(before) + change) << 16 >> 16)
        tl.store(weights + i, after.to(tl.int16), mask=there)

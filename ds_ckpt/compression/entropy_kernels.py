"""Triton kernels of `entropy_coded`, which describes the code and launches them.

Imported only if Triton is installed. They write the bytes that its operators write.

`sample` and `guess` predict thresholds for a segment. `code` runs three times, a program for each
part of a segment. It counts the bits for each threshold, then those for the entries that are sent,
then it writes them. `read` turns a part into a byte for each entry, and `add` adds what those bytes
decode to. Numbers that the programs of a segment exchange are int32 or fp64:

    guessed    [segments, 8]: `THRESHOLDS` ascending, the last infinite | k less 1 | second k
    tried      [segments, parts, 16]: bits for each threshold but the first | from 8 on, entries
    counts     [segments, parts, 8]: entries sent, above level 0 | bits: unary parts | all
    sums       [segments, parts, 2]: magnitudes of level 0 | distances above the borders of levels
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_ckpt.compression import entropy_format as fmt
from ds_ckpt.compression.triton_kernels import get_bits, kernel

TILE = tl.constexpr(fmt.TILE)
PART = tl.constexpr(fmt.PART)
MOST_PARTS = tl.constexpr(fmt.SEGMENT // fmt.PART)
HEADER_WORDS = tl.constexpr(fmt.HEADER_BYTES // 4)
K_LIMIT = tl.constexpr(fmt.K_LIMIT)
INFINITE = tl.constexpr(fmt.INFINITE)
STRONG = tl.constexpr(fmt.STRONG)
LEVELS = tl.constexpr(fmt.LEVELS)
LEVEL = tl.constexpr(fmt.LEVEL)
SAMPLE = tl.constexpr(fmt.SAMPLE)
SCATTER = tl.constexpr(fmt.SCATTER)
BINS = tl.constexpr(fmt.BINS)
BIN = tl.constexpr(fmt.BIN)
WINDOW = tl.constexpr(fmt.WINDOW)
SHARES = tl.constexpr(fmt.SHARES)
K_SHARE = tl.constexpr(fmt.K_SHARE)
THRESHOLDS = tl.constexpr(len(fmt.SHARES) + 1)
TRIED = tl.constexpr(len(fmt.SHARES) - 1)


@triton.jit
def _segment(numel, segments):
    """Return the number, the row, the first entry and the length of the program's segment."""
    number = tl.program_id(1).to(tl.int64)
    length = (numel + segments - 1) // segments
    first = number % segments * length
    return number, number // segments, first, tl.minimum(numel - first, length).to(tl.int32)


@triton.jit
def _payload(payload, n, stride, segments, row_bytes, segment_bytes):
    """Return the segment's header, index and code as int32, and the bits of the code."""
    number = tl.program_id(1).to(tl.int64)
    start = number % segments * segment_bytes
    words = tl.minimum(row_bytes - start, segment_bytes).to(tl.int32) // 4
    header = (payload + number // segments * stride + start).to(tl.pointer_type(tl.int32))
    before = HEADER_WORDS + 2 * ((n + PART - 1) // PART)
    return header, header + HEADER_WORDS, header + before, 32 * (words - before)


@triton.jit
def _finite(x):
    """Return values, zeros for those that are not finite, and the bits of their magnitudes."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < INFINITE, x, 0.0), tl.where(bits < INFINITE, bits, 0)


@triton.jit
def _pick(x, i):
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == i, x, 0), axis=0)


@kernel
def sample(values, histograms, numel: tl.int64, stride, segments):
    """Count one of every so many magnitudes, at varying offsets."""
    number, row, first, n = _segment(numel, segments)
    every = tl.maximum(n // SAMPLE, 1)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE).to(tl.int64)
    place = i * every + ((((i * SCATTER >> 16) & 0xFFFF) * every) >> 16)
    there = i < n // every
    x, bits = _finite(tl.load(values + row * stride + first + place, mask=there, other=0.0))
    at = histograms + number * BINS + (bits // BIN)
    tl.atomic_add(at, 1, mask=there, sem="relaxed")


@triton.jit
def _predicted(count, total):
    """Return the bits of `count` gaps, evenly spread over `total`, at the best k, and this k."""
    least = count + (total - count)
    best = count * 0
    for k in tl.static_range(1, K_LIMIT):
        rounded_off = (count - (count >> k)) * 7 >> 4
        bits = count * (1 + k) + ((total - count) >> k) - rounded_off
        best = tl.where(bits < least, k, best)
        least = tl.minimum(bits, least)
    return least, best


@triton.jit
def _between(x, i, part):
    """Interpolate down from an element of a vector to the one before."""
    x, before = _pick(x, i), _pick(x, i - 1)
    return x + ((before - x).to(tl.int64) * part // BIN).to(tl.int32)


@kernel
def guess(
    histograms, guessed, numel: tl.int64, payload, stride, segments, row_bytes, segment_bytes
):
    """Write thresholds, and k of both sequences."""
    number, row, first, n = _segment(numel, segments)
    header, index, words, budget = _payload(payload, n, stride, segments, row_bytes, segment_bytes)
    histograms += number * BINS
    bins = tl.arange(0, BINS)
    counts = tl.load(histograms + bins)
    total = tl.sum(counts, axis=0)
    lowest = tl.maximum(tl.max(tl.where(counts > 0, bins, 0), axis=0) + 2 - WINDOW, 1)
    tl.debug_barrier()  # all have read what is overwritten
    tl.store(histograms + bins, total - tl.cumsum(counts, axis=0) + counts)
    tl.debug_barrier()
    e = lowest + tl.arange(0, WINDOW)
    sent = tl.load(histograms + e)
    above = tl.load(histograms + e + STRONG // BIN, mask=e < BINS - STRONG // BIN, other=0)
    bits, k = _predicted(sent, total)
    bits_above, k = _predicted(above, sent)
    bits += bits_above + sent
    for level in range(LEVELS):
        border = e + ((STRONG + LEVEL * level) // BIN)
        bits += tl.load(histograms + border, mask=border < BINS, other=0)
    guessed += number * 8
    m, s = total, total
    for i in tl.static_range(THRESHOLDS - 1):
        wanted = (budget.to(tl.int64) * total * SHARES[i] // (64 * n)).to(tl.int32)
        fit = tl.maximum(tl.sum((bits > wanted).to(tl.int32), axis=0), 1)
        high, low = _pick(bits, fit - 1), _pick(bits, fit)
        part = (wanted - low).to(tl.int64) * BIN // tl.maximum(high - low, 1)
        part = tl.minimum(part, BIN).to(tl.int32) if i > 0 else BIN
        tl.store(guessed + i, (lowest + fit) * BIN - part)
        if SHARES[i] == K_SHARE:
            m = _between(sent, fit, part)
            s = _between(above, fit, part)
            fits = total * 0
            for k in tl.static_range(K_LIMIT):
                fits = tl.maximum(fits, (wanted - (total >> k)) // (2 + k))
            m = tl.minimum(m, fits)
    tl.store(guessed + THRESHOLDS - 1, INFINITE)
    bits, k = _predicted(m, total)
    tl.store(guessed + THRESHOLDS, k)
    bits, k = _predicted(s, m)
    tl.store(guessed + THRESHOLDS + 1, k)


@triton.jit
def _choose(guessed, tried, budget, cost):
    """Return the threshold that fits, the one below, and how many of those between are sent."""
    i, part = tl.arange(0, 8), tl.arange(0, MOST_PARTS)[:, None]
    at = tried + part * 16 + i[None, :]
    there = (part < tl.num_programs(0)) & (i[None, :] <= TRIED)
    spare = budget - tl.sum(tl.load(at, mask=there, other=0), axis=0)
    entries = tl.sum(tl.load(at + 8, mask=there, other=0), axis=0)
    fit = tl.min(tl.where((spare >= 0) | (i == TRIED), i, TRIED), axis=0)
    found = _pick(entries, fit) - _pick(entries, fit + 1)
    room = tl.minimum(tl.maximum(_pick(spare, fit), 0) // cost, found)
    return tl.load(guessed + fit + 1), tl.load(guessed + fit), room, tl.maximum(found, 1)


@triton.jit
def _gaps(x, mask, last, scratch):
    """Return how much follows the one before under the mask, less 1, the rank, and the last x.

    Ascending x [C, TILE] below 2^15; `last` [C, 1] are those before the tile.
    """
    rank = tl.cumsum(mask.to(tl.int32), axis=1)
    tl.debug_barrier()  # all have read what is overwritten
    tl.store(scratch + rank - 1, x.to(tl.int16), mask=mask)
    tl.debug_barrier()
    before = tl.load(scratch + rank - 2, mask=mask & (rank > 1), other=0).to(tl.int32)
    gap = x - tl.where(rank > 1, before, last) - 1
    return gap, rank - 1, tl.maximum(last, tl.max(tl.where(mask, x, -1), axis=1, keep_dims=True))


@triton.jit
def _sum(x, mask):
    return tl.sum(tl.where(mask, x, 0), axis=1, keep_dims=True)


@triton.jit
def _put(words, place, value, width, mask):
    """Set the bits of values at places; others write to the same words."""
    word, shift = place >> 5, place & 31
    tl.atomic_or(words + word, value << shift, mask=mask, sem="relaxed")
    rest = (value >> 1) >> (31 - shift)
    tl.atomic_or(words + word + 1, rest, mask=mask & (shift + width > 32), sem="relaxed")


@triton.jit
def _put_ones(words, start, zeros, mask):
    """Write unary parts, one after another: each ends with a one."""
    place = start + tl.cumsum(tl.where(mask, zeros + 1, 0), axis=1) - 1
    tl.atomic_or(words + (place >> 5), mask.to(tl.int32) << (place & 31), mask=mask, sem="relaxed")


@triton.jit
def _decoded(level, mean, unit):
    """Return the magnitude of level 0, 1, ..."""
    bits = tl.minimum(unit + (level - 1) * LEVEL, INFINITE - 1)
    return tl.where(level == 0, mean, bits.to(tl.float32, bitcast=True))


@kernel
def code(
    values,
    guessed,
    tried,
    counts,
    sums,
    scratch,
    numel: tl.int64,
    values_stride: tl.int64,
    payload,
    stride,
    segments,
    row_bytes,
    segment_bytes,
    STAGE: tl.constexpr,
):
    """Write `tried`, or `counts` and `sums`, or a part's code to zeros; the last leaves residuals.

    What a gap at the end of a part would take is counted, since some entry may be sent there.
    """
    C: tl.constexpr = TRIED if STAGE == "try" else 1
    number, row, first, n = _segment(numel, segments)
    header, index, words, budget = _payload(payload, n, stride, segments, row_bytes, segment_bytes)
    part, parts = tl.program_id(0), tl.num_programs(0)
    n = tl.maximum(tl.minimum(n - part * PART, PART), 0)
    guessed += number * 8
    tried += number * parts * 16
    counts += number * parts * 8
    sums += number * parts * 2
    shift, low = tl.load(guessed + THRESHOLDS), tl.load(guessed + THRESHOLDS + 1)
    k = shift + 1
    c = tl.arange(0, C)[:, None]
    scratch += ((number * parts + part) * TRIED + c) * TILE
    if STAGE == "try":
        threshold, lower = tl.load(guessed + 1 + c), tl.load(guessed)
    else:
        # one more costs its low bits and two: it parts a gap, or the rest of a part, and may
        # lengthen one of the second sequence by 1
        threshold, lower, room, found = _choose(guessed, tried, budget, k + 2)
    if STAGE == "write":
        i = tl.arange(0, MOST_PARTS)
        there = i < parts
        ends = tl.cumsum(tl.load(counts + i * 8 + 4, mask=there, other=0), axis=0)
        all_sent = tl.sum(tl.load(counts + i * 8, mask=there, other=0), axis=0)
        all_above = tl.sum(tl.load(counts + i * 8 + 1, mask=there, other=0), axis=0)
        total = tl.sum(tl.load(sums + i * 2, mask=there, other=0.0), axis=0)
        mean = (total / tl.maximum(all_sent - all_above, 1)).to(tl.float32)
        total = tl.sum(tl.load(sums + i * 2 + 1, mask=there, other=0.0), axis=0).to(tl.int64)
        unit = threshold.to(tl.int64) + STRONG + total // tl.maximum(all_above, 1)
        unit = tl.minimum(unit, INFINITE - 1).to(tl.int32)
        counts += part * 8
        of_sent, of_above, of_both = tl.load(counts), tl.load(counts + 1), tl.load(counts + 4)
        end = _pick(ends, part)
        zeros_at = end - of_both
        strong_at = zeros_at + tl.load(counts + 2)
        levels_at = strong_at + tl.load(counts + 3)
        strong_low_at = end - of_above * low
        low_at = strong_low_at - of_sent * k
        if part == 0:
            tl.store(header, mean.to(tl.int32, bitcast=True))
            tl.store(header + 1, unit)
            tl.store(header + 2, k | low << 8)
        if n > 0:
            tl.store(index + 2 * part, of_sent | of_above << 16)
            tl.store(index + 2 * part + 1, end)
    values += row * values_stride + first + part * PART
    m = c * 0  # numbers of entries and bits so far
    s, unary, strong_unary, levels, least = m, m, m, m, m
    last, strong_last = m - 1, m - 1
    magnitudes = m.to(tl.float64)
    distances = magnitudes
    for start in range(0, n, TILE):
        place = start + tl.arange(0, TILE)[None, :]
        x, magnitude = _finite(tl.load(values + place, mask=place < n, other=0.0))
        sent = magnitude >= threshold
        if STAGE == "try":
            least += _sum(1, magnitude >= lower)
        else:
            between = (magnitude >= lower) & (magnitude < threshold)
            rank = tl.cumsum(between.to(tl.int32), axis=1)
            sent |= between & (rank * room // found > (rank - 1) * room // found)
        strong = sent & (magnitude - threshold >= STRONG)
        above = magnitude - threshold - STRONG
        level = tl.minimum(above // LEVEL, LEVELS - 1)
        gap, rank, last = _gaps(place, sent, last, scratch)
        strong_gap, strong_rank, strong_last = _gaps(m + rank, strong, strong_last, scratch)
        zeros, strong_zeros = gap >> shift, strong_gap >> low
        if STAGE == "count":
            above = tl.minimum(above - level * LEVEL, LEVEL - 1)
            magnitudes += _sum(tl.abs(x).to(tl.float64), sent & (strong == 0))
            distances += _sum(above.to(tl.float64), strong)
        if STAGE == "write":
            _put_ones(words, zeros_at + unary, zeros, sent)
            _put_ones(words, strong_at + strong_unary, strong_zeros, strong)
            _put_ones(words, levels_at + levels, level, strong)
            bits = (2 * gap + (x < 0).to(tl.int32)) & ((1 << k) - 1)
            _put(words, low_at + (m + rank) * k, bits, k, sent)
            bits = strong_gap & ((1 << low) - 1)
            _put(words, strong_low_at + (s + strong_rank) * low, bits, low, strong & (low > 0))
            decoded = _decoded(tl.where(strong, level + 1, 0), mean, unit)
            decoded = tl.where(sent, tl.where(x < 0, -decoded, decoded), 0.0)
            tl.store(values + place, x - decoded, mask=place < n)
        m += _sum(1, sent)
        s += _sum(1, strong)
        unary += _sum(zeros + 1, sent)
        strong_unary += _sum(strong_zeros + 1, strong)
        levels += _sum(level + 1, strong)
    bits = unary + strong_unary + levels + m * k + s * low
    if STAGE == "try":
        tried += part * 16
        tl.store(tried + c, bits + ((n - 1 - last) >> shift))
        tl.store(tried + TRIED, n >> shift)
        tl.store(tried + 8 + c * 0, least)
        tl.store(tried + 9 + c, m)
    if STAGE == "count":
        counts += part * 8 + c
        tl.store(counts, m)
        tl.store(counts + 1, s)
        tl.store(counts + 2, unary)
        tl.store(counts + 3, strong_unary)
        tl.store(counts + 4, bits)
        tl.store(sums + part * 2 + c, magnitudes)
        tl.store(sums + part * 2 + 1 + c, distances)


@triton.jit
def _zeros(ones, i, mask):
    """Return the zeros before ones."""
    return tl.load(ones + i + 1, mask=mask, other=1) - tl.load(ones + i, mask=mask, other=0) - 1


@kernel
def read(ones, places, codes, numel: tl.int64, payload, stride, segments, row_bytes, segment_bytes):
    """Write a byte of each sent entry to zeros: twice its level and the sign, plus 1."""
    number, row, first, n = _segment(numel, segments)
    header, index, words, budget = _payload(payload, n, stride, segments, row_bytes, segment_bytes)
    part = tl.program_id(0)
    there = part * PART < n
    n = tl.minimum(n - part * PART, PART)
    codes += row * numel + first + part * PART
    places += (number * tl.num_programs(0) + part) * PART
    both = tl.load(index + 2 * part, mask=there, other=0)
    end = tl.load(index + 2 * part + 1, mask=there, other=0)
    begin = tl.load(index + 2 * part - 1, mask=there & (part > 0), other=0)
    m, s = both & 0xFFFF, (both >> 16) & 0xFFFF
    k = tl.load(header + 2)
    low, k = (k >> 8) & 255, k & 255
    # three ones take four bits or more, and before each part is one more
    ones += number * (segment_bytes * 6) + begin * 3 // 4 + part

    found, first = 0, begin
    tl.store(ones, begin - 1)
    while (found < m + 2 * s) & (first < end):
        i = first + tl.arange(0, TILE)
        bits = (tl.load(words + (i >> 5), mask=i < end, other=0) >> (i & 31)) & 1
        rank = found + tl.cumsum(bits, axis=0)
        tl.store(ones + rank, i, mask=(bits == 1) & (rank <= m + 2 * s))
        found += tl.sum(bits, axis=0)
        first += TILE
    tl.debug_barrier()

    low_at = end - s * low
    last = -1
    for start in range(0, m, TILE):
        i = start + tl.arange(0, TILE)
        bits = get_bits(words, low_at + (i - m) * k, k, end, i < m)
        steps = (_zeros(ones, i, i < m) << (k - 1)) + (bits >> 1) + 1
        place = last + tl.cumsum(tl.where(i < m, steps, 0), axis=0)
        last = tl.max(place, axis=0)
        inside = (i < m) & (place < n)
        tl.store(places + i, place.to(tl.int16), mask=inside)
        tl.store(codes + place, (1 + (bits & 1)).to(tl.uint8), mask=inside)
    tl.debug_barrier()

    last = -1
    for start in range(0, s, TILE):
        i = start + tl.arange(0, TILE)
        bits = get_bits(words, low_at + i * low, low, end, i < s)
        steps = (_zeros(ones + m, i, i < s) << low) + bits + 1
        rank = last + tl.cumsum(tl.where(i < s, steps, 0), axis=0)
        last = tl.max(rank, axis=0)
        inside = (i < s) & (rank < m)
        level = tl.minimum(_zeros(ones + m + s, i, inside) + 1, LEVELS)
        code = codes + tl.load(places + rank, mask=inside, other=0)
        tl.store(code, tl.load(code, mask=inside) + (2 * level).to(tl.uint8), mask=inside)


@kernel
def add(codes, into, rows, numel: tl.int64, payload, stride, segments, segment_bytes, factor):
    """Add what codes decode to, row after row."""
    number, row, first, n = _segment(numel, segments)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.load(into + first + i, mask=i < n, other=0.0)
    header = (payload + number * segment_bytes).to(tl.pointer_type(tl.int32))
    codes += first + i
    for _ in range(rows):
        mean, unit = tl.load(header).to(tl.float32, bitcast=True), tl.load(header + 1)
        byte = tl.load(codes, mask=i < n, other=0).to(tl.int32)
        decoded = _decoded((byte - 1) >> 1, mean, unit) * factor
        decoded = tl.where((byte & 1) == 1, decoded, -decoded)
        total += tl.where(byte > 0, decoded, 0.0)
        header += stride // 4
        codes += numel
    tl.store(into + first + i, total, mask=i < n)

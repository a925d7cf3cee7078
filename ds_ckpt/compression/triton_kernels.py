"""Triton kernels over the shards of a tensor; `fused` describes and launches them.

Imported only if Triton is installed. `TRITON_INTERPRET=1` runs them on CPU tensors.

A program works on `TILE` entries of one row, [TILE / BLOCK, BLOCK]. Arithmetic rounds like the
operators: `div_rn`, bf16 rounded to nearest even by hand, no fused product and sum
(`enable_fp_fusion=False`).

Triton compiles a kernel anew for numbers that are 1 or multiples of 16, and for aligned addresses.
That would be in the middle of training. So constants alone specialize a kernel. With `ALIGNED`,
addresses, strides in bytes and entries are multiples of 16, and loads are of 16 bytes.
"""

from __future__ import annotations

import inspect
from typing import Any

import triton
import triton.language as tl


def kernel(function: Any) -> Any:
    """Compile a kernel for its constants and the types of its arguments, and for no values."""
    arguments = inspect.signature(function).parameters.values()
    names = [a.name for a in arguments if a.annotation != "tl.constexpr"]
    how = {"do_not_specialize": names, "do_not_specialize_on_alignment": names}
    return triton.jit(function, **how)


@triton.jit
def get_bits(words, place, width, end, mask):
    """Return values of `width` bits at places in int32 words that end at place `end`."""
    word, shift = place >> 5, place & 31
    low = tl.load(words + word, mask=mask & (place < end), other=0).to(tl.uint32, bitcast=True)
    low = (low >> shift.to(tl.uint32)).to(tl.int32, bitcast=True)
    is_cut = (shift + width > 32) & (place + width <= end)
    rest = tl.load(words + word + 1, mask=mask & is_cut, other=0)
    return (low | rest << 1 << (31 - shift)) & ((1 << width) - 1)


@triton.jit
def _bf16(x):
    """Round fp32 to bf16, as int32 in the lower half."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _wide(bf16):
    """Widen those to fp32."""
    return (bf16 << 16).to(tl.float32, bitcast=True)


@triton.jit
def _decoded(codes, scale, BITS: tl.constexpr, CURVE: tl.constexpr, SLOPE: tl.constexpr):
    """Multiply codes, whole numbers in fp32, by scales."""
    if BITS == 2:
        y = codes + 0.5
        codes = y * (tl.abs(y) * CURVE + SLOPE)
    return codes * scale


@triton.jit
def _narrow(codes, plane, count, tile, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Write `WIDTH` bits of each of `count` int32 codes [TILE] to the tile's part of a plane."""
    if WIDTH == 8:
        packed = codes
    else:
        EACH: tl.constexpr = 8 // WIDTH
        parts = tl.reshape(codes & ((1 << WIDTH) - 1), (TILE // EACH, EACH))
        packed = tl.sum(parts << (WIDTH * tl.arange(0, EACH))[None, :], axis=1)
    at = tl.arange(0, TILE * WIDTH // 8)
    plane += tile * (TILE * WIDTH // 8)
    tl.store(plane + at, packed.to(tl.uint8), mask=at < (count * WIDTH + 7) // 8)


@triton.jit
def _codes_start(numel, BLOCK: tl.constexpr):
    """Return the bytes of scales, up to the next multiple of 8."""
    return ((numel + BLOCK - 1) // BLOCK + 3) // 4 * 8


@kernel
def pack_quantized(
    values,
    payload,
    numel: tl.int64,
    values_stride: tl.int64,
    payload_stride: tl.int64,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BORDER: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    CURVE: tl.constexpr,
    SLOPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Quantize the entries of a tile, write its part of the payload, and leave the residual."""
    BLOCKS: tl.constexpr = TILE // BLOCK
    REACH: tl.constexpr = 1 << (BITS - 1)
    tile, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    count = tl.minimum(numel - tile * TILE, TILE).to(tl.int32)  # entries of this tile
    values += row * values_stride + tile * TILE
    payload += row * payload_stride
    if ALIGNED:
        count = tl.multiple_of(count, 16)
        values = tl.multiple_of(values, 16)
    block = tl.arange(0, BLOCKS)
    entry = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = entry < count
    x = tl.load(values + entry, mask=there, other=0.0)
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)  # the step will be skipped

    if BITS == 2:
        length = tl.minimum(tl.maximum(count - block * BLOCK, 1), BLOCK).to(tl.float32)
        rms = tl.div_rn(tl.sqrt_rn(tl.sum(x * x, axis=1)), tl.sqrt_rn(length))
        border = tl.minimum(tl.maximum(rms * BORDER, LEAST), MOST)
        borders = tl.broadcast_to(border[:, None], (BLOCKS, BLOCK))
        inside = tl.div_rn(x, borders)
        codes = tl.minimum(tl.maximum(tl.floor(inside), -2.0), 1.0)
        levels = _decoded(codes, 1.0, BITS, CURVE, SLOPE)
        levels = tl.where(there, levels, 0.0)
        most = tl.sum(levels * levels, axis=1)
        most = tl.where(most == 0.0, 1.0, most)  # of a block behind the end
        fit = tl.div_rn(tl.sum(inside * levels, axis=1), most) * border
        scale = _bf16(tl.minimum(fit, 3.3895313892515355e38 / 4))
        wide = _wide(scale)
    else:
        low, high = tl.min(x, axis=1), tl.max(x, axis=1)
        largest = tl.where(-low > high, low, high)
        LIMIT: tl.constexpr = 3.3895313892515355e38 / REACH
        signed = largest * (-1.0 / REACH)  # a power of two: rounds as a division does
        scale = _bf16(tl.minimum(tl.maximum(signed, -LIMIT), LIMIT))
        wide = _wide(scale)
        divisors = tl.where(wide == 0.0, 1.0, wide)
        codes = tl.div_rn(x, tl.broadcast_to(divisors[:, None], (BLOCKS, BLOCK)))
        codes = tl.minimum(tl.maximum(codes, -REACH * 1.0), REACH - 1.0)
        codes = (codes + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest, ties to even
    left = x - _decoded(codes, wide[:, None], BITS, CURVE, SLOPE)
    tl.store(values + entry, left, mask=there)

    # scales | codes, both filled up to 8 bytes with zeros
    blocks = (count + BLOCK - 1) // BLOCK
    scales = payload.to(tl.pointer_type(tl.int16)) + tile * BLOCKS
    scale = tl.where(block < blocks, scale, 0)
    tl.store(scales + block, scale.to(tl.int16), mask=block < (blocks + 3) // 4 * 4)
    planes = payload + _codes_start(numel, BLOCK)
    flat = tl.reshape(tl.where(there, codes, 0.0).to(tl.int32), (TILE,))
    if BITS == 3:
        low_bytes, high_bytes = (numel + 3) // 4, (numel + 7) // 8
        _narrow(flat, planes, count, tile, 2, TILE)
        _narrow(flat >> 2, planes + low_bytes, count, tile, 1, TILE)
        end = low_bytes + high_bytes
    else:
        end = (numel * BITS + 7) // 8
        _narrow(flat, planes, count, tile, BITS, TILE)
    if (tile + 1) * TILE >= numel:
        filler = end + tl.arange(0, 8)
        tl.store(planes + filler, tl.zeros((8,), tl.uint8), mask=filler < (end + 7) // 8 * 8)


@triton.jit
def _widen(plane, group, some, tile, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Return `WIDTH` bits of each of the tile's entries [TILE / 8, 8], as int32 without a sign.

    A word has the codes of eight entries; 8 bits are read one by one. Planes of more than a bit
    begin at multiples of 8 bytes, and no payload ends within a word.
    """
    eight = tl.arange(0, 8)[None, :]
    plane += tile * (TILE * WIDTH // 8)
    if WIDTH == 8:
        return tl.load(plane + group[:, None] * 8 + eight, mask=some[:, None], other=0).to(tl.int32)
    WORD: tl.constexpr = tl.uint8 if WIDTH == 1 else tl.uint16 if WIDTH == 2 else tl.uint32
    words = tl.load(plane.to(tl.pointer_type(WORD)) + group, mask=some, other=0)
    words = words.to(tl.int32, bitcast=WIDTH == 4)
    return (words[:, None] >> (WIDTH * eight)) & ((1 << WIDTH) - 1)


@kernel
def unpack_add_quantized(
    first,
    into,
    rows,
    numel: tl.int64,
    stride: tl.int64,
    factor,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BORDER: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    CURVE: tl.constexpr,
    SLOPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Add the decoded payloads to `into`, row after row."""
    tile = tl.program_id(0).to(tl.int64)
    into += tile * TILE
    count = tl.minimum(numel - tile * TILE, TILE).to(tl.int32)  # entries of this tile
    if ALIGNED:
        count = tl.multiple_of(count, 16)
        into = tl.multiple_of(into, 16)
    group = tl.arange(0, TILE // 8)
    some = group * 8 < count
    entry = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    there = entry < count
    total = tl.load(into + entry, mask=there, other=0.0)
    for row in range(rows):
        payload = first + row * stride
        scales = payload.to(tl.pointer_type(tl.int16)) + tile * (TILE // BLOCK)
        scale = tl.load(scales + group * 8 // BLOCK, mask=some, other=0).to(tl.int32) & 0xFFFF
        planes = payload + _codes_start(numel, BLOCK)
        if BITS == 3:
            codes = _widen(planes, group, some, tile, 2, TILE)
            codes |= _widen(planes + (numel + 3) // 4, group, some, tile, 1, TILE) << 2
        else:
            codes = _widen(planes, group, some, tile, BITS, TILE)
        codes = (codes << (32 - BITS)) >> (32 - BITS)  # the top bit is the sign
        decoded = _decoded(codes.to(tl.float32), _wide(scale)[:, None], BITS, CURVE, SLOPE)
        total += decoded * factor
    tl.store(into + entry, total, mask=there)


@kernel
def block_maxima(
    values,
    offsets,
    numel: tl.int64,
    count: tl.int64,
    rows,
    shard_stride: tl.int64,
    offsets_stride: tl.int64,
    place_stride: tl.int64,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the rows of the K largest magnitudes of each column of [rows, count].

    Compared as in `topk`: by the upper 23 bits, ties to the later row.
    """
    shard = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    entry = row[:, None].to(tl.int64) * count + column[None, :]
    there = (row[:, None] < rows) & (column[None, :] < count) & (entry < numel)
    x = tl.load(values + shard * shard_stride + entry, mask=there, other=0.0)
    keys = (x.to(tl.int32, bitcast=True) & 0x7FFFFF00) | row[:, None]
    keys = tl.where(there, keys, -1)
    start = offsets + shard * offsets_stride + column
    for place in tl.static_range(K):
        best = tl.max(keys, axis=0)
        tl.store(start + place * place_stride, (best & 255).to(tl.uint8), mask=column < count)
        keys = tl.where(keys == best[None, :], -1, keys)


@triton.jit
def _blocks(numel, BLOCK: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the tile's start, its entries [TILE / BLOCK, BLOCK], and which there are."""
    start = tl.program_id(0).to(tl.int64) * TILE
    count = tl.minimum(numel - start, TILE).to(tl.int32)
    if ALIGNED:
        count = tl.multiple_of(count, 16)
    entry = tl.arange(0, TILE // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return start, entry, entry < count


@kernel
def add_gradient(
    stored,
    scales,
    gradient,
    out,
    numel: tl.int64,
    divisor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write a residual of bf16 (`scales` is None) or int8, plus a share of a gradient, in fp32."""
    start, entry, there = _blocks(numel, BLOCK, TILE, ALIGNED)
    stored += start
    gradient += start
    out += start
    if ALIGNED:
        stored, gradient = tl.multiple_of(stored, 16), tl.multiple_of(gradient, 16)
        out = tl.multiple_of(out, 16)
    x = tl.load(stored + entry, mask=there, other=0).to(tl.int32)
    if scales is None:
        x = _wide(x & 0xFFFF)
    else:
        scale = tl.load(scales + (start + entry) // BLOCK, mask=there, other=0).to(tl.int32)
        x = x.to(tl.float32) * _wide(scale & 0xFFFF)
    g = tl.load(gradient + entry, mask=there, other=0)
    g = _wide(g.to(tl.int32) & 0xFFFF) if g.dtype == tl.int16 else g.to(tl.float32)
    tl.store(out + entry, x + tl.div_rn(g, divisor + tl.zeros_like(g)), mask=there)


@kernel
def round_residual(
    working,
    values,
    scales,
    numel: tl.int64,
    seed,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEP: tl.constexpr,
    MIX: tl.constexpr,
    REACH: tl.constexpr,
    TO_HALF: tl.constexpr,
):
    """Round fp32 to bf16 (`scales` is None) or int8, with the random numbers of `storage`."""
    start, entry, there = _blocks(numel, BLOCK, TILE, ALIGNED)
    working += start
    values += start
    if ALIGNED:
        working, values = tl.multiple_of(working, 16), tl.multiple_of(values, 16)
    x = tl.load(working + entry, mask=there, other=0.0)
    random = (start.to(tl.int32) + entry) * STEP + seed
    random = (random ^ (random >> 15)) * MIX
    if scales is None:
        most: tl.constexpr = 3.3895313892515355e38
        bits = tl.minimum(tl.maximum(x, -most), most).to(tl.int32, bitcast=True)
        rounded = (bits + ((random >> 16) & 0xFFFF)) >> 16
        tl.store(values + entry, rounded.to(tl.int16), mask=there)
    else:
        scale = tl.max(tl.abs(x), axis=1)
        scale = tl.maximum(tl.div_rn(scale, tl.zeros_like(scale) + REACH), 1.1754943508222875e-38)
        scale = (scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
        block = start // BLOCK + tl.arange(0, TILE // BLOCK)
        tl.store(scales + block, scale.to(tl.int16), mask=block * BLOCK < numel)
        inverse = tl.div_rn(tl.zeros((TILE // BLOCK,), tl.float32) + 1.0, _wide(scale))
        y = x * inverse[:, None] + random.to(tl.float32) * TO_HALF + 0.5
        tl.store(values + entry, tl.floor(y).to(tl.int8), mask=there)


@kernel
def take_selected(
    values,
    payload,
    sent: tl.int64,
    count: tl.int64,
    offsets_start: tl.int64,
    values_stride: tl.int64,
    payload_stride: tl.int64,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the values of entries whose offsets are in the payload, and leave their residual."""
    row = tl.program_id(1).to(tl.int64)
    values += row * values_stride
    payload += row * payload_stride
    start, entry, there = _blocks(sent, BLOCK, TILE, False)
    i = start + entry
    at = values + tl.load(payload + offsets_start + i, mask=there, other=0) * count + i % count
    x = tl.load(at, mask=there, other=0.0)
    if FORMAT == "fp32":
        decoded = x
        tl.store(payload.to(tl.pointer_type(tl.float32)) + i, x, mask=there)
    elif FORMAT == "bf16":
        most: tl.constexpr = 3.3895313892515355e38
        bits = _bf16(tl.minimum(tl.maximum(x, -most), most))
        decoded = _wide(bits)
        tl.store(payload.to(tl.pointer_type(tl.int16)) + i, bits.to(tl.int16), mask=there)
    else:
        largest = tl.max(tl.abs(x), axis=1)
        scale = _bf16(tl.div_rn(largest, tl.zeros_like(largest) + 127.0))
        wide = _wide(scale)[:, None] + tl.zeros_like(x)
        codes = tl.div_rn(x, tl.where(wide == 0.0, 1.0, wide))
        codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
        codes = (codes + 12582912.0) - 12582912.0
        decoded = codes * wide
        block = start // BLOCK + tl.arange(0, TILE // BLOCK)
        scales = payload.to(tl.pointer_type(tl.int16)) + block
        tl.store(scales, scale.to(tl.int16), mask=block * BLOCK < sent)
        tl.store(
            payload + _codes_start(sent, BLOCK) + i, codes.to(tl.int8).to(tl.uint8), mask=there
        )
    tl.store(at, x - decoded, mask=there)

"""Lossless changes of 16-bit weights by one optimizer step, in units of the last place.

Sender and receiver hold the old weights, so only the change is sent. Read as integers in the order
of their values, neighbouring 16-bit floats differ by 1. The change of a weight is a small integer.
Its size depends on the weight's exponent, which both sides have. Each block has a parameter c.
Changes 0, -1, 1, ... are numbered z = 0, 1, 2, ... in this order. The Rice code (Golomb 1966) of z
is z >> k zeros, a one, and k low bits. For a weight with exponent e, k is c - e, 0 to
`MAX_LOW_BITS`. Weights with e > c rarely change. In a block of mode `FLAGS` a group of `GROUP`
elements has a bit. It is 1 if one of the rare weights changes. If none does, they have no code.

`compression.wire` has the layout, and the version that ranks compare at attach. A block that would
not shrink (mode `UNCOMPRESSED`) has the new weights. All codes of a block are read at once. The
places of low bits follow from the old exponents, the others from the places of ones. Integer
arithmetic alone decides on c and mode. So the kernels of `lossless_kernels`, for CUDA devices with
Triton, write the same bytes as numpy here.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ckpt.compression import fused
from ds_ckpt.compression.base import on_host
from ds_ckpt.weights.lossless_format import (
    BLOCK,
    ESCAPE,
    FLAG_WORDS,
    FLAGS,
    GROUP,
    MAX_LOW_BITS,
    UNCOMPRESSED,
)

_T = TypeVar("_T")
_Array = NDArray[Any]
CPU_CHUNK = 1 << 19
"""Elements that a CPU codes together, a multiple of `BLOCK`; they fit in a core's cache."""
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Ranks of this node: torchrun's, DeepSpeed's launcher's, two of mpirun."""
_MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
_NO_WEIGHT = 1 << 10
"""Exponent of an element behind the last one."""


def encode(old: Tensor, new: Tensor) -> Tensor:
    """Encode the change between two flat tensors of bf16 or fp16 on one device, exactly.

    Returns uint8, whose first 8 bytes are the length. With kernels it is on their device, as large
    as `capacity`, without a host wait. Otherwise it is on the CPU and of that length.

    Raises:
        TypeError: Another dtype.
    """
    mantissa = _mantissa(old)
    if not old.numel():
        return torch.full((1,), 8, dtype=torch.int64, device=old.device).view(torch.uint8)
    before, after = old.view(torch.int16), new.view(torch.int16)
    if fused.is_supported(old.device, _try_kernels):
        return _encode_on_device(before, after, mantissa)
    chunks = before.cpu().split(CPU_CHUNK), after.cpu().split(CPU_CHUNK)
    coded = _map(functools.partial(_encode, mantissa), *chunks)
    parts = [part for column in zip(*coded, strict=True) for part in column]
    length = np.array([8 + sum(part.nbytes for part in parts)], np.int64)
    return torch.from_numpy(np.concatenate([p.view(np.uint8) for p in (length, *parts)]))


def capacity(numel: int) -> int:
    """Return the most bytes of a payload."""
    return 8 + 4 * -(-numel // BLOCK) + 4 * -(-numel // 2)


def decode_(weights: Tensor, payload: Tensor) -> None:
    """Turn the old weights into the new ones, in place.

    On a device with kernels only the length is checked, because the host does not wait.

    Raises:
        TypeError: Another dtype.
        ValueError: A damaged payload, or one of other weights.
    """
    mantissa, numel, found = _mantissa(weights), weights.numel(), payload.numel()
    blocks = -(-numel // BLOCK)
    if not 8 + 4 * blocks <= found <= capacity(numel) or found % 4:
        raise ValueError(f"not a change of {numel} weights: {found} bytes")
    if not numel:
        return
    if fused.is_supported(weights.device, _try_kernels):
        _decode_on_device_(weights.view(torch.int16), payload.to(weights.device), mantissa)
        return
    data = payload.numpy()[8:].view(np.uint32)
    headers, words = data[:blocks], data[blocks:]
    ends = (headers & 0xFFFF).cumsum(dtype=np.int64)
    if ends[-1] != len(words):
        raise ValueError(f"not a change of {numel} weights: {len(words)} words, not {ends[-1]}")
    held = weights.view(torch.int16).cpu()
    chunks, each = held.split(CPU_CHUNK), CPU_CHUNK // BLOCK
    cuts = range(each, blocks, each)
    try:
        parts = np.split(words, ends[[c - 1 for c in cuts]])
        _map(functools.partial(_decode_, mantissa), chunks, np.split(headers, cuts), parts)
    except (IndexError, ValueError) as error:
        raise ValueError(f"not a change of {numel} weights: {error}") from error
    if not on_host(weights.device):
        weights.view(torch.int16).copy_(held)


def _encode_on_device(old: Tensor, new: Tensor, mantissa: int) -> Tensor:
    from ds_ckpt.weights import lossless_kernels

    payload = old.new_zeros(capacity(old.numel()), dtype=torch.uint8)
    headers, words = _headers_and_words(payload, old.numel())
    ends = headers
    for writes in (False, True):
        args = old, new, headers, ends, words, old.numel()
        lossless_kernels.encode[(len(headers),)](*args, MANTISSA=mantissa, WRITE=writes)
        ends = headers.bitwise_and(0xFFFF).cumsum(0)
    length = payload.numel() - 4 * words.numel()
    payload[:8].view(torch.int64).copy_(ends[-1:] * 4 + length)
    return payload


def _decode_on_device_(weights: Tensor, payload: Tensor, mantissa: int) -> None:
    from ds_ckpt.weights import lossless_kernels

    headers, words = _headers_and_words(payload, weights.numel())
    ends = headers.bitwise_and(0xFFFF).cumsum(0)
    places = weights.new_empty(len(headers), BLOCK)
    lossless_kernels.find_ones[(len(headers),)](headers, ends, words, places)
    args = weights, headers, ends, words, places, weights.numel()
    lossless_kernels.decode[(len(headers),)](*args, MANTISSA=mantissa)


def _try_kernels(device: torch.device) -> None:
    for dtype, mantissa in _MANTISSA.items():
        weight = torch.zeros(1, dtype=dtype, device=device).view(torch.int16)
        _decode_on_device_(weight, _encode_on_device(weight, weight, mantissa), mantissa)


def _headers_and_words(payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    data = payload[8:].view(torch.int32)
    blocks = -(-numel // BLOCK)
    return data[:blocks], data[blocks:]


def _map(code: Callable[..., _T], *chunks: Sequence[Any]) -> list[_T]:
    """Apply `code` to every chunk, in threads.

    Chunks are independent, and what takes time releases Python's lock.
    """
    threads = min(_threads(), len(chunks[0]))
    if threads < 2 or not threading.main_thread().is_alive():  # no thread starts at the very end
        return [code(*chunk) for chunk in zip(*chunks, strict=False)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(code, *chunks))


def _threads() -> int:
    """Return this process's cores: those that it is bound to, else its part of the node's."""
    every = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if sys.platform == "linux" else every
    ranks = next((int(n) for key in _LOCAL_SIZE if (n := os.environ.get(key, "")).isdigit()), 1)
    return own if own < every else max(1, own // max(ranks, 1))


def _mantissa(weights: Tensor) -> int:
    if weights.dtype not in _MANTISSA:
        raise TypeError(f"lossless changes need bf16 or fp16 weights, found {weights.dtype}")
    return _MANTISSA[weights.dtype]


def _ordinal(bits: Tensor) -> Tensor:
    """Map bits to int16 in the order of the floats, negative zero to -1. Its own inverse."""
    return (bits >> 15).bitwise_and_(0x7FFF).bitwise_xor_(bits)


def _in_blocks(values: Tensor, filler: int) -> Tensor:
    """Return [blocks, BLOCK], filled up."""
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK), value=filler).view(
        -1, BLOCK
    )


def _exponents(old: Tensor, mantissa: int) -> Tensor:
    exponent = (old >> mantissa).bitwise_and_((1 << (15 - mantissa)) - 1)
    return _in_blocks(exponent, _NO_WEIGHT)


def _running(widths: _Array) -> _Array:
    """Return running sums of each block, which fit 16 bits. numpy's take four times as long."""
    sums: _Array = torch.from_numpy(widths.view(np.int16)).cumsum(1, dtype=torch.int16).numpy()
    return sums.view(np.uint16)


def _repeated(flags: _Array) -> _Array:
    """Return each flag for the `GROUP` elements of its group."""
    repeated: _Array = (flags * np.uint32(0x01010101)).view(np.bool_)
    return repeated


def _words(bits: _Array) -> _Array:
    words: _Array = (bits.astype(np.int64) + 31) // 32
    return words


def _choose(z: _Array, exponent: _Array, numel: int) -> _Array:
    """Return c of each block from the mean size of its changes, in a quarter of the elements."""
    exponent, z = exponent[:, ::4].astype(np.int32), np.minimum(z[:, ::4], 255).astype(np.int32)
    exponent[exponent == _NO_WEIGHT] = 0
    top = exponent.max(1, keepdims=True)
    total = ((z << 14) >> np.minimum(top - exponent, 31)).sum(1, dtype=np.int32)
    count = np.minimum(numel - BLOCK * np.arange(len(z)), BLOCK)
    mean = (total // ((count + 3) // 4)).astype(np.float32)
    c = top[:, 0] - 14 + (mean.view(np.int32) >> 23) - 127
    chosen: _Array = np.clip(c, 0, 255).astype(np.int16)
    return chosen


def _encode(mantissa: int, old: Tensor, new: Tensor) -> tuple[_Array, _Array]:
    """Return headers and words of one chunk."""
    numel = old.numel()
    change = _ordinal(new).sub_(_ordinal(old))  # modulo 2^16, like the sum in decode
    sign = change >> 15
    z = _in_blocks(change.bitwise_left_shift_(1).bitwise_xor_(sign), 0).numpy().view(np.uint16)
    exponent = _exponents(old, mantissa).numpy()
    c = _choose(z, exponent, numel)
    rare = exponent > c[:, None]
    flags = (rare & (z != 0)).view(np.uint32) != 0
    silent = rare & ~_repeated(flags)
    flagged = silent.sum(1, dtype=np.int32) > BLOCK // GROUP
    k = np.clip(c[:, None] - exponent, 0, MAX_LOW_BITS).view(np.uint16)
    high = z >> k
    zeros = np.minimum(high, ESCAPE)
    widths = zeros + np.uint16(1)
    if flagged.any():
        widths *= ~(silent & flagged[:, None])
    ends, low_ends = _running(widths), _running(k)
    escaped = np.flatnonzero(zeros == ESCAPE)
    unary, low = _words(ends[:, -1]), _words(low_ends[:, -1])
    escapes = (np.bincount(escaped // BLOCK, minlength=len(z)) + 1) // 2
    words = flagged * FLAG_WORDS + unary + escapes + low
    plain_words = (np.minimum(numel - BLOCK * np.arange(len(z)), BLOCK) + 1) // 2
    uncompressed = words >= plain_words
    words = np.where(uncompressed, plain_words, words)
    headers = words | c.astype(np.int64) << 16 | flagged.astype(np.int64) << 24
    headers[uncompressed] = words[uncompressed] | UNCOMPRESSED << 24
    stops = words.cumsum()
    if uncompressed.any():  # such a block has no codes
        z[uncompressed] = k[uncompressed] = widths[uncompressed] = low[uncompressed] = 0
        flagged &= ~uncompressed
        high, ends, low_ends = z >> k, _running(widths), _running(k)
        escaped = np.flatnonzero(high >= ESCAPE)
    starts, low_starts = stops - words, stops - low

    out = np.zeros(int(stops[-1]) + 2, np.uint32)
    at = starts[flagged, None] + np.arange(FLAG_WORDS)
    out[at] = np.packbits(flags[flagged], axis=1, bitorder="little").view(np.uint32)
    first = starts + flagged * FLAG_WORDS
    coded = widths != 0
    _write(out, first, coded, ends - coded)
    _write(out, low_starts, z ^ (high << k), low_ends - k)
    out.view(np.uint16)[_escapes(escaped, low_starts)] = z.ravel()[escaped]
    for block in np.flatnonzero(uncompressed):
        part = new[block * BLOCK :][:BLOCK].numpy().view(np.uint16)
        out[starts[block] :].view(np.uint16)[: len(part)] = part
    return headers.astype(np.uint32), out[:-2]


def _escapes(at: _Array, low_starts: _Array) -> _Array:
    """Return the places, in 16 bits, of elements that are sent as they are."""
    row = at // BLOCK
    places: _Array = 2 * low_starts[row] - 1 - (np.arange(len(row)) - np.searchsorted(row, row))
    return places


def _write(words: _Array, starts: _Array, values: _Array, places: _Array) -> None:
    """Add values of each block, which do not overlap, at ascending places in bits."""
    word, shift = (places >> 5).ravel(), (places & 31).ravel().astype(np.uint32)
    is_last = np.ones(len(word), np.bool_)
    np.not_equal(word[1:], word[:-1], out=is_last[:-1])
    is_last[BLOCK - 1 :: BLOCK] = True
    last = np.flatnonzero(is_last)
    values = values.ravel().astype(np.uint32)
    sums = np.add.reduceat(values << shift, np.append(0, last[:-1] + 1)) if len(last) else values
    at = word[last] + starts[last // BLOCK]
    words[at] |= sums
    # the last value of a word may go on in the next one
    words[at + 1] |= (values[last] >> 1) >> (31 - shift[last])


def _decode_(mantissa: int, weights: Tensor, headers: _Array, words: _Array) -> None:
    count = headers.astype(np.int64) & 0xFFFF
    c, mode = (headers >> 16).astype(np.uint8).astype(np.int16), headers >> 24
    flagged, uncompressed = mode == FLAGS, mode == UNCOMPRESSED
    stops = count.cumsum()
    starts = stops - count
    exponent = _exponents(weights, mantissa).numpy()
    k = np.clip(c[:, None] - exponent, 0, MAX_LOW_BITS).view(np.uint16)
    low_ends = _running(k)
    low_starts = stops - _words(low_ends[:, -1])
    words = np.concatenate([words, np.zeros(2, np.uint32)])

    # distances between the ones of codes; of a block's first from where its codes begin
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    bits[-1] = 1  # behind all codes
    ones = np.flatnonzero(bits.view(np.bool_))
    first = 32 * (starts + flagged * FLAG_WORDS)
    before = np.searchsorted(ones, first)
    if flagged.any():
        flags = np.ones((len(c), BLOCK // GROUP), np.bool_)
        packed = words[starts[flagged, None] + np.arange(FLAG_WORDS)]
        flags[flagged] = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little")
        coded = (exponent <= c[:, None]) | _repeated(flags)
        rank = _running(coded.astype(np.int16))
    else:
        coded, rank = None, np.arange(1, BLOCK + 1)[None, :]
    if (before + rank[:, -1] >= len(ones))[~uncompressed].any():
        raise ValueError("codes are missing")
    gaps = np.diff(ones.astype(np.uint16), prepend=np.uint16(0))  # modulo 2^16
    gaps[before] = ones[before] - first + 1
    zeros = gaps.take((before - 1)[:, None] + rank, mode="clip") - np.uint16(1)
    if coded is not None:
        zeros *= coded
    if (zeros[~uncompressed] > ESCAPE).any():
        raise ValueError("a code is too long")

    place = (32 * low_starts).astype(np.int32)[:, None] + (low_ends - k)
    at_any_byte = np.lib.stride_tricks.as_strided(
        words, (4 * len(words) - 3,), (1,), writeable=False
    )
    low = at_any_byte.take(place >> 3, mode="clip") >> (place & 7).astype(np.uint32)
    z = (zeros << k) | (low.astype(np.uint16) & ((np.uint16(1) << k) - np.uint16(1)))
    escaped = np.flatnonzero((zeros == ESCAPE) & ~uncompressed[:, None])
    z.ravel()[escaped] = words.view(np.uint16)[_escapes(escaped, low_starts)]
    change = torch.from_numpy(z.view(np.int16)).view(-1)[: weights.numel()]
    change = ((change >> 1) & 0x7FFF).bitwise_xor_((change & 1).neg_())
    weights.copy_(_ordinal(change.add_(_ordinal(weights))))
    for block in np.flatnonzero(uncompressed):
        part = weights[block * BLOCK :][:BLOCK]
        part.copy_(torch.from_numpy(words[starts[block] :].view(np.int16)[: len(part)].copy()))

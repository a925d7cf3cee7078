"""Lossless changes of 16-bit weights by one optimizer step, in units of the last place.

Sender and receiver hold the old weights, so only the change is sent. Read as integers in the order
of their values, neighbouring 16-bit floats differ by 1. The change of a weight is a small integer,
and its size depends on the weight's exponent, which both sides have. Elements are ordered by their
old exponent and packed 8, 4, 2 or 1 to a byte, by exponent. zstd's Huffman coder codes the bytes:
if a byte holds several elements, each takes a fraction of a bit. An element that does not fit its
width is sent uncompressed, and so is a chunk that does not shrink.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ds_ckpt.compression.base import on_host

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_T = TypeVar("_T")
CHUNK = 1 << 19
"""Elements that are coded together; they fit in a processor's cache."""
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Ranks of this node: torchrun's, DeepSpeed's launcher's, two of mpirun."""
_WIDTHS = (1, 2, 4, 8)
_MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
_SIZES = 16
"""A change takes 0 to 15 bits; larger ones are sent uncompressed."""
_SAMPLE = 1 << 14
"""Elements of a chunk from which widths are chosen."""
_OWN_CODE = 1 << 11
"""Bytes of one exponent that are worth a Huffman table of their own."""
_HEADER = struct.Struct("<II")
"""Bytes of the coded elements, 0 for an uncompressed chunk; number of uncompressed elements."""
_LN_2 = math.log(2.0)
_LITERALS_ARE_CODED = 1002
"""zstd's `ZSTD_c_literalCompressionMode`, which Python's module does not name."""
_HUFFMAN_ONLY: dict[int, int] = {
    zstd.CompressionParameter.compression_level: 1,
    zstd.CompressionParameter.strategy: zstd.Strategy.fast,
    zstd.CompressionParameter.target_length: 1 << 17,  # positions between looks for a repetition
    zstd.CompressionParameter.min_match: 7,
    zstd.CompressionParameter.hash_log: 6,
    zstd.CompressionParameter.window_log: 17,
    _LITERALS_ARE_CODED: 1,
}
"""zstd's Huffman coder almost without a search for repetitions, which costs bits and time."""


def encode(old: Tensor, new: Tensor) -> Tensor:
    """Encode the change between two flat tensors of bf16 or fp16 on one device, exactly.

    Returns uint8 on the CPU, at most 2 bytes per element and 8 per chunk. Raises TypeError for
    another dtype.
    """
    chunks = old.view(torch.int16).split(CHUNK), new.view(torch.int16).split(CHUNK)
    data = b"".join(_map(old.device, functools.partial(_encode, _mantissa(old)), *chunks))
    return _tensor(data, torch.uint8, torch.device("cpu"))


def decode_(weights: Tensor, payload: Tensor) -> None:
    """Turn the old weights into the new ones, in place.

    Raises TypeError for another dtype, ValueError for a damaged payload or one of other weights.
    """
    decode = functools.partial(_decode_, _mantissa(weights))
    data, at = memoryview(payload.numpy().tobytes()), 0
    chunks, coded = weights.view(torch.int16).split(CHUNK), []
    try:
        for chunk in chunks:
            length, escapes = _HEADER.unpack_from(data, at)
            end = at + _HEADER.size + length + 2 * (escapes if length else chunk.numel())
            coded.append(data[at:end])
            at = end
        if at <= len(data):
            _map(weights.device, decode, chunks, coded)
    except (struct.error, zstd.ZstdError, RuntimeError, ValueError) as error:
        raise ValueError(f"not a change of {weights.numel()} weights: {error}") from error
    if at != len(data):
        raise ValueError(f"{len(data)} bytes, where {weights.numel()} weights have {at}")


def _map(device: torch.device, code: Callable[..., _T], *chunks: Sequence[Any]) -> list[_T]:
    """Apply `code` to every chunk, on CPUs in threads.

    Chunks are independent, and what takes time releases Python's lock. On an accelerator the order
    of operators is that of the caller's stream, which other threads do not have.
    """
    threads = min(_threads(), len(chunks[0])) if on_host(device) else 1
    if threads < 2 or not threading.main_thread().is_alive():  # no thread starts at the very end
        return list(map(code, *chunks))
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


def _encode(mantissa: int, old: Tensor, new: Tensor) -> bytes:
    # modulo 2^16, like the sum in decode; the largest are sent uncompressed
    change = _ordinal(new).sub_(_ordinal(old)).clamp_(-0x4000, 0x3FFF)
    sign = change >> 15
    change = change.bitwise_left_shift_(1).bitwise_xor_(sign)  # 0, -1, 1, ... as 0, 1, 2, ...
    exponent = _exponents(old, mantissa)
    widths = _choose(change, exponent, 1 << (15 - mantissa))
    order, runs = _order(exponent, widths)
    sizes = [sum(run) for run in runs]
    groups = [
        group.clamp(max=(1 << width) - 1).to(torch.uint8)
        for group, width in zip(change.index_select(0, order).split(sizes), _WIDTHS, strict=True)
    ]
    coder = zstd.ZstdCompressor(options=_HUFFMAN_ONLY)
    coded = [bytes(widths)]
    for width, group, run in zip(_WIDTHS, groups, runs, strict=True):
        packed, last, start = _pack(group, width), group.numel(), 0
        for end in itertools.accumulate(run):
            stop = end * width // 8 if end < last else len(packed)
            if stop - start >= (_OWN_CODE if end < last else 1):
                coded.append(coder.compress(packed[start:stop], zstd.ZstdCompressor.FLUSH_BLOCK))
                start = stop
    coded.append(coder.flush())
    data = b"".join(coded)
    escapes = new[order[_whole(groups)]].cpu()
    if len(data) + 2 * escapes.numel() >= 2 * old.numel():
        return _HEADER.pack(0, 0) + new.cpu().numpy().tobytes()
    return _HEADER.pack(len(data), escapes.numel()) + data + escapes.numpy().tobytes()


def _decode_(mantissa: int, weights: Tensor, data: memoryview) -> None:
    """Decode one chunk."""
    length, _ = _HEADER.unpack_from(data)
    at, end = _HEADER.size, _HEADER.size + length
    whole = _tensor(data[end:], torch.int16, weights.device)
    if length == 0:
        weights.copy_(whole)
        return
    exponents = 1 << (15 - mantissa)
    widths = list(data[at : at + exponents])
    packed = _tensor(zstd.decompress(data[at + exponents : end]), torch.uint8, weights.device)
    order, runs = _order(_exponents(weights, mantissa), widths)
    sizes = [sum(run) for run in runs]
    parts = packed.split([-(-n * w // 8) for n, w in zip(sizes, _WIDTHS, strict=True)])
    groups = [_unpack(p, w)[:n] for p, w, n in zip(parts, _WIDTHS, sizes, strict=True)]
    change = torch.cat(groups).to(torch.int16)
    change = (change >> 1).bitwise_xor_((change & 1).neg_())
    change = torch.empty_like(change).scatter_(0, order, change)
    weights.copy_(_ordinal(change.add_(_ordinal(weights))))
    weights[order[_whole(groups)]] = whole


def _tensor(data: bytes | memoryview, dtype: torch.dtype, device: torch.device) -> Tensor:
    # torch.frombuffer refuses what is empty
    return torch.frombuffer(bytearray(data) or bytearray(8), dtype=dtype).to(device)[
        : len(data) // dtype.itemsize
    ]


def _ordinal(bits: Tensor) -> Tensor:
    """Map bits to int16 in the order of the floats, negative zero to -1. Its own inverse."""
    return (bits >> 15).bitwise_and_(0x7FFF).bitwise_xor_(bits)


def _exponents(bits: Tensor, mantissa: int) -> Tensor:
    return (bits >> mantissa).bitwise_and_((1 << (15 - mantissa)) - 1).to(torch.uint8)


def _choose(change: Tensor, exponent: Tensor, exponents: int) -> list[int]:
    """Return for each exponent the index of the width with the fewest bits."""
    every = max(1, change.numel() // _SAMPLE)
    change, exponent = change[::every], exponent[::every].to(torch.int32)
    size = torch.frexp(change.to(torch.float32))[1]
    counts = torch.bincount(exponent * _SIZES + size, minlength=_SIZES * exponents).cpu()
    counts = counts.view(exponents, _SIZES).double()
    total = counts.sum(1)
    shares = counts / total.clamp(min=1).unsqueeze(1)
    # of the sizes, and of the values of one size, which are about equally frequent
    entropy = torch.special.entr(shares).sum(1) / _LN_2
    entropy += shares @ (torch.arange(_SIZES, dtype=torch.float64, device="cpu") - 1).clamp(min=0)
    costs = []
    for width in _WIDTHS:
        escapes = counts[:, width + 1 :].sum(1) + counts[:, width] * 2.0 ** (1 - width)
        # a code of Huffman's has at least one bit a byte
        costs.append(escapes * 16 + total * entropy.clamp(min=width / 8))
    widths: list[int] = torch.stack(costs).argmin(0).tolist()
    return widths


def _order(exponent: Tensor, widths: list[int]) -> tuple[Tensor, list[list[int]]]:
    """Return the order by width, then by exponent, and counts by width and exponent."""
    by_width = torch.tensor(widths, dtype=torch.int64, device="cpu").argsort(stable=True)
    ranks = by_width.argsort().to(torch.uint8)
    keys = ranks.to(exponent.device).index_select(0, exponent.to(torch.int32))
    counts = torch.bincount(exponent, minlength=len(widths)).cpu().tolist()
    runs = [[n for n, w in zip(counts, widths, strict=True) if w == i] for i in range(4)]
    if on_host(keys.device):  # numpy counts where torch compares: 1.03x of a step
        return torch.from_numpy(np.argsort(keys.numpy(), kind="stable")), runs
    return torch.argsort(keys, stable=True), runs


def _whole(groups: Sequence[Tensor]) -> Tensor:
    """Return indices, through the groups of all widths, of elements that do not fit."""
    tops = [(1 << width) - 1 for width in _WIDTHS]
    if on_host(groups[0].device):  # torch's: 1.15x of a step; with its argsort 1.2x of coding
        masks = [group.numpy() == top for group, top in zip(groups, tops, strict=True)]
        return torch.from_numpy(np.flatnonzero(np.concatenate(masks)))
    return torch.cat([g == top for g, top in zip(groups, tops, strict=True)]).nonzero().view(-1)


def _pack(values: Tensor, width: int) -> bytes:
    """Pack elements of `width` bits, the first lowest in its byte."""
    each = 8 // width
    rows = torch.nn.functional.pad(values, (0, -values.numel() % each)).view(-1, each)
    packed = rows[:, 0].clone()
    for column in range(1, each):
        packed |= rows[:, column] << (column * width)
    return packed.cpu().numpy().tobytes()


def _unpack(packed: Tensor, width: int) -> Tensor:
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & ((1 << width) - 1)).view(-1)

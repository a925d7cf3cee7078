"""Lossless changes of 16-bit weights by one optimizer step, in units of the last place.

Sender and receiver hold the old weights, so only the change is sent. Read as integers in the order
of their values, neighbouring 16-bit floats differ by 1. The change of a weight is a small integer,
and its size depends on the weight's exponent, which both sides have. Elements are ordered by their
old exponent and packed 8, 4, 2 or 1 to a byte, by exponent. zstd's Huffman coder codes the bytes:
if a byte holds several elements, each takes a fraction of a bit. An element that does not fit its
width is sent uncompressed, and so is a chunk that does not shrink.
"""

from __future__ import annotations

import itertools
import math
import struct
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ds_ckpt.compression.base import on_host

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHUNK = 1 << 19
"""Elements that are coded together; they fit in a processor's cache."""
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
    mantissa = _mantissa(old)
    chunks = zip(
        old.view(torch.int16).split(CHUNK), new.view(torch.int16).split(CHUNK), strict=True
    )
    data = b"".join(_encode(before, after, mantissa) for before, after in chunks)
    return _tensor(data, torch.uint8, torch.device("cpu"))


def decode_(weights: Tensor, payload: Tensor) -> None:
    """Turn the old weights into the new ones, in place.

    Raises TypeError for another dtype, ValueError for a damaged payload or one of other weights.
    """
    mantissa = _mantissa(weights)
    data, at = memoryview(payload.numpy().tobytes()), 0
    for chunk in weights.view(torch.int16).split(CHUNK):
        try:
            at = _decode_(chunk, data, at, mantissa)
        except (struct.error, zstd.ZstdError, RuntimeError, ValueError) as error:
            raise ValueError(f"not a change of {weights.numel()} weights: {error}") from error
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes more than {weights.numel()} weights have")


def _mantissa(weights: Tensor) -> int:
    if weights.dtype not in _MANTISSA:
        raise TypeError(f"lossless changes need bf16 or fp16 weights, found {weights.dtype}")
    return _MANTISSA[weights.dtype]


def _encode(old: Tensor, new: Tensor, mantissa: int) -> bytes:
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


def _decode_(weights: Tensor, data: memoryview, at: int, mantissa: int) -> int:
    """Decode one chunk. Returns the offset of the next one."""
    length: int
    escapes: int
    length, escapes = _HEADER.unpack_from(data, at)
    at += _HEADER.size
    end = at + length + 2 * (escapes if length else weights.numel())
    whole = _tensor(data[at + length : end], torch.int16, weights.device)
    if length == 0:
        weights.copy_(whole)
        return end
    exponents = 1 << (15 - mantissa)
    widths = list(data[at : at + exponents])
    packed = _tensor(
        zstd.decompress(data[at + exponents : at + length]), torch.uint8, weights.device
    )
    order, runs = _order(_exponents(weights, mantissa), widths)
    sizes = [sum(run) for run in runs]
    parts = packed.split([-(-n * w // 8) for n, w in zip(sizes, _WIDTHS, strict=True)])
    groups = [_unpack(p, w)[:n] for p, w, n in zip(parts, _WIDTHS, sizes, strict=True)]
    change = torch.cat(groups).to(torch.int16)
    change = (change >> 1).bitwise_xor_((change & 1).neg_())
    change = torch.empty_like(change).scatter_(0, order, change)
    weights.copy_(_ordinal(change.add_(_ordinal(weights))))
    weights[order[_whole(groups)]] = whole
    return end


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
    if on_host(keys.device):  # numpy counts where torch compares
        return torch.from_numpy(np.argsort(keys.numpy(), kind="stable")), runs
    return torch.argsort(keys, stable=True), runs


def _whole(groups: Sequence[Tensor]) -> Tensor:
    """Return indices, through the groups of all widths, of elements that do not fit."""
    tops = [(1 << width) - 1 for width in _WIDTHS]
    if on_host(groups[0].device):
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

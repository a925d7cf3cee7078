"""The wire format of compressed gradients, and the bytes that payloads are made of.

One all-to-all a bucket carries one packet from each rank to each other rank:

    header | payload of tensor 1 | payload of tensor 2 | ... | zeros up to 16 bytes

All integers are little-endian. Every payload, and every section inside one, starts at a multiple of
8 bytes and is filled up with zeros. The size of a payload depends on the number of entries alone,
so sender and receiver compute it independently. n is the number of entries of the shard.

header, 16 bytes (the same 8 bytes twice):
    byte 0      version of this format
    byte 1      flags; bit 0: the sender found a non-finite value in this bucket
    bytes 2-7   zero

payloads:
    uncompressed    n values in the gradient's dtype
    dense           n values, fp32 | bf16 | fp16
    quantize        bf16 scales[ceil(n / block)] | codes, low bits of a byte first. 8, 4, 2 bits:
                    one plane of codes. 3 bits: the low two bits of all codes, then the high bits
    topk            values[count] | places, uint8[k, blocks]: the row of an entry in its block.
                    values: fp32 | bf16 | int8, the last as bf16 scales[ceil(count / 64)] | int8
    entropy_coded   segments of at most 2^20 entries: fp32 mean of level 0, fp32 level 1, uint8 k of
                    the first and of the second sequence, zeros up to 16 bytes | of each part of
                    2^15 entries uint16 entries sent, uint16 entries above level 0, int32 end of its
                    code in bits | the parts' Rice codes: unary parts, low bits | zeros

changes of resident weights, all-gathered or sent to replicas; a word has 32 bits, the first lowest:
    int64 bytes of the payload | int32 of each block: words, c << 16, mode << 24 | all blocks
    a block: flags (8 words, mode `FLAGS` only) | unary | escapes, int16 z of codes with `ESCAPE`
    zeros, the last first | low bits. Each part ends with a word (`weights.lossless` has the code)

powersgd sends no packets of its own. Factors are all-reduced in fp32. Two or three ranks instead
send each other fp32 numbers that must stay exact, then bf16 factors (`exchange.low_rank`). The
version also counts changes of these, of sums inside a node and of weights (`weights.lossless`).
Ranks compare it at attach.
"""

import torch
from torch import Tensor

VERSION = 3
PACKET_HEADER_BYTES = 16
ALIGNMENT_BYTES = 8
"""Payloads and the sections inside them start at multiples, so any dtype can be viewed."""
_NON_FINITE = 1


def write_header(headers: Tensor, finite: Tensor) -> None:
    """Write the header of each packet: uint8 [packets, 16]; `finite`: bool [] on their device."""
    word = torch.where(finite, VERSION, VERSION | _NON_FINITE << 8)
    section(headers, 0, 2, torch.int64).copy_(word)


def read_headers(headers: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether all senders' values are finite, and whether all headers have this version.

    Both are bool [] on the headers' device; the host does not wait.
    """
    words = section(headers, 0, 2, torch.int64)
    return (words < 1 << 8).all(), (words & 0xFF == VERSION).all()


def aligned(size_bytes: int) -> int:
    """Round `size_bytes` up to the alignment of payloads."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def section(payload: Tensor, start_byte: int, count: int, dtype: torch.dtype) -> Tensor:
    """View `count` elements of `dtype` at `start_byte` of a uint8 payload, or of each row."""
    if count == 0:  # an empty row may lie where no `dtype` can
        return payload.new_empty(*payload.shape[:-1], 0, dtype=dtype)
    return payload.narrow(-1, start_byte, count * dtype.itemsize).view(dtype)


def write_section(payload: Tensor, start_byte: int, source: Tensor) -> int:
    """Copy flat `source`, or rows to rows, to `start_byte`; return the start of the next section.

    Bytes up to the alignment are zeroed.
    """
    size_bytes = source.shape[-1] * source.dtype.itemsize
    end_byte = start_byte + aligned(size_bytes)
    section(payload, start_byte, source.shape[-1], source.dtype).copy_(source)
    if end_byte > start_byte + size_bytes:
        payload[..., start_byte + size_bytes : end_byte].zero_()
    return end_byte


def saturating_cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast finite fp32 to `dtype`, clamped to its range: rounding never makes an inf."""
    if dtype == torch.float32:
        return values
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)

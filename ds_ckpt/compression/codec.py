"""How a flat piece of a gradient becomes bytes: the codec protocol, value formats, `Dense`.

A codec works on one flat fp32 tensor (a shard) and one uint8 payload whose size depends on the
number of elements alone, so that sender and receiver compute it without talking. Selection of
entries lives in `topk`; what a codec left behind is carried by `feedback`.

The contract every codec keeps, elementwise and in fp32: `values before = values after + decoded`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

ALIGNMENT_BYTES = 8
"""Payloads and the sections inside them start at multiples of this, so any dtype can be viewed."""

ValueFormat = Literal["fp32", "bf16", "int8"]
VALUE_FORMATS: tuple[ValueFormat, ...] = ("fp32", "bf16", "int8")

INT8_GROUP = 64
"""Consecutive int8 values that share one bf16 scale: a quarter of a bit per value."""

_INT8_MAX = 127


Section = Callable[[], AbstractContextManager[None]]
"""Opened around a part of the work by whoever wants to time it."""


@dataclass(frozen=True)
class Cost:
    """What compressing costs, counted, not measured: to rank methods, not to predict a time.

    Attributes:
        payload_bytes: what travels.
        memory_bytes: read from and written to memory, what stays in a cache left out.
        operations: arithmetic on single entries, comparisons and casts included. Those of `exact`
            selection and of index arithmetic are not vectorized and weigh more than others.
    """

    payload_bytes: int
    memory_bytes: int
    operations: int


class Codec(Protocol):
    """Turns a flat fp32 shard into a payload and back. Stateless; equal on every process."""

    def packed_bytes(self, numel: int) -> int:
        """Size of the payload for `numel` elements, a multiple of 8. Does no work."""
        ...

    def cost(self, numel: int) -> Cost:
        """Of packing `numel` elements, residual included. Does no work."""
        ...

    def pack(self, values: Tensor, out: Tensor, selecting: Section = nullcontext) -> None:
        """Write the payload; leave in `values` what the receiver will not see.

        Args:
            values: fp32 [n], contiguous, finite. The decoded payload is subtracted in place.
            out: uint8 [packed_bytes(n)], 8-byte aligned. Every byte is written.
            selecting: entered while entries are chosen.
        """
        ...

    def unpack_add(self, payload: Tensor, into: Tensor, scale: float = 1.0) -> None:
        """Add `decoded * scale` to `into` (fp32 [n], contiguous) in place."""
        ...


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to the alignment of payloads."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def section(payload: Tensor, start_byte: int, count: int, dtype: torch.dtype) -> Tensor:
    """View `count` elements of `dtype` that start at `start_byte` of a uint8 payload."""
    return payload[start_byte : start_byte + count * dtype.itemsize].view(dtype)


def write_section(payload: Tensor, start_byte: int, source: Tensor) -> int:
    """Copy flat `source` to `start_byte`, zero up to the alignment, return the next start."""
    size_bytes = source.numel() * source.dtype.itemsize
    end_byte = start_byte + aligned(size_bytes)
    section(payload, start_byte, source.numel(), source.dtype).copy_(source)
    if end_byte > start_byte + size_bytes:
        payload[start_byte + size_bytes : end_byte].zero_()
    return end_byte


def saturating_cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite fp32 to `dtype`, clamped to its range: rounding never makes an inf."""
    if dtype == torch.float32:
        return values
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def value_bytes(count: int, fmt: ValueFormat) -> int:
    """Bytes that `count` values take in format `fmt`, scales and alignment included."""
    if fmt == "fp32":
        return aligned(4 * count)
    if fmt == "bf16":
        return aligned(2 * count)
    return aligned(2 * -(-count // INT8_GROUP)) + aligned(count)


def encode_values(values: Tensor, fmt: ValueFormat, out: Tensor) -> Tensor:
    """Write fp32 [count] to uint8 [value_bytes(count, fmt)]; return what will be decoded, fp32."""
    if fmt == "int8":
        return _encode_int8(values, out)
    sent = saturating_cast(values, torch.float32 if fmt == "fp32" else torch.bfloat16)
    write_section(out, 0, sent)
    return sent.float()


def decode_values(payload: Tensor, count: int, fmt: ValueFormat) -> Tensor:
    """The fp32 [count] that `encode_values` returned, bitwise. May alias `payload` for fp32."""
    if fmt == "fp32":
        return section(payload, 0, count, torch.float32)
    if fmt == "bf16":
        return section(payload, 0, count, torch.bfloat16).float()
    groups = -(-count // INT8_GROUP)
    scales = section(payload, 0, groups, torch.bfloat16).float()
    quantized = section(payload, aligned(2 * groups), count, torch.int8)
    return _dequantize(quantized, scales)


def _grouped(values: Tensor) -> Tensor:
    """[count] as [groups, INT8_GROUP], the last group filled up with zeros."""
    missing = -values.numel() % INT8_GROUP
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, INT8_GROUP)


def _dequantize(quantized: Tensor, scales: Tensor) -> Tensor:
    decoded = _grouped(quantized).float().mul_(scales.unsqueeze(1))
    return decoded.view(-1)[: quantized.numel()]


def _encode_int8(values: Tensor, out: Tensor) -> Tensor:
    groups = _grouped(values)
    # 127 times a scale stays finite: the largest fp32 / 127 is rounded down in bf16.
    scales = groups.abs().amax(1).div_(_INT8_MAX).to(torch.bfloat16)
    start_byte = write_section(out, 0, scales)
    wide = scales.float()
    # A group of zeros, or of denormals too small for a bf16 scale, sends zeros and keeps its
    # values as residual; without the 1 it would cast NaN to an integer, which is undefined.
    # Dividing (not multiplying by a reciprocal, which would overflow) is safe for denormal
    # scales; the clamp catches their coarse rounding.
    divisor = torch.where(wide == 0, torch.ones_like(wide), wide).unsqueeze(1)
    quantized = groups.div(divisor).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    flat = quantized.view(-1)[: values.numel()]
    write_section(out, start_byte, flat)
    return _dequantize(flat, wide)


@dataclass(frozen=True)
class Dense:
    """Every entry, in one floating-point type; 16-bit types round, the rest stays as residual."""

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"Dense sends float32, bfloat16 or float16, not {self.dtype}")

    def packed_bytes(self, numel: int) -> int:
        return aligned(numel * self.dtype.itemsize)

    def cost(self, numel: int) -> Cost:
        payload_bytes = self.packed_bytes(numel)
        # read and zeroed; or clamped, cast, cast back and subtracted
        exact = self.dtype == torch.float32
        memory_bytes = 8 * numel + (1 if exact else 3) * payload_bytes
        return Cost(payload_bytes, memory_bytes, 0 if exact else 5 * numel)

    def pack(self, values: Tensor, out: Tensor, selecting: Section = nullcontext) -> None:
        sent = saturating_cast(values, self.dtype)
        write_section(out, 0, sent)
        if self.dtype == torch.float32:
            values.zero_()
        else:
            values.sub_(sent.float())

    def unpack_add(self, payload: Tensor, into: Tensor, scale: float = 1.0) -> None:
        add_scaled(into, section(payload, 0, into.numel(), self.dtype).float(), scale)


def add_scaled(into: Tensor, decoded: Tensor, scale: float) -> None:
    """`into += decoded * scale`, in place."""
    into.add_(decoded if scale == 1.0 else decoded * scale)

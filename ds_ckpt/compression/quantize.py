"""Few-bit values: every entry in 8, 4, 3 or 2 bits, with one bf16 scale per block of neighbours.

8, 4 and 3 bits: integer multiples of the scale, -2^(bits-1) to 2^(bits-1) - 1. The scale carries a
sign. With it the block's largest magnitude, of either sign, takes the end that reaches one further.
Zero stays zero; levels at odd halves would send noise where a gradient has none.

2 bits: the four Lloyd-Max levels of a Gaussian, at the scale with the least squared error. The sent
values are then a projection: the residual of a block never has more energy than the block.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_ckpt.compression import fused
from ds_ckpt.compression.base import Codec, Method, add_rows, on_host, row_groups
from ds_ckpt.compression.wire import aligned, section
from ds_ckpt.fields import WHOLE_NUMBER, Expects, Removed

Bits = Literal[8, 4, 3, 2]
BITS: tuple[Bits, ...] = (8, 4, 3, 2)
BlockSize = Literal[32, 64, 128, 256]
BLOCKS: tuple[BlockSize, ...] = (32, 64, 128, 256)

# Lloyd-Max for unit variance: levels +-0.4528 and +-1.510, the border halfway. The scale is the
# inner level; codes -2, -1, 0, 1 are -outer, -inner, inner, outer.
_OUTER = 1.510 / 0.4528
_BORDER = (0.4528 + 1.510) / 2
# y * (_SLOPE + _CURVE * |y|) is 1 at y = 1/2 and _OUTER at y = 3/2.
_CURVE = _OUTER / 1.5 - 2
_SLOPE = 2 - _CURVE / 2
# Squares of fp32 over- and underflow. Borders outside this range are moved into it. The block then
# uses one pair of levels alone, with the scale that fits them, and stays finite.
_BORDER_LIMITS = (2.0**-63, 2.0**63)

_BF16_MAX = torch.finfo(torch.bfloat16).max
# Entries processed at a time, multiples of every block: few enough for a CPU's cache.
_TILE_ELEMENTS = 1 << 18
_TILE_ELEMENTS_ACCELERATOR = 1 << 24
_WORD = {8: torch.int8, 4: torch.int16, 2: torch.int32, 1: torch.int64}
"""Integer with the int8 codes of one byte of output, by the width of a code."""
_PLANES: dict[Bits, tuple[int, ...]] = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}


class Quantize(Method, Codec):
    """Few-bit values: every entry of each remote shard is sent, in blocks that share a scale."""

    name = "quantize"
    about = "every entry in 8, 4, 3 or 2 bits; more bytes and a smaller error"
    example = '{"bits": 3}'
    presets = {f"{bits}bit": {"quantize": {"bits": bits}} for bits in (4, 3, 2)}
    titles = {f"{bits}bit": f"{bits}-bit quantization" for bits in (4, 3, 2)}
    removed = {
        "rotated": Removed(
            "rotated values trained no better", "remove it; write more bits", constant=False
        )
    }

    bits: Annotated[Bits, WHOLE_NUMBER, Expects("8, 4, 3 or 2", "3")] = Field(
        default=3,
        description="Bits of a value, beside 16 bits of scale per block. 8, 4 and 3: even steps "
        "up to the block's largest magnitude. 2: the four levels that suit a Gaussian best. "
        "Fewer are fewer bytes and a larger rounding error. On Gaussian entries in blocks of "
        "64 its RMS is 0.6%, 9.5%, 19% and 34% of theirs. 3 is the fewest that validation "
        "found equivalent to dense training with error feedback. 3 bits take 1.6 times, 2 bits "
        "twice as long to pack as 4.",
    )
    block: Annotated[BlockSize, WHOLE_NUMBER, Expects("32, 64, 128 or 256", "64")] = Field(
        default=64,
        description="Neighbouring entries that share a scale: 16 / block bits per element. Shorter "
        "blocks round finer and send more: at 3 bits 64 is 3.25 bits, 4.92 times less than bf16.",
    )

    def describe(self) -> str:
        """Return bits and block length."""
        return f"{self.bits}-bit values in blocks of {self.block}"

    def packed_bytes(self, numel: int) -> int:
        """Return the bytes of scales and codes."""
        code_bytes = sum(_plane_bytes(numel, width) for width in _PLANES[self.bits])
        return self._codes_start(numel) + aligned(code_bytes)

    def pack_rows(self, values: Tensor, out: Tensor) -> None:
        """Quantize each row; the rounding errors stay in `values`."""
        if fused.is_supported(values.device):
            fused.pack_quantized(values, out, self._kernel_options())
            return
        tile = _tile(values.device)
        for some, payloads in row_groups(values.shape[1], tile, values, out):
            self._pack_tiles(some, payloads, tile)

    def unpack_add_rows(self, payloads: Tensor, into: Tensor, scale: float = 1.0) -> None:
        """Add the decoded values of each payload."""
        if fused.is_supported(into.device):
            fused.unpack_add_quantized(payloads, into, scale, self._kernel_options())
            return
        for (some,) in row_groups(into.shape[0], _tile(into.device), payloads):
            self._unpack_add_tiles(some, into, scale)

    def _kernel_options(self) -> dict[str, Any]:
        least, most = _BORDER_LIMITS
        levels = {"BORDER": _BORDER, "LEAST": least, "MOST": most, "CURVE": _CURVE, "SLOPE": _SLOPE}
        return {"BITS": self.bits, "BLOCK": self.block, **levels}

    def _pack_tiles(self, values: Tensor, out: Tensor, tile: int) -> None:
        rows, numel = values.shape
        out.zero_()  # the fillers
        scales, planes = self._sections(out, numel)
        for start, stop, width in self._tiles(numel, tile):
            part = values[:, start:stop]
            blocks = part.view(rows, -1, width)
            quantized, scale = _gaussian(blocks) if self.bits == 2 else _linear(blocks, self.bits)
            scales[:, start // self.block : -(-stop // self.block)] = scale
            codes = quantized.new_zeros(rows, -(-(stop - start) // 8) * 8, dtype=torch.int8)
            codes[:, : stop - start] = quantized.flatten(1)
            for bits, plane in planes:
                _pack_bits(codes, bits, _of_plane(plane, bits, start, stop))
                codes = codes >> bits if bits < 8 else codes
            part.sub_(self._decode(quantized, scale))

    def _unpack_add_tiles(self, payloads: Tensor, into: Tensor, scale: float) -> None:
        numel = into.shape[0]
        scales, planes = self._sections(payloads, numel)
        for start, stop, width in self._tiles(numel, _tile(into.device)):
            codes: Tensor | None = None
            for bits, plane in reversed(planes):  # the top bits have the sign
                part = _unpack_bits(_of_plane(plane, bits, start, stop), bits)[:, : stop - start]
                codes = part if codes is None else codes << bits | part & ((1 << bits) - 1)
            assert codes is not None
            decoded = self._decode(
                codes.float().view(payloads.shape[0], -1, width),
                scales[:, start // self.block : -(-stop // self.block)],
            )
            add_rows(into[start:stop], decoded, scale)

    def _decode(self, quantized: Tensor, scale: Tensor) -> Tensor:
        """Multiply fp32 codes [rows, blocks, width], in place, by bf16 scales [rows, blocks].

        Returns [rows, n]. Equal at both ends.
        """
        levels = _gaussian_levels(quantized) if self.bits == 2 else quantized
        return levels.mul_(scale.float().unsqueeze(2)).flatten(1)

    def _codes_start(self, numel: int) -> int:
        return aligned(2 * -(-numel // self.block))

    def _sections(self, payloads: Tensor, numel: int) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return views of payloads: bf16 scales, and (bits, bytes) of each plane of codes."""
        scales = section(payloads, 0, -(-numel // self.block), torch.bfloat16)
        planes, start_byte = [], self._codes_start(numel)
        for bits in _PLANES[self.bits]:
            stop_byte = start_byte + _plane_bytes(numel, bits)
            planes.append((bits, payloads[:, start_byte:stop_byte]))
            start_byte = stop_byte
        return scales, planes

    def _tiles(self, numel: int, tile: int) -> Iterator[tuple[int, int, int]]:
        """Return (start, stop, block length): tiles of whole blocks, then a short last block.

        Short, not filled up: zeros would count in the fit of a scale.
        """
        whole = numel - numel % self.block
        for start in range(0, whole, tile):
            yield start, min(start + tile, whole), self.block
        if whole < numel:
            yield whole, numel, numel - whole


def _tile(device: torch.device) -> int:
    return _TILE_ELEMENTS if on_host(device) else _TILE_ELEMENTS_ACCELERATOR


def _plane_bytes(numel: int, bits: int) -> int:
    return -(-numel * bits // 8)


def _of_plane(plane: Tensor, bits: int, start: int, stop: int) -> Tensor:
    """Return the bytes of entries start to stop; `start` is a multiple of 8."""
    return plane[:, _plane_bytes(start, bits) : _plane_bytes(stop, bits)]


def _linear(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return whole codes in fp32 [rows, blocks, width] and signed bf16 scales [rows, blocks]."""
    reach = 1 << (bits - 1)
    low, high = blocks.amin(2), blocks.amax(2)
    largest = torch.where(-low > high, low, high)
    # clamped: `reach` times the scale must be finite, and bf16 rounds up
    limit = _BF16_MAX / reach
    scale = largest.div_(-reach).clamp_(-limit, limit).to(torch.bfloat16)
    wide = scale.float()
    # A block of zeros, or too small for a bf16 scale, sends zeros and keeps its values. The clamp
    # catches the coarse rounding of denormal scales, and the end that has one level less.
    divisor = torch.where(wide == 0, 1.0, wide).unsqueeze(2)
    return blocks.div(divisor).round_().clamp_(-reach, reach - 1), scale


def _gaussian(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes -2 to 1 in fp32 [rows, blocks, width] and bf16 scales [rows, blocks] >= 0."""
    rms = torch.linalg.vector_norm(blocks, dim=2).div_(math.sqrt(blocks.shape[2]))
    border = rms.mul_(_BORDER).clamp_(*_BORDER_LIMITS)
    in_borders = blocks.div(border.unsqueeze(2))
    quantized = in_borders.floor().clamp_(-2, 1)
    levels = _gaussian_levels(quantized.clone())
    fit = in_borders.mul_(levels).sum(2).div_(levels.square_().sum(2)).mul_(border)
    return quantized, fit.clamp_(max=_BF16_MAX / 4).to(torch.bfloat16)


def _gaussian_levels(quantized: Tensor) -> Tensor:
    """Convert codes -2, -1, 0, 1 to levels in units of the inner one, in place."""
    y = quantized.add_(0.5)
    return y.mul_(y.abs().mul_(_CURVE).add_(_SLOPE))


def _pack_bits(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write the low `bits` of int8 codes, 8 / bits of them a byte, to uint8 `out`."""
    # One word holds the codes of one byte of output: each moves down to its place.
    words, mask = codes[:, : out.shape[1] * (8 // bits)].view(_WORD[bits]), (1 << bits) - 1
    packed = words & mask
    for place in range(1, 8 // bits):
        packed |= (words >> ((8 - bits) * place)) & (mask << bits * place)
    out.copy_(packed.view(torch.uint8) if bits == 8 else packed)


def _unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Return int8 codes with the sign of their top bit, 8 / bits times as many as bytes."""
    if bits == 8:
        return packed.view(torch.int8)
    narrow, mask = packed.to(_WORD[bits]), (1 << bits) - 1
    # each to the top of its byte, from where an arithmetic shift brings the sign along
    words = (narrow & mask) << (8 - bits)
    for place in range(1, 8 // bits):
        words |= (narrow & (mask << bits * place)) << ((8 - bits) * (place + 1))
    return words.view(torch.int8) >> (8 - bits)

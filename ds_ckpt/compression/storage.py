"""How a residual is kept between steps: fp32, bf16, or int8 with a bf16 scale per 64 entries.

Rounding to nearest would lose every gradient below half a unit of what is already there, step after
step. Rounding here is stochastic: x goes to the unit above it with the probability of its share of
the way there, so each entry is within one unit and right on average:

    bf16   add 16 random bits to the fp32 pattern and cut its lower 16 off: exactly unbiased
    int8   scale = max |block| / 126.99, rounded up to bf16; code = floor(x / scale + u)

The random numbers come from a fixed table, a permutation of all 16-bit values, read from an offset
that is a hash of (seed, name, step, turn within the step): cheap, and the same after a resume. Over
the offsets every entry meets each value of the table once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ds_ckpt.compression.base import on_host

ResidualDtype = Literal["fp32", "bf16", "int8"]
TORCH_DTYPES: dict[ResidualDtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}
BLOCK = 64
_BF16_MAX = torch.finfo(torch.bfloat16).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# A little below 127: the product with a rounded reciprocal must not pass 127 + u.
_REACH = 126.99

_PERIOD = 1 << 16
"""Entries of the table, and of a tile on a CPU: few enough for its cache."""
_ROWS = 256
"""Tiles that an accelerator works on at once; they share one hash."""
_STRIDE = 257
"""From one tile's place in the table to the next one's."""


@dataclass(frozen=True)
class Stored:
    """One residual as it is kept.

    Attributes:
        values: [n], fp32, bf16 or int8.
        scales: bf16 [ceil(n / 64)] with int8 values, else None.
    """

    values: Tensor
    scales: Tensor | None = None

    @property
    def numel(self) -> int:
        return self.values.numel()

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,) if self.scales is None else (self.values, self.scales)

    def is_like(self, other: Stored) -> bool:
        """Whether `other` could take this one's place: same dtype, length and device."""
        return (
            self.values.dtype == other.values.dtype
            and self.numel == other.numel
            and self.device == other.device
        )

    def to(self, device: torch.device) -> Stored:
        # asynchronous from and to pinned memory, in the order of the current stream
        return Stored(*(t.to(device, non_blocking=True) for t in self.tensors))

    def copy_(self, source: Stored) -> None:
        for target, tensor in zip(self.tensors, source.tensors, strict=True):
            target.copy_(tensor, non_blocking=True)

    def decode(self, piece: Piece, out: Tensor) -> None:
        """Write entries [piece.start, piece.stop) to `out`, fp32, on the same device."""
        out.copy_(self.values[piece.start : piece.stop])
        if self.scales is not None:
            out.view(piece.shape).mul_(_scales(self.scales, piece).float().unsqueeze(-1))

    def decoded(self) -> Tensor:
        """All of it, a new fp32 tensor [n]."""
        out = torch.empty(self.numel, dtype=torch.float32, device=self.device)
        for piece in pieces(self.numel, self.device):
            self.decode(piece, out[piece.start : piece.stop])
        return out


@dataclass(frozen=True)
class Piece:
    """Entries [start, stop) as `shape` = (tiles, blocks, entries of a block)."""

    start: int
    stop: int
    shape: tuple[int, int, int]


def pieces(numel: int, device: torch.device) -> Iterator[Piece]:
    """Whole tiles, then whole blocks, then what is left as one short block."""
    rows = 1 if on_host(device) else _ROWS
    at = 0
    while numel - at >= _PERIOD:
        tiles = min(rows, (numel - at) // _PERIOD)
        yield Piece(at, at + tiles * _PERIOD, (tiles, _PERIOD // BLOCK, BLOCK))
        at += tiles * _PERIOD
    if blocks := (numel - at) // BLOCK:
        yield Piece(at, at + blocks * BLOCK, (1, blocks, BLOCK))
        at += blocks * BLOCK
    if at < numel:
        yield Piece(at, numel, (1, 1, numel - at))


class Storage:
    """Encodes working tensors to one dtype.

    Args:
        seed: of the rounding. Processes whose residuals are summed need different ones, or their
            rounding errors add up instead of averaging out.

    Raises:
        ValueError: `dtype` is none of the three.
    """

    def __init__(self, dtype: ResidualDtype, seed: int = 0) -> None:
        if dtype not in TORCH_DTYPES:
            raise ValueError(f"a residual's dtype is one of {list(TORCH_DTYPES)}, not {dtype!r}")
        self.dtype = dtype
        self._seed = seed
        self._tables: dict[torch.device, Tensor] = {}

    @property
    def rounds(self) -> bool:
        return self.dtype != "fp32"

    @property
    def entry_bytes(self) -> float:
        scale_bytes = torch.bfloat16.itemsize / BLOCK if self.dtype == "int8" else 0.0
        return TORCH_DTYPES[self.dtype].itemsize + scale_bytes

    @property
    def tables(self) -> list[Tensor]:
        """The tables of random numbers that are held, one a device: 0.8 MB each."""
        return list(self._tables.values())

    def prepare(self, device: torch.device) -> None:
        """Have the table there: a step would wait until it is copied."""
        if self.rounds:
            self._table(device)

    def shapes(self, numel: int) -> list[tuple[int, torch.dtype]]:
        """Length and dtype of each tensor of a `Stored` of `numel` entries."""
        values = (numel, TORCH_DTYPES[self.dtype])
        return [values, (-(-numel // BLOCK), torch.bfloat16)] if self.dtype == "int8" else [values]

    def encode(self, working: Tensor, into: Stored, name: str, step: int, turn: int) -> None:
        """Round `working` (fp32 [n]) to `into`, on the same device.

        Finite values stay finite up to 3.4e38 in magnitude.
        """
        scratch = working.new_empty(_largest_piece(working))
        for piece in pieces(working.numel(), working.device):
            x = working[piece.start : piece.stop].view(piece.shape)
            y = scratch[: x.numel()].view(piece.shape)
            random = self._random(piece, working.device, name, step, turn)
            if into.scales is None:
                torch.clamp(x, -_BF16_MAX, _BF16_MAX, out=y)
                y.view(torch.int32).add_(random).bitwise_and_(-(1 << 16))
            else:
                scale = _round_up(torch.maximum(x.amax(-1), -x.amin(-1)).div_(_REACH))
                _scales(into.scales, piece).copy_(scale)
                torch.mul(x, scale.reciprocal_().unsqueeze(-1), out=y)
                y.add_(random).floor_()
            into.values[piece.start : piece.stop].copy_(y.view(-1))

    def _random(
        self, piece: Piece, device: torch.device, name: str, step: int, turn: int
    ) -> Tensor:
        """A view of the table for the piece: int32 below 2^16 for bf16, fp32 in (0, 1) for int8.

        The same for a tile whether it is worked on alone or with others.
        """
        tile, column = divmod(piece.start, _PERIOD)
        group, row = divmod(tile, _ROWS)
        key = f"{self._seed} {step} {turn} {group} {name}".encode()
        hashed = int.from_bytes(hashlib.blake2b(key, digest_size=2).digest(), "little")
        _, _, width = piece.shape
        return self._table(device).as_strided(
            piece.shape, (_STRIDE, width, 1), hashed + row * _STRIDE + column
        )

    def _table(self, device: torch.device) -> Tensor:
        table = self._tables.get(device)
        if table is None:
            # repeated so that no read wraps around: hash < period, rows, one tile
            generator = torch.Generator("cpu").manual_seed(0)
            period = torch.randperm(_PERIOD, generator=generator, dtype=torch.int64, device="cpu")
            table = period.repeat(3)[: 2 * _PERIOD + _STRIDE * (_ROWS - 1)].to(torch.int32)
            if self.dtype == "int8":
                table = (table.float() + 0.5) / _PERIOD
            table = self._tables[device] = table.to(device)
        return table


def _largest_piece(working: Tensor) -> int:
    return max((p.stop - p.start for p in pieces(working.numel(), working.device)), default=0)


def _scales(scales: Tensor, piece: Piece) -> Tensor:
    """The piece's part of a residual's scales, [tiles, blocks]."""
    first, count = piece.start // BLOCK, math.prod(piece.shape[:2])
    return scales[first : first + count].view(piece.shape[:2])


def _round_up(scale: Tensor) -> Tensor:
    """To the next bf16 value, in place, in fp32; at least the smallest whose inverse is finite."""
    scale.clamp_(min=_SMALLEST_SCALE).view(torch.int32).add_((1 << 16) - 1).bitwise_and_(-(1 << 16))
    return scale

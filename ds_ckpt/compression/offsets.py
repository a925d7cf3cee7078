"""Which entries travel, in few bits: sets of positions as bytes whose number follows from counts.

Two codes. Both keep a set, so positions come back ascending whatever order they were chosen in.

`Ascending`, for k of n positions (Elias-Fano): the lower bits of each position as they are, the
upper ones as a bitmap in which position number i sets bit i + upper. At densities k / n up to a
tenth within 0.6 bits an entry of the entropy, log2(C(n, k)) / k; within 1 bit at a half.

`PerBlock`, for k of the rows of each block: the number of the set among all C(rows, k), counted in
the combinatorial number system, rank = C(o_1, 1) + C(o_2, 2) + ... for offsets o_1 < o_2 < ...
Several blocks' ranks are digits of one word of at most 62 bits, as one rank alone would waste up to
a bit. Within 0.15 bits an entry of the entropy at the densities where bits matter.

Words lie in planes: the lowest byte of every word, then the next of every word, and so on; what is
left of their bits in planes of 4, 2 and 1, several words to a byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_WORD_BITS = 62


@dataclass(frozen=True)
class Ascending:
    """k of n positions. `low` bits of each are kept as they are."""

    numel: int
    count: int
    low: int

    @classmethod
    def of(cls, numel: int, count: int) -> Ascending:
        near = max(0, int(math.log2(max(1, numel) / max(1, count))))
        codes = [cls(numel, count, low) for low in (near, near + 1)]
        return min(codes, key=lambda code: code.nbytes)

    @property
    def nbytes(self) -> int:
        return self._upper_bytes + _plane_bytes(self.count, self.low)

    @property
    def _upper_bytes(self) -> int:
        return -(-(self.count + (self.numel >> self.low)) // 8) if self.count else 0

    def pack(self, index: Tensor, out: Tensor) -> None:
        """Write ascending positions, int64 [count], to uint8 [nbytes]."""
        places = torch.arange(self.count, device=index.device).add_(index >> self.low)
        bitmap = torch.zeros(self._upper_bytes * 8, dtype=torch.bool, device=index.device)
        bitmap[places] = True
        out[: self._upper_bytes] = _bytes_of(bitmap)
        _write_planes(index, self.low, out[self._upper_bytes :])

    def unpack(self, packed: Tensor) -> Tensor:
        """The positions, int64 [count], from uint8 [nbytes]."""
        places = _bits_of(packed[: self._upper_bytes]).view(-1).nonzero().view(-1)
        upper = places.sub_(torch.arange(self.count, device=packed.device))
        low = _read_planes(packed[self._upper_bytes :], self.count, self.low)
        return low.add_(upper << self.low)


@dataclass(frozen=True)
class PerBlock:
    """k of `rows` offsets in each of `count` blocks; `digits` blocks share a word."""

    rows: int
    k: int
    count: int
    digits: int

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, rows: int, k: int, count: int) -> PerBlock:
        most = int(_WORD_BITS / math.log2(max(2, math.comb(rows, k))) * (1 - 1e-9))
        codes = [cls(rows, k, count, digits) for digits in range(1, max(1, min(most, count)) + 1)]
        return min(codes, key=lambda code: code.nbytes)

    @property
    def nbytes(self) -> int:
        return _plane_bytes(self._words, self._width)

    @property
    def _words(self) -> int:
        return -(-self.count // self.digits)

    @property
    def _width(self) -> int:
        sets: int = math.comb(self.rows, self.k) ** self.digits
        return (sets - 1).bit_length()

    def pack(self, offsets: Tensor, out: Tensor) -> Tensor:
        """Write offsets, uint8 [k, count], in any order, to uint8 [nbytes]; return them ascending.

        A block's offsets differ from each other and are less than `rows`.
        """
        ascending = offsets if self.k == 1 else offsets.sort(dim=0).values
        binomials, powers = _tables(self.rows, self.k, self.digits, offsets.device)
        padded = torch.zeros(self.digits * self._words, dtype=torch.int64, device=offsets.device)
        torch.sum(binomials.gather(1, ascending.long()), 0, out=padded[: self.count])
        words = padded.view(self.digits, -1).mul_(powers).sum(0)
        _write_planes(words, self._width, out)
        return ascending

    def unpack(self, packed: Tensor) -> Tensor:
        """The offsets, ascending in each block: int64 [k, count], from uint8 [nbytes]."""
        binomials, powers = _tables(self.rows, self.k, self.digits, packed.device)
        words = _read_planes(packed, self._words, self._width)
        rank = (words // powers).remainder_(math.comb(self.rows, self.k)).view(-1)[: self.count]
        offsets = torch.empty(self.k, self.count, dtype=torch.int64, device=packed.device)
        for place in range(self.k - 1, 0, -1):
            # the largest offset whose binomial is not above what is left
            torch.searchsorted(binomials[place], rank, right=True, out=offsets[place]).sub_(1)
            rank.sub_(binomials[place][offsets[place]])
        offsets[0] = rank
        return offsets


@lru_cache(maxsize=256)
def _tables(rows: int, k: int, digits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """C(offset, place + 1): int64 [k, rows]; powers of C(rows, k): int64 [digits, 1]."""
    binomials = [[math.comb(row, place + 1) for row in range(rows)] for place in range(k)]
    powers = [[math.comb(rows, k) ** digit] for digit in range(digits)]
    return torch.tensor(binomials, device=device), torch.tensor(powers, device=device)


@lru_cache(maxsize=16)
def _bit_table(device: torch.device) -> Tensor:
    """The bits of each byte, low first: bool [256, 8]."""
    return ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1).bool().to(device)


def _bytes_of(bits: Tensor) -> Tensor:
    """bool [8 * n] -> uint8 [n], low bits first."""
    words = bits.view(torch.int64)
    for shift in (7, 14, 28):  # pairs, then fours, then eight meet in the lowest byte
        words = words | (words >> shift)
    return words.view(torch.uint8)[::8]


def _bits_of(packed: Tensor) -> Tensor:
    """uint8 [n] -> bool [n, 8], low bits first."""
    return _bit_table(packed.device)[packed.int()]


def _plane_bytes(numel: int, width: int) -> int:
    """Bytes of `numel` words of `width` bits: each plane ends with a whole byte."""
    return numel * (width // 8) + sum(-(-numel * part // 8) for part in (4, 2, 1) if width & part)


def _write_planes(words: Tensor, width: int, out: Tensor) -> None:
    """The low `width` bits of int64 [n] to uint8 [_plane_bytes(n, width)]."""
    numel, start, taken = words.numel(), width // 8 * words.numel(), width // 8 * 8
    if start:
        bytes_of = words.contiguous().view(torch.uint8).view(numel, 8)
        out[:start].view(-1, numel).copy_(bytes_of[:, : width // 8].t())
    for part in (4, 2, 1):
        if width & part:
            stop = start + -(-numel * part // 8)
            codes = torch.zeros(8 // part, stop - start, dtype=torch.uint8, device=out.device)
            codes.view(-1)[:numel] = (words >> taken) & ((1 << part) - 1)
            plane = out[start:stop].copy_(codes[0])
            for place in range(1, 8 // part):
                plane |= codes[place] << (part * place)
            start, taken = stop, taken + part


def _read_planes(packed: Tensor, numel: int, width: int) -> Tensor:
    """What `_write_planes` was given: int64 [numel], without higher bits."""
    words, start = torch.zeros(numel, dtype=torch.int64, device=packed.device), width // 8 * numel
    taken = width // 8 * 8
    if start:
        bytes_of = words.view(torch.uint8).view(numel, 8)
        bytes_of[:, : width // 8].copy_(packed[:start].view(-1, numel).t())
    for part in (4, 2, 1):
        if width & part:
            stop = start + -(-numel * part // 8)
            shifts = _shifts(part, packed.device)
            codes = (packed[start:stop] >> shifts).bitwise_and_((1 << part) - 1).view(-1)
            words |= codes[:numel].long() << taken
            start, taken = stop, taken + part
    return words


@lru_cache(maxsize=64)
def _shifts(part: int, device: torch.device) -> Tensor:
    """Where the parts of a byte begin: uint8 [8 / part, 1]."""
    return torch.arange(0, 8, part, dtype=torch.uint8).unsqueeze(1).to(device)

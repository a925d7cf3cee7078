"""Which entries of a flat fp32 tensor are the largest: by blocks, exactly, or with a sample's help.

Blocks. The tensor is cut into blocks of at most 256 entries and the top k of each are taken:
several times cheaper than the largest of the whole, and the number of each is known beforehand. A
block is not a run of neighbours. Gradients have rows that are large as a whole, and a block inside
such a row can send only k of them. Block b holds the entries b, b + S, b + 2S, ... of the shard, S
the number of blocks: the fixed permutation i -> (i mod S, i div S), a transposition that costs no
memory traffic because the reduction runs down the columns of the [rows, S] view. S has no factor 2,
3 or 5, so that it does not fall in step with the row length of the tensor. Magnitudes are compared
in blocks by the upper 23 bits of |x|; the lower 8 bits of the comparison key hold the row, so a
plain integer maximum yields the winner's offset.

Sampled. A sample yields a threshold that a few more than k entries should reach; one pass finds
those that do, and the k largest of them are the k largest of all. Too few reach it now and then: a
lower threshold is tried. A bad sample costs time, never entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

MAX_BLOCK = 256
"""Offsets inside a block are one byte."""

_ROW_BITS = MAX_BLOCK - 1
_MAGNITUDE_BITS = 0x7FFFFFFF & ~_ROW_BITS
# Selecting k entries is k passes of a maximum. At larger densities blocks shrink instead of k
# growing: 8 of 80 keep nearly what 25 of 250 do.
_MAX_PER_BLOCK = 8
# Keys that are worked on at a time. Bounds the scratch memory at 4 MiB; smaller tiles were slower,
# they make more calls.
_TILE_ELEMENTS = 1 << 20
# Below so many entries a sample does not pay.
_FEW = 1 << 14
# Entries of a sample: enough, and enough of them large, for a threshold within a fifth or so.
_SAMPLE = 1 << 13
_SAMPLED_LARGEST = 400
_SMALLEST = 2.0**-149
"""The smallest fp32 above zero."""


@dataclass(frozen=True)
class Blocks:
    """How `numel` entries fall into blocks. Entry i lies in block i % count, at row i // count."""

    numel: int
    count: int
    """Number of blocks."""
    rows: int
    """Entries per block; the last row may be short, so some blocks hold one entry less."""
    k: int
    """Entries sent per block; less than `rows`."""

    @property
    def sent(self) -> int:
        return self.count * self.k

    def flat_index(self, offsets: Tensor) -> Tensor:
        """uint8 rows [k, count] -> int64 positions [k * count] in the shard."""
        columns = torch.arange(self.count, device=offsets.device)
        return torch.add(columns, offsets.long(), alpha=self.count).view(-1)


@lru_cache(maxsize=4096)
def blocks_for(numel: int, density: float) -> Blocks:
    """Blocks of at most 256 entries whose k / rows is the density or slightly more.

    At least one entry per block is sent: densities below 1/256 become 1/256.
    """
    per_block = min(_MAX_PER_BLOCK, max(1, math.floor(MAX_BLOCK * density)))
    length = min(MAX_BLOCK, math.floor(per_block / density * (1 + 1e-12)))
    count = max(1, -(-numel // length))
    # For a handful of blocks the step to the next admissible count would change the density.
    if count > 30:
        count = _without_small_factors(count)
    rows = -(-numel // count)
    return Blocks(numel, count, rows, min(per_block, max(1, ceil_of(density * rows))))


def _without_small_factors(x: int) -> int:
    """`x` or the next number that neither 2 nor 3 nor 5 divides."""
    while any(x % prime == 0 for prime in (2, 3, 5)):
        x += 1
    return x


def ceil_of(x: float) -> int:
    """ceil that forgives the rounding of `density * n` (0.07 * 100 is not 8)."""
    return math.ceil(x * (1 - 1e-12))


def select_in_blocks(values: Tensor, blocks: Blocks, offsets: Tensor) -> None:
    """Write the rows of each block's k largest magnitudes, descending, to uint8 [k, count]."""
    full_rows = blocks.rows - 1
    tail = blocks.numel - full_rows * blocks.count
    bits = values.view(torch.int32)
    body = bits[: full_rows * blocks.count].view(full_rows, blocks.count)
    last = bits[full_rows * blocks.count :]
    rows = torch.arange(blocks.rows, dtype=torch.int32, device=values.device).unsqueeze(1)
    width = min(blocks.count, max(1, _TILE_ELEMENTS // blocks.rows))
    scratch = torch.empty(blocks.rows * width, dtype=torch.int32, device=values.device)
    for start in range(0, blocks.count, width):
        stop = min(start + width, blocks.count)
        in_tail = max(0, min(stop, tail) - start)
        keys = scratch[: blocks.rows * (stop - start)].view(blocks.rows, stop - start)
        torch.bitwise_and(body[:, start:stop], _MAGNITUDE_BITS, out=keys[:full_rows])
        keys[full_rows, :in_tail] = last[start : start + in_tail] & _MAGNITUDE_BITS
        keys[full_rows, in_tail:] = 0
        keys.bitwise_or_(rows)
        keys[full_rows, in_tail:] = -1  # below every real key: never selected
        for place in range(blocks.k):
            row = keys.amax(0).bitwise_and_(_ROW_BITS)
            offsets[place, start:stop] = row
            if place + 1 < blocks.k:
                keys.scatter_(0, row.long().unsqueeze(0), -1)


def largest(values: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest magnitudes, ascending: int64 [count]."""
    return values.abs().topk(count, sorted=False).indices.sort().values


def largest_by_sample(values: Tensor, count: int) -> Tensor:
    """What `largest` returns, but for which of equal magnitudes, in one pass for most inputs.

    Reads numbers back from an accelerator.
    """
    numel = values.numel()
    if numel < _FEW or count == 0:
        return largest(values, count)
    for threshold in _thresholds(values, count):
        found = _at_least(values, threshold)
        if found.numel() >= count:
            return found[_largest_of(values[found].abs(), count)]
    return _with_zeros(found, count)


def _thresholds(values: Tensor, count: int) -> Iterator[float]:
    """What somewhat more than `count` entries should reach; then less and less, above zero."""
    wanted = min(values.numel() // 8, max(_SAMPLE, _SAMPLED_LARGEST * values.numel() // count))
    sample = values[:: _without_small_factors(values.numel() // wanted)].abs()
    expected = sample.numel() * count / values.numel()
    place = math.ceil(expected + 3 * math.sqrt(expected) + 2)
    while place < sample.numel():
        threshold = float(sample.kthvalue(sample.numel() - place).values)
        if threshold <= _SMALLEST:
            break
        yield threshold
        place *= 4
    yield _SMALLEST


def _at_least(values: Tensor, threshold: float) -> Tensor:
    """Ascending positions of magnitudes not below a threshold above 0: int64 [any]."""
    tile = _TILE_ELEMENTS // 4 if values.device.type == "cpu" else values.numel()
    scratch = torch.empty(-(-min(tile, values.numel()) // 8) * 8, device=values.device)
    found = []
    for start in range(0, values.numel(), tile):
        piece = values[start : start + tile]
        # Eight rows: where the largest of a column stays below, the column is not looked into.
        magnitudes = scratch[: -(-piece.numel() // 8) * 8]
        torch.abs(piece, out=magnitudes[: piece.numel()])
        magnitudes[piece.numel() :] = 0.0
        table = magnitudes.view(8, -1)
        columns = (table.amax(0) >= threshold).nonzero().view(-1)
        row, among = (table[:, columns] >= threshold).nonzero().unbind(1)
        found.append(columns[among].add_(row, alpha=table.shape[1]).add_(start))
    return torch.cat(found)


def _largest_of(magnitudes: Tensor, count: int) -> Tensor:
    """Which `count` of them are the largest, the first of equals: bool."""
    least = magnitudes.kthvalue(magnitudes.numel() - count + 1).values
    chosen = magnitudes > least
    equal = (magnitudes == least).nonzero().view(-1)
    chosen[equal[: count - int(chosen.sum())]] = True
    return chosen


def _with_zeros(found: Tensor, count: int) -> Tensor:
    """All entries that are not zero, and the first zeros: ascending positions, int64 [count]."""
    taken = torch.zeros(count, dtype=torch.bool, device=found.device)
    taken[found[found < count]] = True
    zeros = (~taken).nonzero().view(-1)[: count - found.numel()]
    return torch.cat([found, zeros]).sort().values

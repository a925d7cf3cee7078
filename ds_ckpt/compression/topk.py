"""Top-K: send the entries of largest magnitude, keep the rest as residual.

Two selections. `exact` takes the K = ceil(density * n) largest of the whole shard, with 32-bit
offsets. `blocks` cuts the shard into blocks of at most 256 entries and takes the top k of each,
with 8-bit offsets: several times cheaper in bytes per entry and in time.

A block is not a run of neighbours. Gradients have rows that are large as a whole, and a block
inside such a row can send only k of them. Block b holds the entries b, b + S, b + 2S, ... of the
shard, S the number of blocks: the fixed permutation i -> (i mod S, i div S), a transposition
that costs no memory traffic because the reduction runs down the columns of the [rows, S] view.
S has no factor 2, 3 or 5, so that it does not fall in step with the row length of the tensor.

Magnitudes are compared in blocks by the upper 23 bits of |x|; the lower 8 bits of the comparison
key hold the row, so a plain integer maximum yields the winner's offset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ds_ckpt.compression.codec import (
    VALUE_FORMATS,
    ValueFormat,
    add_scaled,
    aligned,
    decode_values,
    encode_values,
    section,
    value_bytes,
    write_section,
)

Selection = Literal["exact", "blocks"]
SELECTIONS: tuple[Selection, ...] = ("exact", "blocks")

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
    while count > 30 and any(count % prime == 0 for prime in (2, 3, 5)):
        count += 1
    rows = -(-numel // count)
    return Blocks(numel, count, rows, min(per_block, max(1, _ceil(density * rows))))


def _ceil(x: float) -> int:
    """ceil that forgives the rounding of `density * n` (0.07 * 100 is not 8)."""
    return math.ceil(x * (1 - 1e-12))


@dataclass(frozen=True)
class TopK:
    """The codec. Where selecting would cost no less than sending everything, it sends everything.

    Attributes:
        density: share of the entries that is sent, in (0, 1].
        values: `fp32`, `bf16`, or `int8` with one bf16 scale per 64 values.
        selection: `blocks` or `exact`, see the module's docstring.

    Raises:
        ValueError: an argument out of its range.
    """

    density: float = 0.01
    values: ValueFormat = "int8"
    selection: Selection = "blocks"

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise ValueError(f"density must be in (0, 1], not {self.density}")
        if self.values not in VALUE_FORMATS:
            raise ValueError(f"values must be one of {VALUE_FORMATS}, not {self.values!r}")
        if self.selection not in SELECTIONS:
            raise ValueError(f"selection must be one of {SELECTIONS}, not {self.selection!r}")

    def sent(self, numel: int) -> int:
        """How many of `numel` entries travel."""
        count, offset_bytes = self._selected(numel)
        return numel if offset_bytes == 0 else count

    def packed_bytes(self, numel: int) -> int:
        count, offset_bytes = self._selected(numel)
        return value_bytes(count, self.values) + aligned(count * offset_bytes)

    def pack(self, values: Tensor, out: Tensor) -> None:
        count, offset_bytes = self._selected(values.numel())
        if count == 0:
            return
        if offset_bytes == 0:
            values.sub_(encode_values(values, self.values, out))
            return
        values_end = value_bytes(count, self.values)
        if self.selection == "exact":
            # Descending order puts similar magnitudes under one int8 scale.
            index = values.abs().topk(count, sorted=True).indices
            write_section(out, values_end, index.int())
        else:
            blocks = blocks_for(values.numel(), self.density)
            offsets = out[values_end : values_end + count].view(blocks.k, blocks.count)
            select(values, blocks, offsets)
            out[values_end + count :].zero_()
            index = blocks.flat_index(offsets)
        picked = values[index]
        decoded = encode_values(picked, self.values, out[:values_end])
        values.scatter_(0, index, picked - decoded)

    def unpack_add(self, payload: Tensor, into: Tensor, scale: float = 1.0) -> None:
        numel = into.numel()
        count, offset_bytes = self._selected(numel)
        if count == 0:
            return
        values_end = value_bytes(count, self.values)
        decoded = decode_values(payload[:values_end], count, self.values)
        if offset_bytes == 0:
            add_scaled(into, decoded, scale)
            return
        if self.selection == "exact":
            index = section(payload, values_end, count, torch.int32).long()
        else:
            blocks = blocks_for(numel, self.density)
            offsets = payload[values_end : values_end + count].view(blocks.k, blocks.count)
            index = blocks.flat_index(offsets)
        into.index_add_(0, index, decoded if scale == 1.0 else decoded * scale)

    def _selected(self, numel: int) -> tuple[int, int]:
        """(entries sent, bytes per offset); no offsets means that everything is sent."""
        if self.selection == "exact":
            count, offset_bytes = max(min(1, numel), _ceil(self.density * numel)), 4
            everything = count >= numel
        else:
            blocks = blocks_for(numel, self.density)
            count, offset_bytes = blocks.sent, 1
            # k < rows also guarantees k real entries in the blocks that miss the last row.
            everything = blocks.k >= blocks.rows
        selected_bytes = value_bytes(count, self.values) + aligned(count * offset_bytes)
        if everything or selected_bytes >= value_bytes(numel, self.values):
            return numel, 0
        return count, offset_bytes


def select(values: Tensor, blocks: Blocks, offsets: Tensor) -> None:
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

"""Top-K: send the entries of largest magnitude, keep the rest as residual.

Three selections (`selection`). `exact` takes the K = ceil(density * n) largest of the whole shard;
`sampled` takes the same ones, an order of magnitude faster, on an accelerator at the price of
waiting for it. Their positions cost less than 0.6 bits more than the entropy (`offsets`).

`blocks` takes the top k of each block of at most 256 entries. It is the fastest and never waits.
Offsets in a block are bytes, or `packed` as sets within 0.15 bits of their entropy. At a density of
0.01 packing saves 5% of the bytes, which takes longer than sending them on any link above some 20
Mbit/s (`benchmarks/selection.py`), so it is not the default.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ds_ckpt.compression.codec import (
    VALUE_FORMATS,
    Cost,
    Section,
    ValueFormat,
    add_scaled,
    aligned,
    decode_values,
    encode_values,
    value_bytes,
)
from ds_ckpt.compression.offsets import Ascending, PerBlock
from ds_ckpt.compression.selection import (
    blocks_for,
    ceil_of,
    largest,
    largest_by_sample,
    select_in_blocks,
)

Selection = Literal["exact", "sampled", "blocks"]
SELECTIONS: tuple[Selection, ...] = ("exact", "sampled", "blocks")

Offsets = Literal["bytes", "packed"]
OFFSETS: tuple[Offsets, ...] = ("bytes", "packed")


@dataclass(frozen=True)
class TopK:
    """The codec. Where selecting would cost no less than sending everything, it sends everything.

    Attributes:
        density: share of the entries that is sent, in (0, 1].
        values: `fp32`, `bf16`, or `int8` with one bf16 scale per 64 values.
        selection: `blocks`, `sampled` or `exact`, see the module's docstring.
        offsets: of selection `blocks`: `bytes` or `packed`.

    Raises:
        ValueError: an argument out of its range.
    """

    density: float = 0.01
    values: ValueFormat = "int8"
    selection: Selection = "blocks"
    offsets: Offsets = "bytes"

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise ValueError(f"density must be in (0, 1], not {self.density}")
        if self.values not in VALUE_FORMATS:
            raise ValueError(f"values must be one of {VALUE_FORMATS}, not {self.values!r}")
        if self.selection not in SELECTIONS:
            raise ValueError(f"selection must be one of {SELECTIONS}, not {self.selection!r}")
        if self.offsets not in OFFSETS:
            raise ValueError(f"offsets must be one of {OFFSETS}, not {self.offsets!r}")

    def sent(self, numel: int) -> int:
        """How many of `numel` entries travel."""
        count, offset_bytes = self._selected(numel)
        return numel if offset_bytes == 0 else count

    def packed_bytes(self, numel: int) -> int:
        count, offset_bytes = self._selected(numel)
        return value_bytes(count, self.values) + aligned(offset_bytes)

    def cost(self, numel: int) -> Cost:
        count, offset_bytes = self._selected(numel)
        payload_bytes = self.packed_bytes(numel)
        if offset_bytes == 0:
            return Cost(payload_bytes, 8 * numel + payload_bytes, 5 * numel)
        # What is sent is gathered, encoded, decoded and scattered; its positions are 64 bits.
        sent_bytes, sent_operations = 24 * count + payload_bytes, 20 * count
        if self.selection == "blocks":
            # mask and row into the key, then for each place a maximum
            operations = (2 + blocks_for(numel, self.density).k) * numel
            return Cost(payload_bytes, 4 * numel + sent_bytes, operations + sent_operations)
        if self.selection == "sampled":  # magnitude, maximum, few comparisons
            return Cost(payload_bytes, 4 * numel + sent_bytes, 3 * numel + 2 * sent_operations)
        # Quickselect of magnitudes with their positions: some 3 passes over 12 bytes an entry.
        return Cost(payload_bytes, 40 * numel + sent_bytes, 12 * numel + 2 * sent_operations)

    def pack(self, values: Tensor, out: Tensor, selecting: Section = nullcontext) -> None:
        count, offset_bytes = self._selected(values.numel())
        if count == 0:
            return
        if offset_bytes == 0:
            values.sub_(encode_values(values, self.values, out))
            return
        values_end = value_bytes(count, self.values)
        out[values_end + offset_bytes :].zero_()
        index = self._select(values, count, out[values_end : values_end + offset_bytes], selecting)
        picked = values[index]
        decoded = encode_values(picked, self.values, out[:values_end])
        values.scatter_(0, index, picked - decoded)

    def unpack_add(self, payload: Tensor, into: Tensor, scale: float = 1.0) -> None:
        count, offset_bytes = self._selected(into.numel())
        if count == 0:
            return
        values_end = value_bytes(count, self.values)
        decoded = decode_values(payload[:values_end], count, self.values)
        if offset_bytes == 0:
            add_scaled(into, decoded, scale)
            return
        index = self._index(into.numel(), count, payload[values_end : values_end + offset_bytes])
        into.index_add_(0, index, decoded if scale == 1.0 else decoded * scale)

    def _select(self, values: Tensor, count: int, out: Tensor, selecting: Section) -> Tensor:
        """Choose, write the offsets, return the positions in the order of the values."""
        numel = values.numel()
        if self.selection != "blocks":
            with selecting():
                choose = largest if self.selection == "exact" else largest_by_sample
                index = choose(values, count)
            Ascending.of(numel, count).pack(index, out)
            return index
        blocks = blocks_for(numel, self.density)
        if self.offsets == "bytes":
            offsets = out.view(blocks.k, blocks.count)
        else:
            offsets = out.new_empty(blocks.k, blocks.count)
        with selecting():
            select_in_blocks(values, blocks, offsets)
        if self.offsets == "packed":
            offsets = PerBlock.of(blocks.rows, blocks.k, blocks.count).pack(offsets, out)
        return blocks.flat_index(offsets)

    def _index(self, numel: int, count: int, packed: Tensor) -> Tensor:
        """The positions that `_select` returned, from what it wrote."""
        if self.selection != "blocks":
            return Ascending.of(numel, count).unpack(packed)
        blocks = blocks_for(numel, self.density)
        if self.offsets == "bytes":
            return blocks.flat_index(packed.view(blocks.k, blocks.count))
        return blocks.flat_index(PerBlock.of(blocks.rows, blocks.k, blocks.count).unpack(packed))

    def _selected(self, numel: int) -> tuple[int, int]:
        """(entries sent, bytes of their offsets); no offsets means that everything is sent."""
        if self.selection != "blocks":
            count = max(min(1, numel), ceil_of(self.density * numel))
            everything = count >= numel
            offset_bytes = Ascending.of(numel, count).nbytes
        else:
            blocks = blocks_for(numel, self.density)
            count = offset_bytes = blocks.sent
            # k < rows also guarantees k real entries in the blocks that miss the last row.
            everything = blocks.k >= blocks.rows
            if self.offsets == "packed" and not everything:
                offset_bytes = PerBlock.of(blocks.rows, blocks.k, blocks.count).nbytes
        selected_bytes = value_bytes(count, self.values) + aligned(offset_bytes)
        if everything or selected_bytes >= value_bytes(numel, self.values):
            return numel, 0
        return count, offset_bytes

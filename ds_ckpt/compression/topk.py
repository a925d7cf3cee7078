"""Top-K: send the entries of largest magnitude, keep the rest as residual.

The top k of each block of at most 256 entries are sent. This costs one pass, never waits, and the
number of entries is known beforehand. A block is not a run of neighbours: gradients have rows that
are large as a whole. Block b holds the entries b, b + S, b + 2S, ... of the shard, with S blocks.
So the maxima run down the columns of the [rows, S] view. S has no factor 2, 3 or 5: it must not
fall in step with the tensor's row length. The comparison key is the upper 23 bits of |x|, with the
row in its lower 8 bits. A plain integer maximum yields the entry's row in its block, which is sent
as a byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_ckpt.compression import fused
from ds_ckpt.compression.base import Codec, Method, add_rows, on_host, row_groups
from ds_ckpt.compression.wire import aligned, saturating_cast, section, write_section
from ds_ckpt.fields import Expects, Removed, warn

ValueFormat = Literal["fp32", "bf16", "int8"]
MAX_BLOCK = 256  # a row of a block is one byte
INT8_GROUP = 64  # consecutive int8 values that share one bf16 scale
_INT8_MAX = 127
_ROW_BITS = MAX_BLOCK - 1
_MAGNITUDE_BITS = 0x7FFFFFFF & ~_ROW_BITS
# Selecting k entries is k passes of a maximum; at larger densities blocks shrink instead.
_MAX_PER_BLOCK = 8
# Keys that are worked on at a time: bounds the scratch memory.
_TILE_ELEMENTS = 1 << 20
_TILE_ELEMENTS_ACCELERATOR = 1 << 24


class TopK(Method, Codec):
    """Top-K: of each remote shard only the largest entries are sent, by all-to-all."""

    name = "topk"
    about = "the largest entries only; fewer bytes, and it costs loss"
    example = '{"density": 0.01}'
    presets = {"topk": {"topk": {"density": 0.01, "values": "int8"}}}
    titles = {"topk": "Top-K 1%"}
    removed = {
        "offsets": Removed("the places of entries are bytes", "remove it", constant="bytes"),
        "selection": Removed('only "blocks" is left', "remove it", constant="blocks"),
    }

    density: Annotated[float, Expects("a number above 0 and at most 1", "0.01")] = Field(
        default=0.01,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Share of the entries that is sent (0.01 is 1%). Lower is fewer bytes and a "
        "higher loss; ds_configs/README.md has what was measured.",
    )
    values: Annotated[ValueFormat, Expects('"fp32", "bf16" or "int8"', '"int8"')] = Field(
        default="int8",
        description="Type of a sent value on the wire: 4, 2 or 1 bytes each. The rounding error "
        "goes into the residual where error feedback is on.",
    )

    def model_post_init(self, _context: Any, /) -> None:
        """Warn of a share that was probably meant in percent."""
        if self.density > 0.5:
            share = f"{self.density:g} sends {self.density:.0%} of the entries"
            warn(f"topk.density: {share}; 1% is written 0.01")

    def describe(self) -> str:
        """Return density and value format."""
        return f"Top-K {self.density:.3g} ({self.values})"

    def sent(self, numel: int) -> int:
        """Return how many of `numel` entries are sent."""
        blocks = self._blocks(numel)
        return numel if blocks is None else blocks.sent

    def packed_bytes(self, numel: int) -> int:
        """Return the bytes of values and places."""
        blocks = self._blocks(numel)
        if blocks is None:
            return value_bytes(numel, self.values)
        return value_bytes(blocks.sent, self.values) + aligned(blocks.sent)

    def pack_rows(self, values: Tensor, out: Tensor) -> None:
        """Send the largest entries of each row."""
        if not values.numel():
            return
        blocks = self._blocks(values.shape[1])
        if blocks is None:
            values.sub_(encode_values(values, self.values, out))
            return
        start = value_bytes(blocks.sent, self.values)
        out[:, start + blocks.sent :].zero_()
        offsets = out[:, start : start + blocks.sent].view(-1, blocks.k, blocks.count)
        select_in_blocks(values, blocks, offsets)
        if fused.is_supported(values.device):
            out[:, :start].zero_()
            fused.take_selected(values, out, blocks.count, start, blocks.sent, self.values)
            return
        index = blocks.flat_index(offsets)
        picked = values.gather(1, index)
        decoded = encode_values(picked, self.values, out[:, :start])
        values.scatter_(1, index, picked - decoded)

    def unpack_add_rows(self, payloads: Tensor, into: Tensor, scale: float = 1.0) -> None:
        """Add each payload's values at their places."""
        if not into.numel():
            return
        blocks = self._blocks(into.numel())
        if blocks is None:
            add_rows(into, decode_values(payloads, into.numel(), self.values), scale)
            return
        start = value_bytes(blocks.sent, self.values)
        decoded = decode_values(payloads[:, :start], blocks.sent, self.values)
        offsets = payloads[:, start : start + blocks.sent].view(-1, blocks.k, blocks.count)
        index = blocks.flat_index(offsets)
        _add_at(into, index, decoded if scale == 1.0 else decoded * scale)

    def _blocks(self, numel: int) -> Blocks | None:
        """Return the blocks of a shard; None if sending everything takes no more bytes."""
        blocks = blocks_for(numel, self.density)
        selected_bytes = value_bytes(blocks.sent, self.values) + aligned(blocks.sent)
        # k < rows also guarantees k real entries in the blocks that miss the last row.
        is_smaller = selected_bytes < value_bytes(numel, self.values)
        return blocks if is_smaller and blocks.k < blocks.rows else None


@dataclass(frozen=True)
class Blocks:
    """Division of `numel` entries into blocks: entry i is in block i % count, at row i // count.

    The last row may be short. `k` entries of a block are sent, fewer than its `rows`.
    """

    numel: int
    count: int
    rows: int
    k: int

    @property
    def sent(self) -> int:
        """Entries sent."""
        return self.count * self.k

    def flat_index(self, offsets: Tensor) -> Tensor:
        """Return positions in the shard, int64 [..., k * count], of uint8 rows [..., k, count]."""
        columns = torch.arange(self.count, dtype=torch.int64, device=offsets.device)
        return torch.add(columns, offsets.long(), alpha=self.count).flatten(-2)


@lru_cache(maxsize=4096)
def blocks_for(numel: int, density: float) -> Blocks:
    """Return blocks of at most 256 entries whose k / rows is the density or slightly more.

    At least one entry per block is sent: densities below 1/256 become 1/256.
    """
    # 1e-12: 0.07 * 100 is above 7
    per_block = min(_MAX_PER_BLOCK, max(1, math.floor(MAX_BLOCK * density)))
    length = min(MAX_BLOCK, math.floor(per_block / density * (1 + 1e-12)))
    count = max(1, -(-numel // length))
    # For a handful of blocks the step to the next admissible count would change the density.
    while count > 30 and any(count % prime == 0 for prime in (2, 3, 5)):
        count += 1
    rows = -(-numel // count)
    k = max(1, math.ceil(density * rows * (1 - 1e-12)))
    return Blocks(numel, count, rows, min(per_block, k))


def _add_at(into: Tensor, index: Tensor, decoded: Tensor) -> None:
    """Add each row of fp32 [rows, count] to `into` at that row's positions, none twice in a row."""
    if index.shape[0] == 1 or on_host(into.device):
        for at, row in zip(index.unbind(), decoded.unbind(), strict=True):
            into.index_add_(0, at, row)
        return
    # several rows may have the same entry, and atomics would add them in any order
    for at, some in row_groups(into.numel(), _TILE_ELEMENTS_ACCELERATOR, index, decoded):
        spread = into.new_zeros(at.shape[0], into.numel())
        into.add_(spread.scatter_(1, at, some).sum(0))


def select_in_blocks(values: Tensor, blocks: Blocks, offsets: Tensor) -> None:
    """Write the rows of each block's k largest magnitudes, descending.

    fp32 [shards, blocks.numel] to uint8 [shards, k, count].
    """
    if fused.is_supported(values.device):
        fused.select_in_blocks(values, offsets, blocks.count, blocks.k)
        return
    tile = _TILE_ELEMENTS if on_host(values.device) else _TILE_ELEMENTS_ACCELERATOR
    rows = torch.arange(blocks.rows, dtype=torch.int32, device=values.device).unsqueeze(1)
    for some, places in row_groups(blocks.numel, tile, values, offsets):
        _select_batched(some, blocks, rows, places, tile)


def _select_batched(
    values: Tensor, blocks: Blocks, rows: Tensor, offsets: Tensor, tile: int
) -> None:
    shards, full_rows = values.shape[0], blocks.rows - 1
    tail = blocks.numel - full_rows * blocks.count
    bits = values.view(torch.int32)
    body = bits[:, : full_rows * blocks.count].view(shards, full_rows, blocks.count)
    last = bits[:, full_rows * blocks.count :]
    width = min(blocks.count, max(1, tile // (shards * blocks.rows)))
    scratch = torch.empty(shards * blocks.rows * width, dtype=torch.int32, device=values.device)
    for start in range(0, blocks.count, width):
        stop = min(start + width, blocks.count)
        in_tail = max(0, min(stop, tail) - start)
        shape = (shards, blocks.rows, stop - start)
        keys = scratch[: math.prod(shape)].view(shape)
        torch.bitwise_and(body[:, :, start:stop], _MAGNITUDE_BITS, out=keys[:, :full_rows])
        keys[:, full_rows, :in_tail] = last[:, start : start + in_tail] & _MAGNITUDE_BITS
        keys[:, full_rows, in_tail:] = 0
        keys.bitwise_or_(rows)
        keys[:, full_rows, in_tail:] = -1  # below every real key: never selected
        for place in range(blocks.k):
            row = keys.amax(1).bitwise_and_(_ROW_BITS)
            offsets[:, place, start:stop] = row
            if place + 1 < blocks.k:
                keys.scatter_(1, row.long().unsqueeze(1), -1)


def value_bytes(count: int, fmt: ValueFormat) -> int:
    """Return the bytes of `count` values in format `fmt`, scales and alignment included."""
    if fmt == "int8":
        return aligned(2 * -(-count // INT8_GROUP)) + aligned(count)
    return aligned((4 if fmt == "fp32" else 2) * count)


def encode_values(values: Tensor, fmt: ValueFormat, out: Tensor) -> Tensor:
    """Write fp32 [..., count] to uint8 [..., value_bytes(count, fmt)]; return the decoded fp32."""
    if fmt == "int8":
        return _encode_int8(values, out)
    sent = saturating_cast(values, torch.float32 if fmt == "fp32" else torch.bfloat16)
    write_section(out, 0, sent)
    return sent.float()


def decode_values(payload: Tensor, count: int, fmt: ValueFormat) -> Tensor:
    """Return the fp32 that `encode_values` returned, bitwise; fp32 may alias `payload`."""
    if fmt == "fp32":
        return section(payload, 0, count, torch.float32)
    if fmt == "bf16":
        return section(payload, 0, count, torch.bfloat16).float()
    groups = -(-count // INT8_GROUP)
    scales = section(payload, 0, groups, torch.bfloat16).float()
    quantized = section(payload, aligned(2 * groups), count, torch.int8)
    return _dequantize(quantized, scales)


def _grouped(values: Tensor) -> Tensor:
    """Return [..., groups, INT8_GROUP]; the last group is filled up with zeros."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % INT8_GROUP))
    return padded.view(*values.shape[:-1], -1, INT8_GROUP)


def _dequantize(quantized: Tensor, scales: Tensor) -> Tensor:
    decoded: Tensor = _grouped(quantized).float().mul_(scales.unsqueeze(-1))
    return decoded.flatten(-2)[..., : quantized.shape[-1]]


def _encode_int8(values: Tensor, out: Tensor) -> Tensor:
    groups = _grouped(values)
    # 127 times a scale stays finite: the largest fp32 / 127 is rounded down in bf16.
    scales = groups.abs().amax(-1).div_(_INT8_MAX).to(torch.bfloat16)
    start_byte = write_section(out, 0, scales)
    wide = scales.float()
    # A group of zeros, or too small for a bf16 scale, sends zeros and keeps its values. Dividing is
    # safe for denormal scales, whose reciprocal overflows; the clamp catches their coarse rounding.
    divisor = torch.where(wide == 0, 1.0, wide).unsqueeze(-1)
    quantized = groups.div(divisor).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    flat = quantized.flatten(-2)[..., : values.shape[-1]]
    write_section(out, start_byte, flat)
    return _dequantize(flat, wide)

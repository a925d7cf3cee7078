"""Tensors that an all-to-all takes as they are: each entry once, summed by its owner.

16-bit gradients travel undivided and are summed and divided in fp32: one rounding. fp32 is divided
before the sum, as DeepSpeed does it, and so are sums of a host, which might not fit into 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ds_ckpt.compression.codec import aligned, section
from ds_ckpt.exchange.item import Item, Tools


def packed_bytes(dtype: torch.dtype, numel: int) -> int:
    """Size of the payload of `numel` entries."""
    return aligned(numel * dtype.itemsize)


def pack(item: Item, world: int, me: int, outgoing: Mapping[int, Tensor]) -> Tensor:
    """Write each destination's part into its payload.

    Args:
        world: processes that are averaged over.
        me: this process's place in the column.

    Returns:
        This process's own part, in the dtype of the sum.
    """
    divisor = 1 if _divided_last(item) else world
    for dest, payload in outgoing.items():
        part = item.column[item.layout.shard(dest)]
        out = section(payload, 0, item.layout.size(dest), item.dtype)
        if part.dtype == item.dtype:
            torch.div(part, divisor, out=out)  # straight into the packet
        else:
            out.copy_(part.div(divisor))
    own = item.column[item.layout.shard(me)].div(divisor)
    return own.to(torch.promote_types(item.dtype, torch.float32))


def total(
    tools: Tools,
    item: Item,
    own: Tensor,
    payloads: Mapping[int, Tensor],
    place: tuple[int, int],
) -> Tensor:
    """The mean at this process's shard, in the gradient's dtype.

    Args:
        own: what `pack` returned.
        payloads: of the other processes.
        place: entries of an owner's part of the bucket: before this tensor, and in all; the order
            of summation may depend on it.
    """
    me, processes = tools.transport.dp_rank, tools.transport.world
    size = item.layout.size(me)
    parts = [
        own if process == me else section(payloads[process], 0, size, item.dtype)
        for process in range(processes)
    ]
    result = torch.empty_like(own)
    before, entries = place
    at = me * entries + before
    numel = processes * entries
    pieces = tools.order(numel, item.dtype.itemsize, processes, at, at + size)
    for start, stop, order in pieces:
        piece = slice(start - at, stop - at)
        # Starting from the first part, not from 0: 0 + -0 would turn into +0.
        sum_ = result[piece].copy_(parts[order[0]][piece])
        for process in order[1:]:
            sum_.add_(parts[process][piece])
    if _divided_last(item):
        result.div_(tools.world)
    return result.to(item.dtype)


def _divided_last(item: Item) -> bool:
    return item.column.dtype == item.dtype and item.dtype.itemsize < 4

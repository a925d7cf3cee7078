"""The lower of two levels: an exact sum inside a host, each process keeping one column.

Process `l` of a host gets, from each process there, the entries that the `l`-th processes of all
hosts own. It adds them up in fp32 or better. Links inside a host are fast, so whole values travel;
what then crosses between hosts, and the residual, is `1 / processes a host` of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_ckpt.compression.codec import aligned, section
from ds_ckpt.exchange.layout import ColumnLayout, ShardLayout
from ds_ckpt.exchange.transport import Transport


class InHostSum:
    """One process's end.

    Args:
        transport: between the processes of this host.
        columns: by local process, the processes of the whole world that share its place.
    """

    def __init__(self, transport: Transport, columns: Sequence[tuple[int, ...]]) -> None:
        assert len(columns) == transport.world
        self._transport = transport
        self._columns = columns

    @property
    def processes(self) -> int:
        """Processes of a host."""
        return self._transport.world

    @property
    def members(self) -> tuple[int, ...]:
        """The processes that this one exchanges with between hosts, itself included."""
        return self._columns[self._transport.dp_rank]

    def sum(self, flats: Sequence[Tensor], shards: Sequence[ShardLayout]) -> list[Tensor]:
        """This process's column of each tensor, summed over the host.

        Args:
            flats: [n] each, any floating dtypes, one device.
            shards: ZeRO-3's division of each.

        Returns:
            [column's entries] each, in fp32 or the gradient's dtype if that is wider.
        """
        me, local = self._transport.dp_rank, self._transport.world
        layouts = [[ColumnLayout(s, members) for s in shards] for members in self._columns]
        sizes = [
            [c.numel * f.element_size() for c, f in zip(cs, flats, strict=True)] for cs in layouts
        ]
        packets = [sum(map(aligned, of_tensors)) for of_tensors in sizes]
        device = flats[0].device
        send = [0 if p == me else packets[p] for p in range(local)]
        receive = [0 if p == me else packets[me] for p in range(local)]
        outgoing = torch.empty(sum(send), dtype=torch.uint8, device=device)
        incoming = torch.empty(sum(receive), dtype=torch.uint8, device=device)
        start = 0
        for peer in range(local):
            if peer == me:
                continue
            for flat, layout, size in zip(flats, layouts[peer], sizes[peer], strict=True):
                _gather(flat, layout, section(outgoing, start, layout.numel, flat.dtype))
                start += aligned(size)
        self._transport.all_to_all(incoming, outgoing, receive, send)
        own = [
            _gather(f, c, torch.empty(c.numel, dtype=f.dtype, device=device))
            for f, c in zip(flats, layouts[me], strict=True)
        ]
        totals: list[Tensor] = []
        start = 0
        for i, flat in enumerate(flats):
            total = None
            for process in range(local):
                if process == me:
                    part = own[i]
                else:
                    at = packets[me] * (process - (process > me)) + start
                    part = section(incoming, at, own[i].numel(), flat.dtype)
                wide = torch.promote_types(flat.dtype, torch.float32)
                total = part.to(wide, copy=True) if total is None else total.add_(part)
            assert total is not None
            totals.append(total)
            start += aligned(sizes[me][i])
        return totals


def _gather(flat: Tensor, layout: ColumnLayout, out: Tensor) -> Tensor:
    for member in range(len(layout.members)):
        out[layout.shard(member)] = flat[layout.source(member)]
    return out

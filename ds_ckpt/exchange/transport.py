"""Transport of an exchange's bytes: `torch.distributed` behind a protocol, packets, sums in a node.

`lab.validate.virtual` has a transport between threads. `compression.wire` has the format.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist
from torch import Tensor

from ds_ckpt.compression.wire import PACKET_HEADER_BYTES, aligned, section
from ds_ckpt.exchange.layout import LocalShard, ShardLayout, local_shard


def gather_objects(own: Any) -> list[Any]:
    """Return every rank's picklable object, by rank. Collective over the program."""
    found: list[Any] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(found, own)
    return found


Lengths = Sequence[int]
"""Bytes from or for each rank, in their order."""


class Transport(Protocol):
    """One rank's end, at index `dp_rank`, of a group of `world` that exchanges bytes and sums."""

    world: int
    dp_rank: int

    def all_to_all(self, output: Tensor, input: Tensor, received: Lengths, sent: Lengths) -> None:
        """Send consecutive pieces of `input`, uint8, one to each rank; fill `output` likewise."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor`, fp32 and contiguous, over the group, in place; the same bits everywhere."""


class TorchTransport:
    """A process group (None: the default), with torch's collectives or ones that count."""

    def __init__(
        self,
        group: Any = None,
        all_to_all_single: Callable[..., Any] = torch_dist.all_to_all_single,
        all_reduce: Callable[..., Any] = torch_dist.all_reduce,
    ) -> None:
        self._group = group
        self._all_to_all_single = all_to_all_single
        self._all_reduce = all_reduce
        self.world = int(torch_dist.get_world_size(group))
        self.dp_rank = int(torch_dist.get_rank(group))

    def all_to_all(self, output: Tensor, input: Tensor, received: Lengths, sent: Lengths) -> None:
        """See `Transport.all_to_all`."""
        self._all_to_all_single(output, input, [*received], [*sent], group=self._group)

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Transport.all_reduce`."""
        self._all_reduce(tensor, group=self._group)


class NullTransport:
    """A `Transport` that sends nothing: all-to-alls return zeros, all-reduces the input."""

    def __init__(self, like: Transport) -> None:
        self.world, self.dp_rank = like.world, like.dp_rank

    def all_to_all(self, output: Tensor, *_: object) -> None:
        """Receive zeros."""
        output.zero_()

    def all_reduce(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""


PACKET_ALIGNMENT_BYTES = 16
"""Packets begin at multiples: NCCL moves 16 bytes at a time from there."""


class Packets:
    """Buffers of one all-to-all: one packet from each rank to each other one.

    A packet is a header and the shards that its destination owns, so its size depends on the
    destination alone. Consecutive packets of equal size are one matrix, a packet a row.

    Args:
        sizes: by rank, bytes of each payload; multiples of 8.
        shards: by rank, entries of each payload.
        header_bytes: a multiple of 8.

    Attributes:
        outgoing: consecutive destinations with shards of equal sizes. The pieces of their
            packets, header first, are uint8 [destinations, bytes] views to write to.
        incoming: pieces from all other ranks, ascending; filled by `exchange`.
    """

    def __init__(
        self,
        transport: Transport,
        sizes: Sequence[Sequence[int]],
        shards: Sequence[Sequence[int]],
        device: torch.device,
        header_bytes: int = PACKET_HEADER_BYTES,
    ) -> None:
        self._transport = transport
        me, world = transport.dp_rank, transport.world
        known = {each: _pieces([header_bytes, *each]) for each in {*map(tuple, sizes)}}
        pieces = [known[tuple(each)] for each in sizes]
        total = {each: sum(of) for each, of in known.items()}  # few are different
        nbytes = [total[tuple(each)] for each in sizes]
        self._send = [n * (rank != me) for rank, n in enumerate(nbytes)]
        self._receive = [nbytes[me] * (rank != me) for rank in range(world)]
        self._out = torch.empty(sum(self._send), dtype=torch.uint8, device=device)
        self._in = torch.empty(sum(self._receive), dtype=torch.uint8, device=device)
        self.outgoing: list[tuple[range, list[Tensor]]] = []
        start = first = 0
        for last in range(1, world + 1):
            if last < world and last != me != first and shards[last] == shards[first]:
                continue
            if first != me:
                end = start + (last - first) * nbytes[first]
                run = _rows(self._out[start:end], last - first, pieces[first])
                self.outgoing.append((range(first, last), run))
                start = end
            first = last
        self.incoming: list[Tensor] = _rows(self._in, world - 1, pieces[me])

    def exchange(self) -> None:
        """Send and receive."""
        if self._transport.world > 1:
            self._transport.all_to_all(self._in, self._out, self._receive, self._send)


def _pieces(sizes: list[int]) -> list[int]:
    """Add the padding up to the alignment of packets."""
    return [*sizes, -sum(sizes) % PACKET_ALIGNMENT_BYTES]


def _rows(packets: Tensor, count: int, sizes: list[int]) -> list[Tensor]:
    """Return the pieces of `count` packets, without padding."""
    return list(packets.view(count, sum(sizes)).split(sizes, dim=1))[:-1]


class InHostSum:
    """One rank's end of the exact sum inside its node, over `transport`; `peers` as in `Groups`.

    With two levels, each rank of a node sends local rank `l` the entries that all nodes' `l`-th
    ranks own. That rank adds them up in fp32 or better. Links inside a node are fast, so values are
    sent uncompressed there. The part that is sent between nodes, and the residual, is
    `1 / ranks a node` of the gradient.
    """

    def __init__(self, transport: Transport, peers: Sequence[tuple[int, ...]]) -> None:
        self.transport = transport
        self.peers = peers

    @property
    def processes(self) -> int:
        """Ranks of a node."""
        return self.transport.world

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that this one exchanges with between nodes, itself included."""
        return self.peers[self.transport.dp_rank]

    def sum(self, flats: Sequence[Tensor], shards: Sequence[ShardLayout]) -> list[Tensor]:
        """Return this rank's local shard of each tensor [n], summed over the node.

        Shards are in fp32, or the gradient's dtype if that is wider.
        """
        me = self.transport.dp_rank
        layouts = [[local_shard(s, members) for s in shards] for members in self.peers]
        sizes = [
            [aligned(c.numel * f.element_size()) for c, f in zip(cs, flats, strict=True)]
            for cs in layouts
        ]
        entries = [[c.numel for c in cs] for cs in layouts]
        packets = Packets(self.transport, sizes, entries, flats[0].device, header_bytes=0)
        for peers, (_, *payloads) in packets.outgoing:
            for i, (flat, payload) in enumerate(zip(flats, payloads, strict=True)):
                theirs = [layouts[peer][i] for peer in peers]
                out = section(payload, 0, theirs[0].numel, flat.dtype)
                out.copy_(_gathered(flat, theirs).view_as(out))
        packets.exchange()
        totals: list[Tensor] = []
        for i, (flat, layout) in enumerate(zip(flats, layouts[me], strict=True)):
            arrived = section(packets.incoming[1 + i], 0, layout.numel, flat.dtype)
            own = _gathered(flat, [layout])
            wide = torch.promote_types(flat.dtype, torch.float32)
            totals.append(arrived.sum(0, dtype=wide).add_(own))
        return totals


def _gathered(flat: Tensor, layouts: Sequence[LocalShard]) -> Tensor:
    """Return the entries of each local shard, one after the other."""
    pieces = [flat[of.source(m)] for of in layouts for m in range(len(of.members))]
    return torch.cat(pieces)

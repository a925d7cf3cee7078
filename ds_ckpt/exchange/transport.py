"""Transport of an exchange's bytes: the protocol, `torch.distributed` behind it, and packets.

`virtual` has a transport between threads of one process. `compression.wire` has the format.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist
from torch import Tensor

from ds_ckpt.compression.wire import HEADER_BYTES


def gather_objects(own: Any) -> list[Any]:
    """Return every rank's picklable object, by rank. Collective over the program."""
    found: list[Any] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(found, own)
    return found


Sizes = Sequence[int]
"""Bytes from or for each rank, in their order."""


class Transport(Protocol):
    """One rank's end, at index `dp_rank`, of a group of `world` that exchanges bytes and sums."""

    world: int
    dp_rank: int

    def all_to_all(self, output: Tensor, input: Tensor, received: Sizes, sent: Sizes) -> None:
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

    def all_to_all(self, output: Tensor, input: Tensor, received: Sizes, sent: Sizes) -> None:
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
        header_bytes: int = HEADER_BYTES,
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

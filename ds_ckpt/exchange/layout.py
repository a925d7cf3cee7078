"""Who owns what, and where it lies in the buffer of a bucket. Pure arithmetic, no tensors.

Ownership is ZeRO-3's: process r owns entries [r * chunk, min((r + 1) * chunk, numel)) of the
flattened tensor, chunk = ceil(numel / world); the last processes may own fewer entries or none.

A packet is what one process sends to one other for a bucket:

    header (8 bytes; byte 0 is 1 where the sender saw a non-finite value) | payload | payload | ...

one payload per tensor, for the destination's shard of it. All payloads of the bucket go to the
same owner, so a packet's size depends on its destination alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

HEADER_BYTES = 8
_MAX_SEGMENT_BYTES = 1024 * 1024

Order = Callable[[int, int, int, int, int], Iterable[tuple[int, int, Sequence[int]]]]
"""In which order the processes are added up, for tensors that travel uncompressed.

(numel, itemsize, world, start, stop) -> pieces (start, stop, order) that cover [start, stop) of a
buffer of `numel` elements. The buffer is the one that DeepSpeed would reduce: for each owner, its
chunk of each tensor of the bucket, padded to `ceil(tensor's numel / world)`.
"""


@dataclass(frozen=True)
class ShardLayout:
    """ZeRO-3's division of `numel` entries over `world` processes."""

    numel: int
    world: int

    @property
    def chunk(self) -> int:
        """Entries of a full shard."""
        return -(-self.numel // self.world)

    def shard(self, process: int) -> slice:
        """The entries of the flattened tensor that `process` owns, possibly none."""
        return slice(self._start(process), self._start(process + 1))

    def size(self, process: int) -> int:
        """Entries that `process` owns."""
        return self._start(process + 1) - self._start(process)

    def _start(self, process: int) -> int:
        return min(process * self.chunk, self.numel)


@dataclass(frozen=True)
class LocalShard:
    """What a group of processes exchanges of a tensor: the shards that its members own, in a row.

    With one level the group is the whole world, and this is the flattened tensor. With two levels
    it is one process of each host, and this is `1 / processes a host` of the tensor.

    Attributes:
        tensor: ZeRO-3's division of the whole tensor.
        members: the group's processes by their index in the world, ascending.
    """

    tensor: ShardLayout
    members: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Entries of the local shard."""
        return sum(self.size(m) for m in range(len(self.members)))

    def source(self, member: int) -> slice:
        """Where a member's shard lies in the flattened tensor."""
        return self.tensor.shard(self.members[member])

    def shard(self, member: int) -> slice:
        """Where a member's shard lies in the local shard."""
        start = sum(self.size(m) for m in range(member))
        return slice(start, start + self.size(member))

    def size(self, member: int) -> int:
        """Entries that a member owns."""
        return self.tensor.size(self.members[member])


@dataclass(frozen=True)
class PacketLayout:
    """Byte offsets of one bucket, seen from process `dp_rank`.

    Attributes:
        send_bytes: packet size by destination; 0 for the process itself.
        receive_bytes: packet size by source; 0 for the process itself.
        payloads: start of each tensor's payload inside a packet, by destination, and one more
            entry: the end of the packet.
    """

    dp_rank: int
    send_bytes: tuple[int, ...]
    receive_bytes: tuple[int, ...]
    payloads: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        shards: Sequence[ShardLayout | LocalShard],
        payload_bytes: Sequence[Callable[[int], int]],
        *,
        dp_rank: int,
        world: int,
    ) -> PacketLayout:
        """Lay out a bucket.

        Args:
            shards: of each tensor.
            payload_bytes: of each tensor, its payload's size by number of entries; multiples of 8.
        """
        payloads = tuple(
            tuple(
                accumulate(
                    (
                        size_of(shard.size(dest))
                        for shard, size_of in zip(shards, payload_bytes, strict=True)
                    ),
                    initial=HEADER_BYTES,
                )
            )
            for dest in range(world)
        )
        peers = [p != dp_rank for p in range(world)]
        own_bytes = payloads[dp_rank][-1]
        return cls(
            dp_rank=dp_rank,
            send_bytes=tuple(payloads[p][-1] if peers[p] else 0 for p in range(world)),
            receive_bytes=tuple(own_bytes if peers[p] else 0 for p in range(world)),
            payloads=payloads,
        )

    def outgoing(self, dest: int) -> int:
        """Start of the packet for `dest` in the send buffer."""
        return sum(self.send_bytes[:dest])

    def incoming(self, source: int) -> int:
        """Start of the packet from `source` in the receive buffer."""
        return sum(self.receive_bytes[:source])

    def sent(self, dest: int, tensor: int) -> slice:
        """Bytes of the send buffer that hold `tensor`'s payload for `dest`."""
        start = self.outgoing(dest)
        return slice(start + self.payloads[dest][tensor], start + self.payloads[dest][tensor + 1])

    def received(self, source: int, tensor: int) -> slice:
        """Bytes of the receive buffer that hold `tensor`'s payload from `source`."""
        start, own = self.incoming(source), self.payloads[self.dp_rank]
        return slice(start + own[tensor], start + own[tensor + 1])


def ascending(
    numel: int, itemsize: int, world: int, start: int, stop: int
) -> Iterable[tuple[int, int, Sequence[int]]]:
    """An `Order`: processes by index everywhere."""
    return [(start, stop, range(world))]


def ring_chunk_elements(numel: int, itemsize: int, world: int) -> int:
    """Elements of one ring chunk of a buffer of `numel` elements."""
    total_bytes = numel * itemsize
    segments_each = max(2, -(-total_bytes // (world * _MAX_SEGMENT_BYTES)))
    segment_bytes = -(-total_bytes // (segments_each * world))
    return segments_each * -(-segment_bytes // itemsize)


def ring_pieces(
    numel: int, itemsize: int, world: int, start: int, stop: int
) -> Iterator[tuple[int, int, list[int]]]:
    """An `Order`: cut `[start, stop)` of a buffer where the order of summation changes.

    Yields `(start, stop, order)`: processes in the order in which they are added. Chunk `c` starts
    its way round the ring at process `c - 1` and ends at `c`.
    """
    chunk = max(1, ring_chunk_elements(numel, itemsize, world))
    while start < stop:
        index = min(start // chunk, world - 1)
        end = stop if index == world - 1 else min(stop, (index + 1) * chunk)
        yield start, end, [(index - 1 - hop) % world for hop in range(world)]
        start = end

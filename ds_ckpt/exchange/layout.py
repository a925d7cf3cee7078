"""Who owns what, and in which order it is summed. Pure arithmetic.

Ownership is ZeRO-3's: process r owns entries [r * chunk, min((r + 1) * chunk, numel)) of the
flattened tensor, chunk = ceil(numel / world); the last processes may own fewer entries or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from torch import Tensor

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
class Run:
    """Shards of one size, `step` entries from each to the next in the flattened tensor.

    Attributes:
        source: where the first begins there.
        start: where it begins in the local shard, in which they follow each other.
    """

    count: int
    size: int
    step: int
    source: int
    start: int


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
        return self._starts[-1]

    @cached_property
    def sizes(self) -> list[int]:
        """Entries that each member owns."""
        return [self.tensor.size(member) for member in self.members]

    @cached_property
    def _starts(self) -> list[int]:
        """Of the members' shards in the local shard, and its end."""
        return [0, *accumulate(self.sizes)]

    def source(self, member: int) -> slice:
        """Where a member's shard lies in the flattened tensor."""
        return self.tensor.shard(self.members[member])

    def shard(self, member: int) -> slice:
        """Where a member's shard lies in the local shard."""
        return slice(self._starts[member], self._starts[member + 1])

    def size(self, member: int) -> int:
        """Entries that a member owns."""
        return self.sizes[member]

    def rows(self, local: Tensor, members: range) -> Tensor:
        """The shards of members that follow each other, all of one size, as views: [members, n]."""
        start, stop = self._starts[members[0]], self._starts[members[-1] + 1]
        return local[start:stop].view(len(members), (stop - start) // len(members))

    @cached_property
    def runs(self) -> list[Run]:
        """The shards that are not empty, in order, as few runs as there are."""
        found, first, start = list[Run](), 0, 0
        while first < len(self.members) and (size := self.size(first)):
            at = self.source(first).start
            step = self.source(first + 1).start - at if first + 1 < len(self.members) else size
            last = first + 1
            while (
                last < len(self.members)
                and self.size(last) == size
                and self.source(last).start == at + step * (last - first)
            ):
                last += 1
            found.append(Run(last - first, size, step, at, start))
            start += size * (last - first)
            first = last
        return found


@lru_cache(maxsize=4096)
def local_shard(tensor: ShardLayout, members: tuple[int, ...]) -> LocalShard:
    """The same object for the same division: what it has worked out is worked out once, which with
    many processes takes longer than all that is done with it."""
    return LocalShard(tensor, members)


def ascending(
    numel: int, itemsize: int, world: int, start: int, stop: int
) -> Iterable[tuple[int, int, Sequence[int]]]:
    """An `Order`: processes by index everywhere."""
    return [(start, stop, range(world))]


def ring_pieces(
    numel: int, itemsize: int, world: int, start: int, stop: int
) -> Iterator[tuple[int, int, list[int]]]:
    """An `Order`: cut `[start, stop)` of a buffer where the order of summation changes.

    Yields `(start, stop, order)`: processes in the order in which they are added. Chunk `c` starts
    its way round the ring at process `c - 1` and ends at `c`.
    """
    total_bytes = numel * itemsize
    segments_each = max(2, -(-total_bytes // (world * _MAX_SEGMENT_BYTES)))
    segment_bytes = -(-total_bytes // (segments_each * world))
    chunk = max(1, segments_each * -(-segment_bytes // itemsize))
    while start < stop:
        index = min(start // chunk, world - 1)
        end = stop if index == world - 1 else min(stop, (index + 1) * chunk)
        yield start, end, [(index - 1 - hop) % world for hop in range(world)]
        start = end

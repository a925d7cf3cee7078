"""Ownership of entries, as ZeRO-3 divides tensors. Pure arithmetic.

Rank r owns entries [r * chunk, min((r + 1) * chunk, numel)) of the flattened tensor, chunk =
ceil(numel / world). The last ranks may own fewer entries or none.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from torch import Tensor


@dataclass(frozen=True)
class ShardLayout:
    """ZeRO-3's division of `numel` entries over `world` ranks."""

    numel: int
    world: int

    @property
    def chunk(self) -> int:
        """Entries of a full shard."""
        return -(-self.numel // self.world)

    def shard(self, rank: int) -> slice:
        """Return the entries of the flattened tensor that `rank` owns, possibly none."""
        return slice(self._start(rank), self._start(rank + 1))

    def size(self, rank: int) -> int:
        """Return the number of entries that `rank` owns."""
        return self._start(rank + 1) - self._start(rank)

    def _start(self, rank: int) -> int:
        return min(rank * self.chunk, self.numel)


@dataclass(frozen=True)
class LocalShard:
    """The part of a tensor that a group of ranks exchanges: its members' shards, in a row.

    With one level the group is the whole world, and this is the flattened tensor. With two levels
    it is one rank of each node (`members`, ascending). Then this is `1 / ranks a node` of the
    tensor.
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
        """Starts of the members' shards in the local shard, and its end."""
        return [0, *accumulate(self.sizes)]

    def source(self, member: int) -> slice:
        """Return the place of a member's shard in the flattened tensor."""
        return self.tensor.shard(self.members[member])

    def shard(self, member: int) -> slice:
        """Return the place of a member's shard in the local shard."""
        return slice(self._starts[member], self._starts[member + 1])

    def rows(self, local: Tensor, members: range) -> Tensor:
        """Return shards of one size of consecutive members, as a view: [members, n]."""
        start, stop = self._starts[members[0]], self._starts[members[-1] + 1]
        return local[start:stop].view(len(members), (stop - start) // len(members))


@lru_cache(maxsize=4096)
def local_shard(tensor: ShardLayout, members: tuple[int, ...]) -> LocalShard:
    """Return one object for equal arguments: with many ranks its cached properties are slow."""
    return LocalShard(tensor, members)

"""Split the inputs of blocks over ranks that hold equal inputs.

Each of n ranks keeps 1/n of the bytes, in an `InputStore`. When backward reaches a call, its parts
are all-gathered, and those of the call before it. A gather needs every rank, so it follows from
facts that all ranks share. At the start of backward the ranks compare them, in one message of a
fixed size. All ranks receive the same answers, so all raise or none does, and none waits for
another.
"""

import hashlib
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ds_ckpt.activation.fingerprints import checksum
from ds_ckpt.activation.offload import (
    BackwardTracker,
    BlockCall,
    InPlaceRef,
    InputStore,
    OffloadedRef,
    SavedStorage,
    TensorView,
    Wait,
    storage_bytes,
)
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.telemetry.counters import PartitionCounters


class Group(Protocol):
    """Ranks over which inputs are split."""

    processes: tuple[int, ...]
    """Global ranks, in the group's order."""
    index: int
    """This rank's place in `processes`."""

    def gather(self, part: Tensor, joined: Tensor) -> Wait:
        """Start to fill `joined` (uint8 [size * n]) with every rank's `part` (uint8 [n])."""

    def exchange(self, mine: Tensor) -> Tensor:
        """Return int64 [size, n] on the host: every rank's `mine` (int64 [n])."""


def _hash(*values: object) -> int:
    """Return a hash that is equal on every rank, from -2**63 to 2**63 - 1."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def shard_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes of each of `ranks` equal parts, rounded up."""
    return -(-nbytes // ranks)


def shard_of(flat: Tensor, ranks: int, index: int) -> Tensor:
    """Copy part `index` of `flat` (uint8 [n]) to uint8 [shard_bytes], padded with 0."""
    size = shard_bytes(flat.numel(), ranks)
    part = flat[index * size : (index + 1) * size]
    return nn.functional.pad(part, (0, size - part.numel()))


class Shard(SavedStorage):
    """This rank's part of a storage, and the parts of all ranks while they are `joined`."""

    joined: Tensor | None = None

    def __init__(self, tensor: Tensor, part: OffloadedRef | InPlaceRef) -> None:
        super().__init__(tensor)
        self.part = part


class ShardedRef(TensorView):
    """Reference of a graph to an argument of a block, which may be split."""

    def __init__(self, tensor: Tensor, content: Shard | OffloadedRef | InPlaceRef) -> None:
        super().__init__(tensor)
        self.content = content


@dataclass(eq=False)
class Partition:
    """Split tensors of block calls between forward and backward.

    Storages from `min_bytes` on are split, and gathered `ahead` calls ahead. Values are compared in
    the first call of each block and every `every`-th after it.
    """

    group: Group
    store: InputStore
    device: torch.device
    min_bytes: int = 0
    ahead: int = 1
    every: int = 100

    def __post_init__(self) -> None:
        self.counters = PartitionCounters()
        self._ranks = len(self.group.processes)
        self._forwards: Counter[str] = Counter()
        self._layout = 0
        """Hash of all inputs that were not compared yet; 0 if there are none."""
        self._checksums: list[Tensor] = []
        self._error: UnsupportedError | None = None
        self._shards: weakref.WeakValueDictionary[int, Shard] = weakref.WeakValueDictionary()
        self._calls: weakref.WeakKeyDictionary[BlockCall, list[Shard]] = weakref.WeakKeyDictionary()
        self._compares = False
        self._before: dict[int, list[Shard]] = {}
        """Calls that were alive on all ranks when this backward began. Referenced, because a rank
        whose collector frees a graph meanwhile has to gather with the others."""
        self._reached: set[int] = set()
        self._here: list[Shard] = []
        self._tracker = BackwardTracker(self._end_backward)

    def begin(self, label: str) -> None:
        """Start a call of block `label`."""
        if torch._C._current_graph_task_id() == -1:
            self._end_backward()  # the last one may have raised an error
        if self._error is not None:
            raise self._error
        self._forwards[label] += 1
        self._compares = self._forwards[label] % self.every == 1 % self.every

    def pack(self, tensor: Tensor, label: str, call: BlockCall) -> ShardedRef:
        """Return what the graph holds instead of `tensor`, an argument of block `label`."""
        if self.store.stays(tensor, call, self.min_bytes):
            self._note(label, tensor)
            return ShardedRef(tensor, self.store.pack(tensor, call))
        shard = self._shards.get(tensor.untyped_storage()._cdata)
        if shard is None or shard.version != tensor._version:
            part = shard_of(storage_bytes(tensor), self._ranks, self.group.index)
            shard = Shard(tensor, self.store.pack(part, call))
            self._shards[shard.key] = shard
            self.counters.kept_bytes[label] += part.nbytes
        self.store.share(shard.part, call)
        shard.calls.add(call.number)
        self._calls.setdefault(call, []).append(shard)
        self._note(label, tensor, shard.nbytes, tensor.storage_offset(), self._compares)
        if self._compares:
            self._checksums.append(checksum(tensor))
        return ShardedRef(tensor, shard)

    def _note(self, label: str, tensor: Tensor, *layout: object) -> None:
        """Record what must be equal on all ranks besides values."""
        strides = tensor.stride() if tensor.layout == torch.strided else None
        self._layout = _hash(self._layout, label, tensor.shape, tensor.dtype, strides, layout)

    def _compare(self, alive: object) -> bool:
        """Compare the notes over the group; return whether `alive` is equal, too. Collective.

        Raises:
            UnsupportedError: notes differ, on every rank and in every later call.
        """
        if self._error is not None:
            raise self._error
        values = torch.zeros((), dtype=torch.int64, device=self.device)
        if self._checksums:
            values = checksum(torch.stack(self._checksums)).to(self.device)
        known = torch.tensor([self._layout, _hash(alive)], device=self.device)
        answers = self.group.exchange(torch.cat([known, values.reshape(1)]))
        self._layout, self._checksums = 0, []
        layout_differs, alive_differs, values_differ = (answers != answers[0]).any(0).tolist()
        if layout_differs or values_differ:
            what = "other numbers, shapes or types" if layout_differs else "other values"
            ranks = ", ".join(map(str, self.group.processes))
            found = f"inputs of blocks with {what} on some of the ranks {ranks}"
            why = "each rank keeps its own part only: recomputation would begin with a mixture"
            remedy = (
                "use tensor parallelism without sequence parallelism, equal batches, and equal "
                "seeds for dropout on what is not sharded; or set partition_activations to false"
            )
            problem = Problem("$.ds_ckpt.activation.partition", found, why, remedy)
            headline = "checkpointed inputs cannot be split over this group"
            self._error = UnsupportedError(problem, headline=headline)
            raise self._error
        return not alive_differs

    def unpack(self, ref: ShardedRef, call: BlockCall) -> Tensor:
        """Return a tensor of `call`, on the device. Collective at its first tensor."""
        self._reach(call)
        if not isinstance(ref.content, Shard):
            return self.store.unpack(ref.content, call)
        self._gather(ref.content, late=True)
        ref.content.wait()
        assert ref.content.joined is not None
        return ref.over(ref.content.joined)

    def _reach(self, call: BlockCall) -> None:
        """Gather the tensors of `call`, which backward has reached, and of calls before it."""
        began = self._tracker.began()
        if began:
            self._end_backward()
        if call.number in self._reached:
            return
        if began or self._layout:
            calls = sorted(self._calls, key=lambda known: known.number)
            alive = {known.number: self._calls[known] for known in calls}
            sizes = [(number, [s.nbytes for s in shards]) for number, shards in alive.items()]
            # if a rank's collector is late, nothing is gathered before it is needed
            self._before = alive if self._compare(sizes) else {}
        self._reached.add(call.number)
        self.store.reach(call)
        for shard in [s for s in self._here if s.calls <= self._reached - {call.number}]:
            self._drop(shard)
        self._before.pop(call.number, None)
        for shard in self._calls.get(call, []):
            self._gather(shard, late=True)
        before = sorted((n for n in self._before if n < call.number), reverse=True)
        for number in before[: self.ahead]:
            for shard in self._before[number]:
                self._gather(shard, late=False)

    def _gather(self, shard: Shard, *, late: bool) -> None:
        """Start to gather a shard that is not here. Collective."""
        if shard.joined is not None:
            return
        size = shard_bytes(shard.nbytes, self._ranks)
        shard.joined = torch.empty(size * self._ranks, dtype=torch.uint8, device=self.device)
        shard.pending = self.group.gather(self.store.take(shard.part), shard.joined)
        self._here.append(shard)
        self.counters.gathers += 1
        self.counters.late += late

    def _drop(self, shard: Shard) -> None:
        shard.wait()
        shard.joined = None
        self._here.remove(shard)

    def _end_backward(self) -> None:
        self._reached.clear()
        self._before = {}
        for shard in list(self._here):
            self._drop(shard)

"""Split the inputs of blocks over ranks that hold equal inputs.

Of every tensor that a block call is given, each of n ranks keeps 1/n of the bytes, in an
`InputStore`: on the device or in host memory. When backward reaches a call, its parts are
all-gathered, and those of the call before it.

A gather needs every rank. What is gathered, and when, therefore follows from facts that all ranks
share: the order of calls in forward and backward, and the calls that were alive at the start of
backward. They are compared first, in one message of a fixed size, together with hashes of the
layout of all inputs and, in every 100th call of a block, of their values. All ranks see the same
answers, so all of them raise, and none waits for another.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ds_ckpt.activation.fingerprints import checksum
from ds_ckpt.activation.offload import (
    BackwardWatch,
    BlockCall,
    ByteRange,
    InPlaceRef,
    InputStore,
    Key,
    OffloadedRef,
    StorageSlice,
    TensorView,
    Ticket,
    key_of,
)
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.telemetry.counters import PartitionCounters
from ds_ckpt.telemetry.memory import in_words

HEADLINE = "checkpointed inputs cannot be split over this group"
_MAX_NOTES = 8192
"""Older notes, of forwards without a backward, are counted but not kept."""


class Group(Protocol):
    """Ranks over which inputs are split."""

    @property
    def processes(self) -> tuple[int, ...]:
        """Return the global ranks, in the group's order."""

    @property
    def index(self) -> int:
        """Return this rank's place in `processes`."""

    def gather(self, part: Tensor, joined: Tensor) -> Ticket:
        """Start to fill `joined` (uint8 [size * n]) with every rank's `part` (uint8 [n])."""

    def exchange(self, mine: Tensor) -> Tensor:
        """Return int64 [size, n] on the host: every rank's `mine` (int64 [n])."""


# do all ranks hold the same?


@dataclass(frozen=True)
class _Note:
    label: str
    what: str
    layout: int
    """Hash of everything that must be equal for parts to fit together."""
    checksum: Tensor | None
    """Checksum of the values; None if they are not compared."""


def _hash(*values: object) -> int:
    """Return a hash that is equal on every rank, from -2**63 to 2**63 - 1."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class RankConsistency:
    """Inputs that a group has split since it compared them last.

    Args:
        group: ranks that must agree.
        device: device of the group's messages.
        every: values are compared in the first call of each block and every `every`-th after it.
    """

    def __init__(self, group: Group, device: torch.device, *, every: int = 100) -> None:
        self._group, self._device, self._every = group, device, every
        self._calls: Counter[str] = Counter()
        self._notes: deque[_Note] = deque(maxlen=_MAX_NOTES)
        self._count = self._layout = 0
        self._failed: Problem | None = None
        self.compared = 0
        """Tensors whose values were compared."""

    @property
    def pending(self) -> bool:
        """Return whether anything has not been compared yet."""
        return self._count > 0

    def begin(self, label: str) -> bool:
        """Start a call of block `label`; return whether its values are compared.

        Raises:
            UnsupportedError: an earlier comparison failed.
        """
        self._raise_failure()
        compares = self._calls[label] % self._every == 0
        self._calls[label] += 1
        return compares

    def note(
        self, label: str, place: int, tensor: Tensor, layout: str, check: Tensor | None
    ) -> None:
        """Record that a call of block `label` keeps `tensor` as its `place`-th, from 1.

        Args:
            label: name of the block.
            place: number of the tensor in the call.
            tensor: the tensor.
            layout: what must be equal on all ranks besides shape and strides.
            check: checksum of its values; None if they are not compared.
        """
        kind = in_words(tensor.shape, tensor.dtype)
        strides = tensor.stride() if tensor.layout == torch.strided else None
        number = _hash(label, place, kind, strides, layout, check is not None)
        self._layout = _hash(self._layout, number)
        self._count += 1
        self._notes.append(_Note(label, f"tensor {place} ({kind})", number, check))
        self.compared += check is not None

    def compare(self, alive: list[tuple[int, list[int]]]) -> bool:
        """Compare all notes over the group; return whether `alive` is equal, too. Collective.

        Raises:
            UnsupportedError: notes differ, on every rank and at every later call.
        """
        self._raise_failure()
        checks = [note.checksum for note in self._notes if note.checksum is not None]
        values = torch.zeros((), dtype=torch.int64, device=self._device)
        if checks:
            values = checksum(torch.stack(checks)).to(self._device)
        known = torch.tensor([self._count, self._layout, _hash(alive)], device=self._device)
        rows = self._group.exchange(torch.cat([known, values.reshape(1)])).tolist()
        if any(row[:2] + row[3:] != rows[0][:2] + rows[0][3:] for row in rows):
            self._failed = self._difference([row[0] for row in rows])
            self._raise_failure()
        self._notes.clear()
        self._count = self._layout = 0
        return all(row[2] == rows[0][2] for row in rows)

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise UnsupportedError(self._failed, headline=HEADLINE)

    def _difference(self, counts: list[int]) -> Problem:
        """Describe the first note that differs between ranks. Collective."""
        width = min(max(counts), _MAX_NOTES)
        mine = torch.full((width, 2), -1, dtype=torch.int64, device="cpu")
        for row, note in zip(mine, self._notes, strict=False):
            row[0] = note.layout
            row[1] = 0 if note.checksum is None else note.checksum
        answers = self._group.exchange(mine.flatten().to(self._device))
        everyone = answers.view(len(counts), width, 2)
        differs = (everyone != everyone[0]).any(0).any(1).nonzero()
        place = int(differs[0]) if len(differs) else 0
        rows = everyone[:, place].tolist()
        other = next((i for i, row in enumerate(rows) if row != rows[0]), len(rows) - 1)
        ranks = self._group.processes
        between = f"ranks {ranks[0]} and {ranks[other]}"
        where, why = "a block", "parts of a tensor that another rank never had cannot be joined"
        if place >= min(counts):
            where = self._notes[-1].label if self._notes else where
            found = f"{between} keep {counts[0]} and {counts[other]} tensors for this backward"
        else:
            note = self._notes[place]
            where, found = note.label, f"{note.what} with other values on {between}"
            if any(row[0] != rows[0][0] for row in rows):
                found = f"{note.what} here, and something else on other ranks: {between} differ"
            why = (
                "each rank keeps its own part only, so recomputation would begin with a mixture of "
                "different tensors: silently wrong gradients"
            )
        remedy = (
            f"make ranks {', '.join(map(str, ranks))} compute the same: tensor parallelism without "
            "sequence parallelism, equal batches, and equal seeds for dropout on what is not "
            "sharded; or set partition_activations ($.ds_ckpt.activation.partition) to false"
        )
        return Problem(where, found, why, remedy)


# shards


def shard_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes of each of `ranks` equal parts, rounded up."""
    return -(-nbytes // ranks)


def shard_of(flat: Tensor, ranks: int, index: int) -> Tensor:
    """Copy part `index` of `flat` (uint8 [n]) to uint8 [shard_bytes], padded with 0."""
    size = shard_bytes(flat.numel(), ranks)
    part = flat[index * size : (index + 1) * size]
    if part.numel() == size:
        return part.clone()
    padded = flat.new_zeros(size)
    padded[: part.numel()].copy_(part)
    return padded


class Shard(StorageSlice):
    """This rank's part of a slice. A graph's `ShardedRef`s own it.

    Attributes:
        number: number of the shard, on this rank.
        part: reference to the part's bytes in the store.
        checksums: checksums of the values, by layout of the tensor.
        joined: parts of all ranks, in order, while they are here (uint8).
        arriving: gather that still fills `joined`.
    """

    def __init__(self, tensor: Tensor, number: int, part: OffloadedRef | InPlaceRef) -> None:
        super().__init__(tensor)
        self.number = number
        self.part = copy.copy(part)
        if isinstance(self.part, OffloadedRef):
            self.part.call = None
        self.checksums: dict[tuple[object, ...], Tensor] = {}
        self.joined: Tensor | None = None
        self.arriving: Ticket | None = None

    def wait(self) -> None:
        """Order later work of the compute stream after the gather."""
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None


class ShardedRef(TensorView):
    """Reference of a graph to a tensor that may be split.

    Attributes:
        shard: None if the tensor is not split.
        kept: the part, or the whole tensor, in the store.
    """

    __slots__ = ("kept", "shard")

    def __init__(
        self,
        tensor: Tensor,
        shard: Shard | None,
        kept: OffloadedRef | InPlaceRef,
        call: BlockCall,
    ) -> None:
        super().__init__(tensor, call)
        self.shard, self.kept = shard, kept


@dataclass
class _Gathered:
    shard: weakref.ref[Shard]
    users: frozenset[int]
    """Calls that may still need it in this backward."""
    used: bool = False


class Partition:
    """Split tensors of block calls between forward and backward.

    Args:
        group: ranks with equal tensors.
        store: keeps the parts.
        device: device of the model.
        min_bytes: smaller tensors are not split.
        ahead: number of earlier calls whose tensors are gathered ahead.
        every: see `RankConsistency`.
    """

    def __init__(
        self,
        group: Group,
        store: InputStore,
        device: torch.device,
        *,
        min_bytes: int = 0,
        ahead: int = 1,
        every: int = 100,
    ) -> None:
        self.counters = PartitionCounters()
        self.consistency = RankConsistency(group, device, every=every)
        self._group, self._store, self._device = group, store, device
        self._ranks = len(group.processes)
        self._min_bytes, self._ahead = min_bytes, ahead
        self._shards: weakref.WeakValueDictionary[Key, Shard] = weakref.WeakValueDictionary()
        self._number = 0
        self._calls: weakref.WeakKeyDictionary[BlockCall, list[weakref.ref[Shard]]] = (
            weakref.WeakKeyDictionary()
        )
        self._place, self._compares = 0, False
        self._before: dict[int, list[Shard]] = {}
        """Calls that were alive on all ranks when this backward began. Referenced, because a rank
        whose collector frees a graph meanwhile has to gather with the others."""
        self._known: set[int] = set()
        self._agreed = False
        self._reached: set[int] = set()
        self._here: dict[int, _Gathered] = {}
        """Gathered shards, by number."""
        self._watch = BackwardWatch(self._end_backward)

    # forward

    def begin(self, label: str) -> None:
        """Start a call of block `label`.

        Raises:
            UnsupportedError: ranks were found to differ before.
        """
        if torch._C._current_graph_task_id() == -1 and (self._reached or self._here):
            self._end_backward()  # it raised an error
        self._place, self._compares = 0, self.consistency.begin(label)

    def pack(self, tensor: Tensor, label: str, call: BlockCall) -> ShardedRef:
        """Return what the graph holds instead of `tensor`, an argument of block `label`."""
        self._place += 1
        reason = self._store.unfit(tensor)
        too_small = tensor.numel() == 0 or ByteRange.covering(tensor).nbytes < self._min_bytes
        if reason is None and too_small:
            reason = "small"
        if reason is not None:
            self.counters.left[reason] += 1
            self.consistency.note(label, self._place, tensor, reason, None)
            return ShardedRef(tensor, None, self._store.pack(tensor, call), call)
        shard = self._shards.get(key_of(tensor))
        if shard is None or shard.version != tensor._version:
            shard = self._split(tensor, label, call)
        part = shard.part
        if isinstance(part, OffloadedRef):
            part = self._store.share(part, call)
        shard.calls.add(call.number)
        offset = tensor.storage_offset() * tensor.element_size() - shard.range.start
        check = self._checksum(shard, tensor) if self._compares else None
        self.consistency.note(label, self._place, tensor, f"{shard.nbytes} bytes, {offset}", check)
        self._calls.setdefault(call, []).append(weakref.ref(shard))
        return ShardedRef(tensor, shard, part, call)

    def _split(self, tensor: Tensor, label: str, call: BlockCall) -> Shard:
        self._number += 1
        flat = ByteRange.covering(tensor).of(tensor)
        part = shard_of(flat, self._ranks, self._group.index)
        shard = Shard(tensor, self._number, self._store.pack(part, call))
        self._shards[shard.key] = shard
        self.counters.whole_bytes[label] += flat.nbytes
        self.counters.kept_bytes[label] += part.nbytes
        return shard

    def _checksum(self, shard: Shard, tensor: Tensor) -> Tensor:
        view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        if view not in shard.checksums:  # masks and the like are given to every block
            shard.checksums[view] = checksum(tensor)
        return shard.checksums[view]

    # backward

    def unpack(self, ref: ShardedRef) -> Tensor:
        """Return the tensor, on the device. Collective at the first tensor of each call.

        Raises:
            UnsupportedError: tensors differ between ranks; on every rank.
        """
        assert ref.call is not None
        self._reach(ref.call)
        shard = ref.shard
        if shard is None:
            return self._store.unpack(ref.kept)
        self._gather(shard, late=True)
        self._here[shard.number].used = True
        shard.wait()
        assert shard.joined is not None
        return ref.over(shard.joined, shard.range)

    def _reach(self, call: BlockCall) -> None:
        """Gather the tensors of `call`, which backward has reached, and of calls before it."""
        began = self._watch.began()
        if began:
            self._end_backward()
        if call.number in self._reached:
            return
        if began or self.consistency.pending:
            self._synchronize_ranks()
        self._reached.add(call.number)
        self._store.reach(call)
        for number, gathered in list(self._here.items()):
            if gathered.users <= self._reached - {call.number}:
                self._drop(number)
        self._before.pop(call.number, None)
        for shard in self._alive(call):
            self._gather(shard, late=True)
        before = sorted((n for n in self._before if n < call.number), reverse=True)
        for number in before[: self._ahead]:
            for shard in self._before[number]:
                self._gather(shard, late=False)

    def _alive(self, call: BlockCall) -> list[Shard]:
        return [shard for ref in self._calls.get(call, []) if (shard := ref()) is not None]

    def _synchronize_ranks(self) -> None:
        alive = {call.number: self._alive(call) for call in self._calls}
        alive = {number: alive[number] for number in sorted(alive) if alive[number]}
        # if a rank's collector is late, nothing is gathered before it is needed
        self._agreed = self.consistency.compare(
            [(number, [s.nbytes for s in shards]) for number, shards in alive.items()]
        )
        self._before = alive if self._agreed else {}
        self._known = set(self._before)

    def _gather(self, shard: Shard, *, late: bool) -> None:
        """Start to gather a shard that is not here. Collective."""
        if shard.number in self._here:
            return
        size = shard_bytes(shard.nbytes, self._ranks)
        shard.joined = torch.empty(size * self._ranks, dtype=torch.uint8, device=self._device)
        shard.arriving = self._group.gather(self._store.take(shard.part), shard.joined)
        users = shard.calls & (self._known | self._reached) if self._agreed else shard.calls
        self._here[shard.number] = _Gathered(weakref.ref(shard), frozenset(users))
        self.counters.gathers += 1
        self.counters.received_bytes += shard.joined.numel() - size
        self.counters.late += late

    def _drop(self, number: int) -> None:
        gathered = self._here.pop(number)
        self.counters.in_vain += not gathered.used
        shard = gathered.shard()
        if shard is not None:
            shard.wait()
            shard.joined = None

    def _end_backward(self) -> None:
        """Release every gathered tensor."""
        self._reached.clear()
        self._before, self._known = {}, set()
        for number in list(self._here):
            self._drop(number)

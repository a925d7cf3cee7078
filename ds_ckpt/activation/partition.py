"""Splits what blocks keep for their recompute over processes that hold the same.

Of every tensor that a block call is given, a process keeps one part in `size` of its bytes, from
the moment that it is kept: in a `InputStore`, so on the device, in an arena or in host memory.
When backward comes to a call, the parts are gathered, and those of the call before it too.

A gather needs every process. So what is gathered, and when, follows from what all of them know:
the order of calls in forward and backward, and which calls were alive when backward began, on which
they agree (`rank_consistency.py`). Never from when a garbage collector runs.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ckpt.activation.fingerprints import checksum
from ds_ckpt.activation.offload import BackwardWatch, InputStore
from ds_ckpt.activation.pieces import (
    BlockCall,
    Key,
    Left,
    Shard,
    Split,
    Stretch,
    bytes_of,
    key_of,
    part_bytes,
    part_of,
)
from ds_ckpt.activation.rank_consistency import Group, RankConsistency, hash_of
from ds_ckpt.telemetry.counters import PartitionCounters


@dataclass
class _Gathered:
    shard: weakref.ref[Shard]
    users: frozenset[int]
    """Calls that may still ask for it in this backward."""
    asked: bool = False


class Partition:
    """Takes tensors in during forward and gives them out, whole, in backward.

    Args:
        group: who holds the same tensors.
        store: keeps the parts.
        device: where the model computes.
        min_bytes: smaller tensors are kept whole.
        ahead: how many calls before the one that backward is at are gathered too.
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
        self._parts = len(group.processes)
        self._min_bytes, self._ahead = min_bytes, ahead
        self._shards: weakref.WeakValueDictionary[Key, Shard] = weakref.WeakValueDictionary()
        self._numbers = 0
        self._calls: weakref.WeakKeyDictionary[BlockCall, list[weakref.ref[Shard]]] = (
            weakref.WeakKeyDictionary()
        )
        self._place, self._compares = 0, False
        """Of the call that keeps tensors now: how many it has kept, whether values count."""
        self._before: dict[int, list[Shard]] = {}
        """Of calls that were alive when this backward began, if all processes agreed on them. Held,
        since a process whose collector frees a graph meanwhile has to gather with the others."""
        self._known: set[int] = set()
        """Numbers of those calls."""
        self._agreed = False
        self._reached: set[int] = set()
        self._here: dict[int, _Gathered] = {}
        """By number of the shard."""
        self._watch = BackwardWatch(self._forget_all)

    # -- forward ---------------------------------------------------------------------------------

    def begin(self, label: str) -> None:
        """A call of block `label` is about to keep its tensors.

        Raises UnsupportedError: the group was found to differ before.
        """
        if torch._C._current_graph_task_id() == -1 and (self._reached or self._here):
            self._forget_all()  # of a backward that ended with an error
        self._place, self._compares = 0, self.consistency.begin(label)

    def pack(self, tensor: Tensor, label: str, call: BlockCall) -> Split:
        """What `call` holds in the place of `tensor`, which block `label` was given."""
        self._place += 1
        reason = self._store.unfit(tensor)
        if reason is None and (tensor.numel() == 0 or Stretch.of(tensor).nbytes < self._min_bytes):
            reason = "small"  # an expanded one is as large as what it repeats
        if reason is not None:
            self.counters.left[reason] += 1
            self.consistency.note(label, self._place, tensor, reason, None)
            return Split(tensor, None, self._store.pack(tensor, call), call)
        shard = self._shards.get(key_of(tensor))
        if shard is None or shard.version != tensor._version:
            shard = self._split(tensor, label, call)
        part = shard.part if isinstance(shard.part, Left) else self._store.again(shard.part, call)
        shard.calls.add(call.number)
        offset = tensor.storage_offset() * tensor.element_size() - shard.stretch.start
        check = self._checksum(shard, tensor) if self._compares else None
        layout = f"{shard.stretch.nbytes} bytes, {offset}"
        self.consistency.note(label, self._place, tensor, layout, check)
        self._calls.setdefault(call, []).append(weakref.ref(shard))
        return Split(tensor, shard, part, call)

    def _split(self, tensor: Tensor, label: str, call: BlockCall) -> Shard:
        self._numbers += 1
        stretch = Stretch.of(tensor)
        part = part_of(bytes_of(tensor, stretch), self._parts, self._group.index)
        shard = Shard(tensor, self._numbers, self._store.pack(part, call), part.nbytes)
        self._shards[shard.key] = shard
        self.counters.whole_bytes[label] += stretch.nbytes
        self.counters.kept_bytes[label] += part.nbytes
        return shard

    def _checksum(self, shard: Shard, tensor: Tensor) -> Tensor:
        view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        if view not in shard.checksums:  # masks and the like are given to every block
            shard.checksums[view] = checksum(tensor)
        return shard.checksums[view]

    # -- backward --------------------------------------------------------------------------------

    def unpack(self, split: Split) -> Tensor:
        """The tensor again, on the device. Collective at the first of each call.

        Raises:
            UnsupportedError: the group does not hold the same tensors; in every process.
        """
        assert split.call is not None
        self._reach(split.call)
        shard = split.shard
        if shard is None:
            return self._store.unpack(split.kept)
        self._gather(shard, late=True)
        self._here[shard.number].asked = True
        shard.wait()
        return split.view()

    def _reach(self, call: BlockCall) -> None:
        """Backward asks for a tensor of `call`."""
        began = self._watch.began()
        if began:
            self._forget_all()
        if call.number in self._reached:
            return
        if began or self.consistency.pending:
            self._shake_hands()
        self._reached.add(call.number)
        self._store.reach(call)
        for number, gathered in list(self._here.items()):
            if gathered.users <= self._reached - {call.number}:
                self._forget(number)
        self._before.pop(call.number, None)
        for shard in self._alive(call):  # all of them, before those of other calls
            self._gather(shard, late=True)
        before = sorted((n for n in self._before if n < call.number), reverse=True)
        for number in before[: self._ahead]:
            for shard in self._before[number]:
                self._gather(shard, late=False)

    def _alive(self, call: BlockCall) -> list[Shard]:
        return [shard for ref in self._calls.get(call, []) if (shard := ref()) is not None]

    def _shake_hands(self) -> None:
        alive = {call.number: self._alive(call) for call in self._calls}
        alive = {number: alive[number] for number in sorted(alive) if alive[number]}
        known = [(number, [s.nbytes for s in shards]) for number, shards in alive.items()]
        # one process's collector may be late: then nothing is gathered before it is needed
        self._agreed = self.consistency.compare(hash_of(known))
        self._before = alive if self._agreed else {}
        self._known = set(self._before)

    def _gather(self, shard: Shard, *, late: bool) -> None:
        """Start to gather a shard that is not here. Collective."""
        if shard.number in self._here:
            return
        size = part_bytes(shard.nbytes, self._parts)
        shard.joined = torch.empty(size * self._parts, dtype=torch.uint8, device=self._device)
        shard.arriving = self._group.gather(self._store.take(shard.part), shard.joined)
        users = shard.calls & (self._known | self._reached) if self._agreed else shard.calls
        self._here[shard.number] = _Gathered(weakref.ref(shard), frozenset(users))
        self.counters.gathers += 1
        self.counters.received_bytes += shard.joined.numel() - size
        self.counters.late += late

    def _forget(self, number: int) -> None:
        gathered = self._here.pop(number)
        self.counters.in_vain += not gathered.asked
        shard = gathered.shard()
        if shard is not None:
            shard.wait()
            shard.joined = None

    def _forget_all(self) -> None:
        """Forget every gather, and where backward has been."""
        self._reached.clear()
        self._before, self._known = {}, set()
        for number in list(self._here):
            self._forget(number)

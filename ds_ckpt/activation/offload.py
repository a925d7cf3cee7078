"""Keep the inputs of checkpointed blocks in host memory until their recomputation.

When a call starts, tensors of the call before it are copied to host memory on a side stream, and
the device memory is released before the new call ends. Backward brings back the tensors of earlier
calls ahead of their recomputation. The last call's tensors stay on the device.

The autograd graph owns the tensors, and the store references both ends of a copy until it was
waited for. Pinned host memory comes from torch's allocator, which waits for copies by itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.multiprocessing.reductions import StorageWeakRef

from ds_ckpt.activation.snapshot import input_changed
from ds_ckpt.telemetry.counters import OffloadCounters
from ds_ckpt.telemetry.memory import version_of
from ds_ckpt.telemetry.timings import marked

# copies between device and host


Wait = Callable[[], None]
"""Function that orders the compute stream's later work after an operation."""


class Copies:
    """Copies between two flat uint8 tensors of the same size. Here both are in host memory."""

    def copy(self, source: Tensor, target: Tensor) -> Wait:
        """Start a copy that is ordered after all work submitted to the compute stream so far."""
        target.copy_(source)
        return lambda: None


class SideStream(Copies):
    """Copies on a stream of a device with streams and events (CUDA, XPU, NPU)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def copy(self, source: Tensor, target: Tensor) -> Wait:
        """Start a copy on the side stream."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        return lambda: self._wait(event)

    def _wait(self, event: Any) -> None:
        self._module.current_stream(self._device).wait_event(event)


def copies_for(device: torch.device) -> Copies:
    """Return a side stream, or synchronous copies if the device is the CPU."""
    return Copies() if device.type == "cpu" else SideStream(device)


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Allocate uint8 [nbytes] of host memory, pinned if `device` is a CUDA device."""
    pinned = device.type == "cuda"
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


# tensors that the graph references


def storage_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's whole storage as uint8 [n]."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


class SavedStorage:
    """Storage of a saved tensor, at the version at which it was saved, and the calls that keep it.

    `key` is equal for tensors that share it; `pending` is a copy or gather that still runs.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        """Keeps the storage's address from being reused."""
        self.key = self._storage.cdata
        self.nbytes = tensor.untyped_storage().nbytes()
        self.version = int(tensor._version)
        self.calls: set[int] = set()
        self.pending: Wait | None = None

    def wait(self) -> None:
        """Order later work of the compute stream after the pending operation."""
        if self.pending is not None:
            self.pending()
            self.pending = None


class OffloadedStorage(SavedStorage):
    """Storage on the device (`original`, or `fetched` again), in host memory (`host`), or both.

    `label` is the block that kept it first; `changed` is set if the original was changed in place
    before it was released.
    """

    original: Tensor | None
    host: Tensor | None = None
    fetched: Tensor | None = None
    changed = False

    def __init__(self, tensor: Tensor, label: str) -> None:
        super().__init__(tensor)
        self.original, self.label = tensor.detach(), label

    @property
    def here(self) -> Tensor | None:
        """Return the memory on the device, or None."""
        return self.fetched if self.original is None else self.original

    def note_changes(self) -> None:
        """Record whether the original was changed in place."""
        if self.original is not None and self.original._version != self.version:
            self.changed = True

    def matches(self, tensor: Tensor) -> bool:
        """Return whether it holds the present values of `tensor`, over the same storage."""
        return not self.changed and self.version == tensor._version


class TensorView:
    """Geometry of a tensor whose memory is elsewhere."""

    def __init__(self, tensor: Tensor) -> None:
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._stride = tensor.size(), tensor.stride()

    def over(self, memory: Tensor) -> Tensor:
        """Return the tensor over a copy of its storage."""
        view = torch.empty(0, dtype=self._dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), self._offset, self._size, self._stride)


class OffloadedRef(TensorView):
    """Reference of a graph to an offloaded tensor."""

    def __init__(self, tensor: Tensor, storage: OffloadedStorage) -> None:
        super().__init__(tensor)
        self.storage = storage


@dataclass(frozen=True)
class InPlaceRef:
    """Reference of a graph to a tensor that stays where it is."""

    tensor: Tensor
    version: int
    label: str


@dataclass(eq=False)
class BlockCall:
    """Forward call of one block, or of the `blocks` blocks of one recomputation."""

    number: int
    label: str
    blocks: int = 1
    storages: set[OffloadedStorage] = field(default_factory=set)


# the store


class BackwardWatch:
    """Detects when another backward begins; calls the bound method `at_end` after each."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = weakref.WeakMethod(at_end)
        self._number = -1

    def began(self) -> bool:
        """Return whether the running backward differs from the one at the last call."""
        number = torch._C._current_graph_task_id()
        if number == self._number:
            return False
        self._number = number
        if number != -1:
            Variable._execution_engine.queue_callback(self._ended)
        return True

    def _ended(self) -> None:
        at_end = self._at_end()
        if at_end is not None:
            at_end()


class InputStore:
    """Tensors of block calls between forward and backward. Callers hold its lock.

    With `offload`, storages of `min_bytes` or more on `device` go to host memory, except those of
    `owned` (parameters and buffers), and come back `prefetch` calls ahead of their recomputation.
    """

    def __init__(
        self,
        device: torch.device,
        copies: Copies,
        *,
        offload: bool = True,
        min_bytes: int = 0,
        prefetch: int = 1,
        owned: Sequence[Tensor] = (),
    ) -> None:
        self.counters = OffloadCounters()
        self.lock = threading.RLock()
        """Forwards and backwards of one model may run in several threads."""
        self._device, self._copies, self._owned = device, copies, owned
        self._offload, self._min_bytes, self._ahead = offload, min_bytes, prefetch
        self._owned_storages: set[int] = set()
        self._storages: weakref.WeakValueDictionary[int, OffloadedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._calls: weakref.WeakValueDictionary[int, BlockCall] = weakref.WeakValueDictionary()
        self._number = 0
        self._last: weakref.ref[BlockCall] | None = None
        self._leaving: list[OffloadedStorage] = []
        self._fetched: list[OffloadedStorage] = []
        self._watch = BackwardWatch(self.end_backward)
        self._reached: set[int] = set()
        """Numbers of the calls that this backward has reached."""

    # forward

    def begin(self, label: str) -> BlockCall:
        """Start a call of block `label`."""
        if torch._C._current_graph_task_id() == -1:
            self.end_backward()  # the last one may have raised an error
        # valid for the arguments of this call: later gathers of ZeRO-3 give other storages
        owned = (p for p in self._owned if p.layout == torch.strided)
        self._owned_storages = {p.untyped_storage()._cdata for p in owned}
        self._number += 1
        call = BlockCall(self._number, label)
        self._calls[call.number] = call
        return call

    def stays(self, tensor: Tensor, min_bytes: int) -> bool:
        """Return whether a tensor is neither moved nor split: not plain, small, or a weight."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_quantized:
            return True
        if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
            return True
        storage = tensor.untyped_storage()
        is_weight = storage._cdata in self._owned_storages
        return is_weight or tensor.device != self._device or storage.nbytes() < max(1, min_bytes)

    def pack(self, tensor: Tensor, call: BlockCall) -> OffloadedRef | InPlaceRef:
        """Return what the graph holds instead of `tensor`."""
        if self.stays(tensor, self._min_bytes):
            return InPlaceRef(tensor, version_of(tensor), call.label)
        kept = self._storages.get(tensor.untyped_storage()._cdata)
        if kept is not None:
            kept.note_changes()
        if kept is None or not kept.matches(tensor):
            kept = OffloadedStorage(tensor, call.label)
            self._storages[kept.key] = kept
        ref = OffloadedRef(tensor, kept)
        self.share(ref, call)
        return ref

    def share(self, ref: OffloadedRef | InPlaceRef, call: BlockCall) -> None:
        """Keep a tensor for another call, too."""
        if isinstance(ref, OffloadedRef):
            ref.storage.calls.add(call.number)
            call.storages.add(ref.storage)

    @property
    def last(self) -> BlockCall | None:
        """Return the last call if a graph still references it."""
        return self._last() if self._last is not None else None

    def started(self, call: BlockCall) -> None:
        """Start to move the tensors of the call before `call`, which has saved its arguments."""
        self._owned_storages.clear()
        earlier = self.last
        if self._offload and earlier is not None and earlier is not call:
            for kept in earlier.storages:
                if call.number not in kept.calls:
                    self._send(kept)
        self._last = weakref.ref(call)

    def _send(self, kept: OffloadedStorage) -> None:
        kept.note_changes()
        if kept.host is not None or kept.original is None or kept.changed:
            return  # a changed input is refused in backward
        with marked("offload"):
            kept.host = host_buffer(kept.nbytes, self._device)
            kept.pending = self._copies.copy(storage_bytes(kept.original), kept.host)
        self._leaving.append(kept)
        self.counters.out[kept.label] += 1
        self.counters.out_bytes[kept.label] += kept.nbytes

    def ended(self) -> None:
        """Release the originals of all tensors that were moved, after a call."""
        for kept in self._leaving:
            kept.wait()
            kept.note_changes()
            kept.original = None
        self._leaving.clear()

    # backward

    def unpack(self, ref: OffloadedRef | InPlaceRef, call: BlockCall) -> Tensor:
        """Return a tensor of `call`, on the device; UnsupportedError if it was changed."""
        if isinstance(ref, InPlaceRef):
            if version_of(ref.tensor) != ref.version:
                raise input_changed(ref.label, "input")
            return ref.tensor
        self.reach(call)
        ref.storage.note_changes()
        if ref.storage.changed:
            raise input_changed(ref.storage.label, "input")
        return self.take(ref)

    def take(self, ref: OffloadedRef | InPlaceRef) -> Tensor:
        """Return a tensor that was not changed in place, on the device."""
        if isinstance(ref, InPlaceRef):
            return ref.tensor
        self._fetch(ref.storage, late=True)
        ref.storage.wait()
        assert ref.storage.here is not None
        return ref.over(ref.storage.here)

    def reach(self, call: BlockCall) -> None:
        """Bring back the tensors of `call`, which backward has reached, and of calls before it."""
        if self._watch.began():
            self.end_backward()
        if call.number in self._reached:
            return
        self._reached.add(call.number)
        needed = {n for n in self._calls if n not in self._reached or n == call.number}
        self._drop([kept for kept in self._fetched if not kept.calls & needed])
        for kept in call.storages:
            self._fetch(kept, late=True)
        before = sorted((n for n in self._calls if n < call.number), reverse=True)
        for number in before[: self._ahead]:
            ahead = self._calls.get(number)  # its graph may just have been dropped
            for kept in ahead.storages if ahead is not None else ():
                self._fetch(kept, late=False)

    def _fetch(self, kept: OffloadedStorage, *, late: bool) -> None:
        """Start to bring back a storage that is not on the device."""
        if kept.here is not None:
            return
        assert kept.host is not None
        with marked("offload"):
            kept.fetched = torch.empty(kept.nbytes, dtype=torch.uint8, device=self._device)
            kept.pending = self._copies.copy(kept.host, kept.fetched)
        self._fetched.append(kept)
        self.counters.back[kept.label] += 1
        self.counters.late += late

    def _drop(self, storages: Sequence[OffloadedStorage]) -> None:
        for kept in storages:
            kept.wait()
            kept.fetched = None
            self._fetched.remove(kept)

    def end_backward(self) -> None:
        """Release every fetched copy."""
        with self.lock:
            self._reached.clear()
            self._drop(list(self._fetched))

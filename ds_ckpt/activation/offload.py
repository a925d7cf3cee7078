"""Offloads tensors of blocks to host memory: inputs until recomputation, or all until backward.

When a call starts, tensors of the call before it are copied to host memory on a side stream. Their
device memory is released before the new call ends. Backward brings back the tensors of earlier
calls ahead of their use. The last call's tensors stay on the device.

The autograd graph owns the tensors: each is released when its graph node is. Source and target of
a copy are referenced until the wait for it. Pinned host memory comes from torch's allocator, which
waits for copies by itself.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.multiprocessing.reductions import StorageWeakRef

from ds_ckpt.activation.snapshot import change_error, saved_change_error
from ds_ckpt.telemetry.counters import OffloadCounters
from ds_ckpt.telemetry.memory import version_of
from ds_ckpt.telemetry.timings import profiler_range

# copies between device and host


Wait = Callable[[], None]
"""Function that orders the compute stream's later work after an operation."""


class Copies:
    """Copies between two flat uint8 tensors of the same size. Here both are in host memory."""

    def host_buffer(self, nbytes: int) -> Tensor:
        """Allocate uint8 [nbytes] of host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

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

    def host_buffer(self, nbytes: int) -> Tensor:
        """Allocate host memory, pinned if the device is a CUDA device."""
        pinned = self._device.type == "cuda"
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def copy(self, source: Tensor, target: Tensor) -> Wait:
        """Start a copy on the side stream."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        return lambda: self._module.current_stream(self._device).wait_event(event)


def copies_for(device: torch.device) -> Copies:
    """Return a side stream, or synchronous copies if the device is the CPU."""
    return Copies() if device.type == "cpu" else SideStream(device)


# tensors that the graph references


def storage_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's whole storage as uint8 [n]."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


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

    __del__ = wait  # memory is released behind the copy that uses it


class OffloadedStorage(SavedStorage):
    """Storage on the device (`original`, or `fetched` again), in host memory (`host`), or both.

    `label` is the block that saved it first. `is_changed` is set if the original was changed in
    place before its release. `aliases` are the tensors saved over it, which may count versions of
    their own (`_unsafe_view`), with their versions.
    """

    original: Tensor | None
    host: Tensor | None = None
    fetched: Tensor | None = None
    is_changed = False

    def __init__(self, tensor: Tensor, label: str) -> None:
        super().__init__(tensor)
        self.original, self.label = tensor.detach(), label
        self.aliases: list[tuple[Tensor, int]] = []

    @property
    def on_device(self) -> Tensor | None:
        """Return the memory on the device, or None."""
        return self.fetched if self.original is None else self.original

    def note_changes(self) -> None:
        """Record whether the original was changed in place."""
        if any(alias._version != version for alias, version in self.aliases):
            self.is_changed = True

    def release(self) -> None:
        """Drop the original, which is in host memory."""
        self.note_changes()
        self.original = None
        self.aliases.clear()

    def matches(self, tensor: Tensor) -> bool:
        """Return whether it holds the present values of `tensor`, over the same storage."""
        return not self.is_changed and self.version == tensor._version


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
    """Forward call of one block, or of the `blocks` blocks of one recomputation.

    If `moves` is set, its tensors go to host memory. `weights` are the parameters of a block that
    is not recomputed. Its forward may gather them, and autograd saves views of them.
    """

    number: int
    label: str
    moves: bool
    weights: Sequence[Tensor] | None = None
    blocks: int = 1
    refs: list[weakref.ref[OffloadedStorage]] = field(default_factory=list)

    @property
    def live_storages(self) -> list[OffloadedStorage]:
        """Return the storages that its graph still references, in the order of backward."""
        return [storage for ref in reversed(self.refs) if (storage := ref()) is not None]


# the store


class BackwardTracker:
    """Detects when another backward begins; calls the bound method `at_end` after each.

    A backward that raises drops its callbacks: its user ends it when the next one begins.
    """

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
            callback = functools.partial(self._ended, number)
            Variable._execution_engine.queue_callback(callback)
        return True

    def _ended(self, number: int) -> None:
        if number != self._number:
            return
        self._number, at_end = -1, self._at_end()
        if at_end is not None:
            at_end()


class InputStore:
    """Tensors of block calls between forward and backward. Callers hold its lock.

    With `offload`, storages of `min_bytes` or more on `device` go to host memory, except those of
    `owned` (parameters and buffers). They come back `prefetch` calls ahead of their use. Without it
    only those of blocks that are not recomputed go. `copies` are by default those of `device`.
    """

    kinds: tuple[type, ...] = (Tensor,)
    """Classes of tensors that are moved."""

    def __init__(
        self,
        device: torch.device,
        copies: Copies | None = None,
        *,
        offload: bool = True,
        min_bytes: int = 0,
        prefetch: int = 1,
        owned: Sequence[Tensor] = (),
    ) -> None:
        self.counters = OffloadCounters()
        self.lock = threading.RLock()
        """Forwards and backwards of one model may run in several threads."""
        self._device, self._copies, self._owned = device, copies or copies_for(device), owned
        self._offload, self._min_bytes, self._ahead = offload, min_bytes, prefetch
        self._owned_storages: dict[int, Tensor] = {}
        self._storages: weakref.WeakValueDictionary[int, OffloadedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._calls: weakref.WeakValueDictionary[int, BlockCall] = weakref.WeakValueDictionary()
        self._number = 0
        self._last: weakref.ref[BlockCall] | None = None
        self._leaving: list[OffloadedStorage] = []
        self._fetched: weakref.WeakSet[OffloadedStorage] = weakref.WeakSet()
        self._tracker = BackwardTracker(self.end_backward)
        self._reached: set[int] = set()
        """Numbers of the calls that this backward has reached."""

    # forward

    def begin(self, label: str, weights: Sequence[Tensor] | None = None) -> BlockCall:
        """Start a call of block `label`; with its `weights`, one that is not recomputed."""
        if torch._C._current_graph_task_id() == -1:
            self.end_backward()  # the last one may have raised an error
        self._owned_storages = {_key(p): p for p in self._owned if p.layout == torch.strided}
        self._number += 1
        call = BlockCall(self._number, label, self._offload or weights is not None, weights)
        self._calls[call.number] = call
        return call

    def stays(self, tensor: Tensor, call: BlockCall, min_bytes: int) -> bool:
        """Return whether a tensor is neither moved nor split: not plain, small, or a weight."""
        if isinstance(tensor, nn.Parameter) or type(tensor) not in self.kinds:
            return True
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_inference():
            return True
        if tensor.is_conj() or tensor.is_neg() or self._is_weight(tensor, call):
            return True
        nbytes = tensor.untyped_storage().nbytes()
        return tensor.device != self._device or nbytes < max(1, min_bytes)

    def _is_weight(self, tensor: Tensor, call: BlockCall) -> bool:
        """Compare present storages: gathers of ZeRO-3 give other ones, and free them again."""
        key = _key(tensor)
        owner = self._owned_storages.get(key)
        if isinstance(tensor._base, nn.Parameter) or (owner is not None and _key(owner) == key):
            return True
        return any(_key(weight) == key for weight in call.weights or ())

    def pack(self, tensor: Tensor, call: BlockCall) -> OffloadedRef | InPlaceRef:
        """Return what the graph holds instead of `tensor`."""
        if self.stays(tensor, call, self._min_bytes if call.moves else 0):
            # a result that its own graph node saves would keep itself alive
            kept_here = tensor if tensor.is_leaf else tensor.detach()
            return InPlaceRef(kept_here, version_of(tensor), call.label)
        storage = self._storages.get(_key(tensor))
        if storage is not None:
            storage.note_changes()
        if storage is None or not storage.matches(tensor):
            storage = OffloadedStorage(tensor, call.label)
            self._storages[storage.key] = storage
        if storage.original is None:  # in host memory already, and on the device for this call
            storage.original = tensor.detach()
        storage.aliases.append((tensor.detach(), tensor._version))
        ref = OffloadedRef(tensor, storage)
        self.share(ref, call)
        return ref

    def share(self, ref: OffloadedRef | InPlaceRef, call: BlockCall) -> None:
        """Keep a tensor for another call, too."""
        if isinstance(ref, OffloadedRef) and call.number not in ref.storage.calls:
            ref.storage.calls.add(call.number)
            call.refs.append(weakref.ref(ref.storage))

    @property
    def last(self) -> BlockCall | None:
        """Return the last call if a graph still references it."""
        return self._last() if self._last is not None else None

    def started(self, call: BlockCall) -> None:
        """Start to move the tensors of the call before `call`, except those that both keep."""
        earlier = self.last
        if earlier is not None and earlier.moves and earlier is not call:
            for storage in earlier.live_storages:
                if call.number not in storage.calls:
                    self._send(storage)
        self._last = weakref.ref(call)

    def _send(self, storage: OffloadedStorage) -> None:
        storage.note_changes()
        if storage.original is None or storage.is_changed:
            return  # a changed tensor is refused in backward
        self._leaving.append(storage)
        if storage.host is None:
            with profiler_range("offload"):
                storage.host = self._copies.host_buffer(storage.nbytes)
                storage.pending = self._copies.copy(storage_bytes(storage.original), storage.host)
            self.counters.out[storage.label] += 1
            self.counters.out_bytes[storage.label] += storage.nbytes

    def ended(self, call: BlockCall) -> None:
        """Release the originals of moved tensors, except those that `call` has saved too."""
        for storage in self._leaving:
            storage.wait()
            if call.number not in storage.calls:
                storage.release()
        self._leaving.clear()

    # backward

    def unpack(self, ref: OffloadedRef | InPlaceRef, call: BlockCall) -> Tensor:
        """Return a tensor of `call`, on the device; UnsupportedError if it was changed."""
        if isinstance(ref, OffloadedRef):
            self.reach(call)
            ref.storage.note_changes()
            label, changed = ref.storage.label, ref.storage.is_changed
        else:
            label, changed = ref.label, version_of(ref.tensor) != ref.version
        if changed:
            recomputed = call.weights is None
            raise change_error(label, "an input") if recomputed else saved_change_error(label)
        return self.take(ref)

    def take(self, ref: OffloadedRef | InPlaceRef) -> Tensor:
        """Return a tensor that was not changed in place, on the device."""
        if isinstance(ref, InPlaceRef):
            return ref.tensor
        self._fetch(ref.storage, late=True)
        ref.storage.wait()
        assert ref.storage.on_device is not None
        return ref.over(ref.storage.on_device)

    def reach(self, call: BlockCall) -> None:
        """Bring back the tensors of `call`, which backward has reached, and of calls before it."""
        if self._tracker.began():
            self.end_backward()
        if call.number in self._reached:
            return
        self._reached.add(call.number)
        needed = {n for n in self._calls if n not in self._reached or n == call.number}
        self._drop([storage for storage in self._fetched if not storage.calls & needed])
        for storage in call.live_storages:
            self._fetch(storage, late=True)
        before = sorted((n for n in self._calls if n < call.number), reverse=True)
        for number in before[: self._ahead]:
            ahead = self._calls.get(number)  # its graph may just have been dropped
            for storage in ahead.live_storages if ahead is not None else ():
                self._fetch(storage, late=False)

    def _fetch(self, storage: OffloadedStorage, *, late: bool) -> None:
        """Start to bring back a storage that is not on the device."""
        if storage.on_device is not None:
            return
        assert storage.host is not None
        with profiler_range("offload"):
            storage.fetched = torch.empty(storage.nbytes, dtype=torch.uint8, device=self._device)
            storage.pending = self._copies.copy(storage.host, storage.fetched)
        self._fetched.add(storage)
        self.counters.back[storage.label] += 1
        self.counters.late += late

    def _drop(self, storages: Sequence[OffloadedStorage]) -> None:
        for storage in storages:
            storage.wait()
            storage.fetched = None
            self._fetched.discard(storage)

    def end_backward(self) -> None:
        """Release every fetched copy."""
        with self.lock:
            self._reached.clear()
            self._drop(list(self._fetched))

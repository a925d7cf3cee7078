"""Keep the inputs of checkpointed blocks in host memory until their recomputation.

A call keeps its tensors on the device while it runs. When the next call starts, they are copied to
host memory on a side stream, and the device memory is released before that call ends. The last
call's tensors stay on the device, because backward needs them first. When backward reaches a call,
the tensors of the calls before it are copied back.

The autograd graph owns everything here: memory is released when autograd frees the graph, also
after an exception or a dropped loss. A retained graph can ask for its tensors again.

A side stream reads and writes memory that the allocator may hand out again. Both ends of a copy are
therefore referenced until `Ticket.wait()`, and released after it. Pinned host memory comes from
torch's allocator, which waits for copies by itself.
"""

from __future__ import annotations

import bisect
import copy
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.multiprocessing.reductions import StorageWeakRef

from ds_ckpt.activation.snapshot import input_changed
from ds_ckpt.telemetry.counters import OffloadCounters
from ds_ckpt.telemetry.memory import version_of

ALIGNMENT_BYTES = 64
"""Alignment of copied ranges: kernels that depend on alignment sum in the original order."""

# copies between device and host


class Ticket:
    """One operation, which has ended."""

    def done(self) -> bool:
        """Return whether the operation has ended, without waiting."""
        return True

    def wait(self) -> None:
        """Order the compute stream's later work after the operation, without blocking the host."""


class Copies:
    """Copies between two flat uint8 tensors of the same size. Here both are in host memory."""

    def copy(self, source: Tensor, target: Tensor) -> Ticket:
        """Start a copy that is ordered after all work submitted to the compute stream so far."""
        target.copy_(source)
        return Ticket()


class _StreamTicket(Ticket):
    def __init__(self, event: Any, side: SideStream) -> None:
        self._event, self._side = event, side

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._side.compute_stream().wait_event(self._event)


class SideStream(Copies):
    """Copies on one stream beside the compute stream.

    Args:
        device: accelerator whose torch module has streams and events (CUDA, XPU, NPU).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def compute_stream(self) -> Any:
        """Return the stream that is current for compute."""
        return self._module.current_stream(self._device)

    def copy(self, source: Tensor, target: Tensor) -> Ticket:
        """Start a copy on the side stream."""
        self._stream.wait_stream(self.compute_stream())
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        return _StreamTicket(event, self)


def copies_for(device: torch.device) -> Copies:
    """Return a side stream, or synchronous copies if the device is the CPU."""
    return Copies() if device.type == "cpu" else SideStream(device)


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Allocate uint8 [nbytes] of host memory, pinned if `device` is a CUDA device."""
    pinned = device.type == "cuda"
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


# tensors that the graph references


@dataclass(frozen=True)
class ByteRange:
    """Bytes `start` to `start + nbytes` of a storage."""

    start: int
    nbytes: int

    @classmethod
    def covering(cls, tensor: Tensor) -> ByteRange:
        """Return the whole storage, or the tensor's part of it if that is less than half."""
        whole = tensor.untyped_storage().nbytes()
        size = tensor.element_size()
        first = int(tensor.storage_offset()) * size
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        end = first + size * (1 + sum((n - 1) * stride for n, stride in pairs))
        if 2 * (end - first) >= whole:
            return cls(0, whole)
        start = first - first % ALIGNMENT_BYTES
        return cls(start, end - start)

    def of(self, tensor: Tensor) -> Tensor:
        """Return this range of the tensor's storage as uint8 [nbytes]."""
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(tensor.untyped_storage(), self.start, (self.nbytes,), (1,))


Key = tuple[int, ByteRange]


def key_of(tensor: Tensor) -> Key:
    """Return a key that is equal for tensors that need the same range of the same storage."""
    return tensor.untyped_storage()._cdata, ByteRange.covering(tensor)


class StorageSlice:
    """Range of a storage, at the version at which it was saved.

    Attributes:
        calls: numbers of the block calls that keep it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        """Keeps the storage's address from being reused."""
        self.range = ByteRange.covering(tensor)
        self.version = int(tensor._version)
        self.calls: set[int] = set()

    @property
    def key(self) -> Key:
        """Return the key of tensors that need this slice."""
        return self.storage.cdata, self.range

    @property
    def nbytes(self) -> int:
        """Return the size of the range."""
        return self.range.nbytes


class OffloadedSlice(StorageSlice):
    """Slice that is on the device, in host memory, or both. A graph's `OffloadedRef`s own it.

    Attributes:
        label: name of the block that kept it first.
        source: tensor over the original memory; None once that is released.
        host: copy in host memory (uint8).
        leaving: copy to the host that still reads `source`.
        fetched: copy that was brought back to the device (uint8).
        arriving: copy that still writes `fetched`.
        changed: the original was changed in place before it was released.
    """

    def __init__(self, tensor: Tensor, label: str, pending_frees: deque[dict[str, Any]]) -> None:
        super().__init__(tensor)
        self.label = label
        self.source: Tensor | None = tensor.detach()
        self.host: Tensor | None = None
        self.leaving: Ticket | None = None
        self.fetched: Tensor | None = None
        self.arriving: Ticket | None = None
        self.changed = False
        # Not `__del__`: while that runs, weak references still return the slice to other threads.
        weakref.finalize(self, _finalize, vars(self), pending_frees).atexit = False

    @property
    def is_here(self) -> bool:
        """Return whether the device has the bytes, or a copy to it is under way."""
        return self.source is not None or self.fetched is not None

    def note_changes(self) -> None:
        """Record whether the original was changed in place."""
        if self.source is not None and self.source._version != self.version:
            self.changed = True

    def matches(self, tensor: Tensor) -> bool:
        """Return whether it holds the present values of `tensor`, over the same storage."""
        return not self.changed and self.version == tensor._version


def _finalize(fields: dict[str, Any], pending_frees: deque[dict[str, Any]]) -> None:
    """Release memory that no copy uses; the store releases the rest in `collect`.

    Takes no lock, because the garbage collector may call it anywhere.
    """
    here = sum(fields[end] is not None for end in ("source", "fetched"))
    fields["device_bytes"] = here * fields["range"].nbytes
    for ticket, end in (("leaving", "source"), ("arriving", "fetched")):
        if fields[ticket] is None:
            fields[end] = None
    pending_frees.append(fields)


class TensorView:
    """Geometry of a tensor whose memory is elsewhere."""

    __slots__ = ("__weakref__", "call", "dtype", "offset_bytes", "size", "stride")

    def __init__(self, tensor: Tensor, call: BlockCall) -> None:
        self.call: BlockCall | None = call
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset_bytes = tensor.storage_offset() * tensor.element_size()

    def over(self, memory: Tensor, copied: ByteRange) -> Tensor:
        """Return the tensor over a copy (uint8) of a range of its storage."""
        offset = memory.storage_offset() + self.offset_bytes - copied.start
        view = torch.empty(0, dtype=self.dtype, device=memory.device)
        offset //= self.dtype.itemsize
        return view.set_(memory.untyped_storage(), offset, self.size, self.stride)


class OffloadedRef(TensorView):
    """Reference of a graph to an offloaded tensor."""

    __slots__ = ("slice",)

    def __init__(self, tensor: Tensor, kept: OffloadedSlice, call: BlockCall) -> None:
        super().__init__(tensor, call)
        self.slice = kept

    def view(self) -> Tensor:
        """Return the tensor; its slice must be on the device."""
        kept = self.slice
        if kept.source is None:
            assert kept.fetched is not None, "the slice has not been fetched"
            return self.over(kept.fetched, kept.range)
        base = kept.source
        if base.dtype != self.dtype:  # another tensor over the same storage
            base = torch.empty(0, dtype=self.dtype, device=base.device)
            base.set_(kept.source.untyped_storage(), 0, (0,), (1,))
        return base.as_strided(self.size, self.stride, self.offset_bytes // self.dtype.itemsize)


class InPlaceRef:
    """Reference of a graph to a tensor that stays where it is."""

    __slots__ = ("label", "tensor", "version")

    def __init__(self, tensor: Tensor, label: str) -> None:
        self.tensor, self.label, self.version = tensor, label, version_of(tensor)

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            UnsupportedError: it was changed in place since it was saved.
        """
        if version_of(self.tensor) != self.version:
            raise input_changed(self.label, "input")
        return self.tensor


class BlockCall:
    """Forward call of one block, or of the `blocks` blocks of one recomputation."""

    def __init__(self, number: int, label: str) -> None:
        self.number = number
        self.label = label
        self.blocks = 1
        self.slices: weakref.WeakSet[OffloadedSlice] = weakref.WeakSet()


# the store


class BackwardWatch:
    """Detects when another backward begins.

    Args:
        at_end: bound method, called when a backward has ended if its object still exists.
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
            Variable._execution_engine.queue_callback(self._ended)
        return True

    def _ended(self) -> None:
        at_end = self._at_end()
        if at_end is not None:
            at_end()


class InputStore:
    """Tensors of block calls between forward and backward. Callers hold its lock.

    Args:
        device: device of the model; tensors on other devices are not moved.
        copies: copies between the device and host memory.
        offload: whether slices are moved to host memory; otherwise all stay on the device.
        min_bytes: smaller tensors are not moved.
        prefetch: number of calls whose tensors are brought back ahead of their recomputation.
        owned: parameters and buffers, which are not moved, nor what shares their memory.
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
        self._owned_at: list[int] | None = None
        """Ascending addresses of `owned`, valid while the arguments of one call are saved."""
        self._saving_arguments = False
        self._slices: weakref.WeakValueDictionary[Key, OffloadedSlice] = (
            weakref.WeakValueDictionary()
        )
        self._calls: weakref.WeakValueDictionary[int, BlockCall] = weakref.WeakValueDictionary()
        self._number = 0
        self._last: weakref.ref[BlockCall] | None = None
        self._leaving: weakref.WeakSet[OffloadedSlice] = weakref.WeakSet()
        self._here: weakref.WeakSet[OffloadedSlice] = weakref.WeakSet()
        """Slices with a fetched copy."""
        self._pending_frees: deque[dict[str, Any]] = deque()
        self._watch = BackwardWatch(self.end_backward)
        self._reached: set[int] = set()
        """Numbers of the calls that this backward has reached."""

    # forward

    def begin(self, label: str) -> BlockCall:
        """Start a call of block `label`."""
        self.collect()
        if torch._C._current_graph_task_id() == -1 and (self._reached or len(self._here)):
            self.end_backward()  # it raised an error
        self._number += 1
        self._owned_at, self._saving_arguments = None, True
        call = BlockCall(self._number, label)
        self._calls[call.number] = call
        return call

    def pack(self, tensor: Tensor, call: BlockCall) -> OffloadedRef | InPlaceRef:
        """Return what the graph holds instead of `tensor`."""
        reason = self._unfit(tensor)
        kept = None if reason else self._slice_of(tensor)
        if kept is None:
            if reason is None:
                small = tensor.numel() == 0 or tensor.nbytes < self._min_bytes
                reason = "small" if small else self._owned_by_model(tensor)
            if reason is not None:
                self.counters.left[reason] += 1
                return InPlaceRef(tensor, call.label)
            kept = OffloadedSlice(tensor, call.label, self._pending_frees)
            self._slices[kept.key] = kept
            self.counters.on_device(kept.nbytes)
        kept.calls.add(call.number)
        call.slices.add(kept)
        return OffloadedRef(tensor, kept, call)

    def share(self, ref: OffloadedRef, call: BlockCall) -> OffloadedRef:
        """Return a reference of another call to the same tensor."""
        other = copy.copy(ref)
        other.call = call
        ref.slice.calls.add(call.number)
        call.slices.add(ref.slice)
        return other

    def _slice_of(self, tensor: Tensor) -> OffloadedSlice | None:
        kept = self._slices.get(key_of(tensor))
        if kept is not None:
            kept.note_changes()
        return kept if kept and kept.matches(tensor) else None

    def _unfit(self, tensor: Tensor) -> str | None:
        if type(tensor) is not Tensor:
            return f"a {type(tensor).__name__}"
        if tensor.layout != torch.strided or tensor.is_quantized:
            return "not a plain strided tensor"
        if tensor.device != self._device:
            return f"on {tensor.device.type}"
        if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
            return "an inference, conjugate or negative view"
        return None

    def unfit(self, tensor: Tensor) -> str | None:
        """Return why the tensor cannot be moved whatever its size, or None."""
        return self._unfit(tensor) or self._owned_by_model(tensor)

    def _owned_by_model(self, tensor: Tensor) -> str | None:
        # Each gather of ZeRO-3 gives a parameter another storage, but none happens between the
        # arguments of a call.
        if self._owned_at is None or not self._saving_arguments:
            self._owned_at = sorted(p.data_ptr() for p in self._owned if p.layout == torch.strided)
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        behind = bisect.bisect_left(self._owned_at, start)
        if behind < len(self._owned_at) and self._owned_at[behind] < start + storage.nbytes():
            return "a part of the model"
        return None

    def started(self, call: BlockCall) -> None:
        """Start to move the tensors of the call before `call`, which has saved its arguments."""
        self._saving_arguments = False
        earlier = self.last
        if self._offload and earlier is not None and earlier is not call:
            self._send(earlier, current=call.number)
        self._last = weakref.ref(call)

    @property
    def last(self) -> BlockCall | None:
        """Return the last call if a graph still references it."""
        return self._last() if self._last is not None else None

    def ended(self) -> None:
        """Release the originals of all tensors that were moved, after a call."""
        self._release(only_done=False)

    def _send(self, call: BlockCall, current: int) -> None:
        for kept in list(call.slices):
            if kept.host is not None or kept.source is None or current in kept.calls:
                continue
            kept.note_changes()
            if kept.changed:  # refused in backward
                continue
            kept.host = host_buffer(kept.nbytes, self._device)
            kept.leaving = self._copies.copy(kept.range.of(kept.source), kept.host)
            self._leaving.add(kept)
            self.counters.out[kept.label] += 1
            self.counters.out_bytes[kept.label] += kept.nbytes
        self._release(only_done=True)

    def _release(self, *, only_done: bool) -> None:
        for kept in list(self._leaving):
            assert kept.leaving is not None
            if only_done and not kept.leaving.done():
                continue
            kept.leaving.wait()
            kept.note_changes()
            kept.source = kept.leaving = None
            self._leaving.discard(kept)
            self.counters.on_device(-kept.nbytes)

    # backward

    def unpack(self, ref: OffloadedRef | InPlaceRef) -> Tensor:
        """Return the tensor, on the device.

        Raises:
            UnsupportedError: it was changed in place before it was released.
        """
        self.collect()
        if isinstance(ref, InPlaceRef):
            return ref.get()
        assert ref.call is not None
        self.reach(ref.call)
        ref.slice.note_changes()
        if ref.slice.changed:
            raise input_changed(ref.slice.label, "input")
        return self.take(ref)

    def take(self, ref: OffloadedRef | InPlaceRef) -> Tensor:
        """Return a tensor that was not changed in place, on the device."""
        if isinstance(ref, InPlaceRef):
            return ref.tensor
        kept = ref.slice
        self._fetch(kept, late=True)
        if kept.arriving is not None:
            kept.arriving.wait()
            kept.arriving = None
        return ref.view()

    def reach(self, call: BlockCall) -> None:
        """Bring back the tensors of `call`, which backward has reached, and of calls before it.

        Fetched copies that no further call of this backward needs are released.
        """
        if self._watch.began():
            self.end_backward()
        if call.number in self._reached:
            return
        self._reached.add(call.number)
        for kept in list(self._here):
            users = [n for n in kept.calls if n in self._calls]
            if all(n in self._reached and n != call.number for n in users):
                self._drop_copy(kept)
        for kept in call.slices:
            self._fetch(kept, late=True)
        before = sorted((n for n in self._calls if n < call.number), reverse=True)
        for number in before[: self._ahead]:
            ahead = self._calls.get(number)  # its graph may just have been dropped
            for kept in list(ahead.slices) if ahead is not None else ():
                self._fetch(kept, late=False)

    def _fetch(self, kept: OffloadedSlice, *, late: bool) -> None:
        """Start to bring back a slice that is not on the device."""
        if kept.is_here:
            return
        assert kept.host is not None
        kept.fetched = torch.empty(kept.nbytes, dtype=torch.uint8, device=self._device)
        kept.arriving = self._copies.copy(kept.host, kept.fetched)
        self._here.add(kept)
        self.counters.back[kept.label] += 1
        self.counters.back_bytes[kept.label] += kept.nbytes
        self.counters.late += late
        self.counters.on_device(kept.nbytes)

    def _drop_copy(self, kept: OffloadedSlice) -> None:
        if kept.arriving is not None:
            kept.arriving.wait()
            self.counters.in_vain += 1
        kept.fetched = kept.arriving = None
        self._here.discard(kept)
        self.counters.on_device(-kept.nbytes)

    def end_backward(self) -> None:
        """Release every fetched copy."""
        with self.lock:
            self._reached.clear()
            for kept in list(self._here):
                self._drop_copy(kept)
            self.collect()

    def collect(self) -> None:
        """Release the memory of slices whose graphs are gone."""
        while self._pending_frees:
            fields = self._pending_frees.popleft()
            for ticket in (fields["leaving"], fields["arriving"]):
                if ticket is not None:
                    ticket.wait()
            self.counters.on_device(-fields["device_bytes"])

    @property
    def nbytes_on_host(self) -> int:
        """Return the bytes in host memory now."""
        self.collect()
        return sum(kept.nbytes for kept in self._slices.values() if kept.host is not None)

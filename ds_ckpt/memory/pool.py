"""A pool of host blocks, taken by shape and dtype, given back, handed out again; and arenas: one
buffer, allocated once, that many tensors are kept in, so that there are no gaps between them.

Pinning memory and faulting in fresh pages cost more than the copies that follow, so blocks are kept
until `trim`. Sizes are rounded up to one of eight classes an octave: a block holds at most an
eighth more than was asked for (or one page), and tensors of nearly the same size share blocks.

Pinning registers memory of the ordinary allocator. torch's own pinned allocator would round each
block up to a power of two, up to twice what is needed, and not say so.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger("ds_ckpt")
PAGE_BYTES = 4096


class Event(Protocol):
    """What `torch.cuda.Event` has: whether the copies before it are through, and a wait for it."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass
class _Block:
    raw: Tensor
    """uint8 [bytes + one page]: where the block's memory comes from."""
    memory: Tensor
    """uint8 [bytes], starts at a page."""
    unpin: Callable[[], object] | None
    """Also called when the block is dropped: its memory must not be freed while page-locked."""
    event: Event | None = None
    """The last owner's copies: the block is not handed out before they are through."""


class HostPool:
    """Thread-safe. A tensor that is never given back keeps its block.

    Args:
        pinned: whether blocks are page-locked. None: where CUDA is available. On a machine whose
            accelerator is the CPU a copy needs no pinned memory, and blocks are plain.

    Raises:
        ValueError: `pinned=True` without CUDA.
    """

    def __init__(self, pinned: bool | None = None) -> None:
        if pinned and not torch.cuda.is_available():
            raise ValueError("pinned host memory needs CUDA, which is not available")
        self._pinned = torch.cuda.is_available() if pinned is None else pinned
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[_Block]] = defaultdict(list)
        self._in_use: dict[int, _Block] = {}
        """By address of the block's first byte."""

    @property
    def pinned(self) -> bool:
        """Whether new blocks are page-locked; false too once the system has refused to."""
        return self._pinned

    @property
    def nbytes_held(self) -> int:
        """Bytes of all blocks, free ones included."""
        with self._lock:
            free = sum(size * len(blocks) for size, blocks in self._free.items())
        return free + self.nbytes_in_use

    @property
    def nbytes_in_use(self) -> int:
        """Bytes of the blocks that are handed out, their rounding included."""
        with self._lock:
            return sum(block.memory.numel() for block in self._in_use.values())

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous host tensor with whatever its block held before; give it back when done."""
        wanted = math.prod(shape) * dtype.itemsize
        if wanted == 0:
            return torch.empty(shape, dtype=dtype)
        size = block_bytes(wanted)
        with self._lock:
            block = _pop_ready(self._free[size])
        if block is None:  # outside the lock: pinning takes milliseconds
            block = self._allocate(size)
        with self._lock:
            self._in_use[block.memory.data_ptr()] = block
        return block.memory[:wanted].view(dtype).view(torch.Size(shape))

    def give_back(self, tensor: Tensor, event: Event | None = None) -> None:
        """Let another use the memory of a tensor that `take` gave (itself or a reshaped view).

        Args:
            event: recorded behind the last asynchronous copy from or to the tensor. Without one
                such copies must have ended.

        Raises:
            ValueError: the tensor is not this pool's, or has been given back before.
        """
        if tensor.numel() == 0:
            return
        with self._lock:
            block = self._in_use.pop(tensor.data_ptr(), None)
            if block is None:
                raise ValueError(
                    f"a tensor of shape {list(tensor.shape)} that this pool has not handed out, or "
                    "that was given back before"
                )
            block.event = event
            self._free[block.memory.numel()].append(block)

    def trim(self) -> int:
        """Release every free block; returns the bytes released. Waits for their last copies."""
        with self._lock:
            blocks = [block for free in self._free.values() for block in free]
            self._free.clear()
        for block in blocks:
            if block.event is not None:
                block.event.synchronize()
            if block.unpin is not None:
                block.unpin()
        return sum(block.memory.numel() for block in blocks)

    def close(self) -> None:
        """Release everything. Tensors still in use stay valid; the pool forgets them.

        Their memory is no longer pinned: no copy may be in flight.
        """
        with self._lock:
            left = list(self._in_use.values())
            self._in_use.clear()
        for block in left:
            if block.unpin is not None:
                block.unpin()
        self.trim()

    def _allocate(self, size: int) -> _Block:
        raw = torch.empty(size + PAGE_BYTES, dtype=torch.uint8)
        start = -raw.data_ptr() % PAGE_BYTES
        memory = raw[start : start + size]
        unpin = _pin(memory) if self._pinned else None
        if self._pinned and unpin is None:
            self._pinned = False
            log.warning(
                "ds_ckpt: the system refused to pin %d bytes of host memory (see ulimit -l); "
                "host buffers stay pageable and copies to them block",
                size,
            )
        return _Block(raw, memory, unpin)


def block_bytes(wanted: int) -> int:
    """`wanted` > 0 rounded up to a multiple of an eighth of the power of two below it, in pages."""
    octave = 1 << max(0, (wanted - 1).bit_length() - 1)
    step = max(PAGE_BYTES, octave // 8)
    return -(-wanted // step) * step


def _pop_ready(blocks: list[_Block]) -> _Block | None:
    for i, block in enumerate(blocks):
        if block.event is None or block.event.query():
            block.event = None
            return blocks.pop(i)
    return None


def _pin(memory: Tensor) -> Callable[[], object] | None:
    """Page-lock in place and tell how to undo it, once; None where the system refuses."""
    register = torch.cuda.cudart().cudaHostRegister
    if int(register(memory.data_ptr(), memory.numel(), 0)) != 0:
        _clear_error()
        return None
    return weakref.finalize(memory, _unpin, memory.data_ptr())


def _clear_error() -> None:
    """Forget CUDA's last error, which a refusal leaves behind.

    The next kernel would raise it as its own, somewhere in the model. torch has no call to clear
    it, but the check behind each launch does. An error that stays is another one, and is raised.
    """
    with contextlib.suppress(RuntimeError):
        _launch()
    _launch()


def _launch() -> None:
    torch.ones(1, device="cuda")


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


# one buffer for many tensors


ALIGNMENT_BYTES = 256
"""Parts begin at a multiple, as the allocators of accelerators do."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """Gives out parts of one uint8 buffer. Not thread-safe.

    The buffer is allocated at the first request, for `parts` requests of that size. What does not
    fit is counted, and the next time that the arena is empty the buffer is allocated anew, for the
    most that was ever asked for at one time.

    Args:
        parts: how many requests like the first one must fit.
        allocate: gives a flat uint8 tensor of so many bytes.
        release: told of a buffer that has been replaced.
    """

    def __init__(
        self,
        parts: int,
        allocate: Callable[[int], Tensor],
        release: Callable[[Tensor], None] = lambda _: None,
    ) -> None:
        self._parts, self._allocate, self._release = parts, allocate, release
        self._buffer: Tensor | None = None
        self._taken: list[tuple[int, int]] = []
        """First byte and size of each part that is out, in order."""
        self._outside = 0
        self._most = 0
        self.refused = 0
        """Requests that did not fit."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return 0 if self._buffer is None else self._buffer.numel()

    @property
    def nbytes_in_use(self) -> int:
        return sum(size for _, size in self._taken)

    def room(self, nbytes: int) -> Tensor | None:
        """uint8 [nbytes] in the buffer, with whatever was there; None where it does not fit."""
        size = _aligned(nbytes)
        if not self._taken:
            self._outside = 0
            self._fit(size)
        assert self._buffer is not None
        start = 0
        for first, taken in self._taken:
            if first - start >= size:
                break
            start = first + taken
        fits = start + size <= self._buffer.numel()
        if fits:
            insort(self._taken, (start, size))
        else:
            self._outside += size
            self.refused += 1
        self._most = max(self._most, self.nbytes_in_use + self._outside)
        return self._buffer[start : start + nbytes] if fits else None

    def _fit(self, size: int) -> None:
        wanted = max(self._most, self._parts * size if self._buffer is None else size)
        if self._buffer is not None and self._buffer.numel() >= wanted:
            return
        if self._buffer is not None:
            self._release(self._buffer)
            self._buffer = None  # before the new one is allocated
        self._buffer = self._allocate(wanted)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in the buffer."""
        if self._buffer is None:
            return False
        return 0 <= tensor.data_ptr() - self._buffer.data_ptr() < self._buffer.numel()

    def give_back(self, part: Tensor) -> None:
        """Let another use the part.

        Raises:
            ValueError: it is not one that `room` gave and that is still out.
        """
        assert self._buffer is not None
        start = part.data_ptr() - self._buffer.data_ptr()
        for index, (first, _) in enumerate(self._taken):
            if first == start:
                del self._taken[index]
                return
        raise ValueError(f"no part of this arena begins at byte {start}")

    def close(self) -> None:
        """Let the buffer go; parts that are still out stay valid as long as they are held."""
        if self._buffer is not None:
            self._release(self._buffer)
        self._buffer, self._taken = None, []


def device_arena(parts: int, device: torch.device) -> Arena:
    """An arena in the device's memory."""
    return Arena(parts, lambda n: torch.empty(n, dtype=torch.uint8, device=device))


class HostArena:
    """An arena in one block of a pool, with the pool behind it for what does not fit.

    Events are not kept for the arena's parts: all copies run on one side stream, in order.
    """

    def __init__(self, parts: int, pool: HostPool) -> None:
        self._pool = pool
        self.arena = Arena(parts, lambda n: pool.take((n,), torch.uint8), pool.give_back)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        wanted = torch.Size(shape).numel() * dtype.itemsize
        part = self.arena.room(wanted) if wanted else None
        if part is None:
            return self._pool.take(shape, dtype)
        return part.view(dtype).view(torch.Size(shape))

    def give_back(self, tensor: Tensor, event: Event | None = None) -> None:
        if self.arena.holds(tensor):
            self.arena.give_back(tensor)
        else:
            self._pool.give_back(tensor, event)
